"""A run in which memory is out in the last layer of chosen forwards."""

import gc

import torch
from architectures import tiny_model
from helpers import try_facts

import engine

NEW = 8
OOM = {
    "accelerator": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    "python": MemoryError,
}


class OutAt:
    """Raises in the last decoder layer of the forwards that are named, counted from 0."""

    def __init__(self, model, forwards, error=OOM["cpu"]):
        try_facts(model)
        self.forwards, self.error, self.count, self.raised = set(forwards), error, -1, 0
        self.hooks = [
            model.register_forward_pre_hook(self.begin),
            model.model.layers[-1].register_forward_hook(self.end_layer),
        ]

    def begin(self, module, inputs):
        self.count += 1

    def end_layer(self, module, inputs, outputs):
        if self.count in self.forwards:
            self.raised += 1
            raise self.error()

    def __enter__(self):
        gc.freeze()  # a recovery collects garbage, and nothing that was there before is any
        return self

    def __exit__(self, *raised):
        for hook in self.hooks:
            hook.remove()


def prompt(rows=3, columns=40):
    ids = torch.randint(5, 90, (rows, columns), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        ids[row, : 3 * row], mask[row, : 3 * row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def run(forwards, on_oom, error=OOM["cpu"], inputs=None, **options):
    model = tiny_model("llama")
    with OutAt(model, forwards, error) as out:
        result = engine.generate(
            model, inputs or prompt(), max_new_tokens=NEW, on_oom=on_oom, output_scores=True, **options
        )
    assert out.raised == len(set(forwards))
    return result


def expected(inputs=None, **options):
    return engine.generate(tiny_model("llama"), inputs or prompt(), max_new_tokens=NEW, output_scores=True, **options)


def same(out, reference):
    assert torch.equal(out.sequences, reference.sequences)
    torch.testing.assert_close(out.scores, reference.scores, atol=1e-4, rtol=1e-4)
    return [fallback.name for fallback in out.stats.fallbacks]
