"""One decode step as a `torch.export` program: a file of its own, to run without this package."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from caches import Cache
from caches.transfer.convert import can_migrate
from caches.transfer.export_buffers import Buffers, places
from engine.errors import OptionError
from engine.model.forward import ModelRunner
from engine.model.loading import unwrapped
from engine.model.masks import Columns
from engine.model.model_lock import turn_of


def export_step(model: PreTrainedModel, cache: Cache) -> torch.export.ExportedProgram:
    """The step of one token per row of `model` on a fixed `cache` that has read a prompt, whatever it was.

    The program takes, by keyword:
    input_ids, position_ids: LongTensors [rows, 1].
    attention_mask: what the token may look at, bool [rows, 1, 1, columns of the cache] (or what is added to scores,
        where the model computes attention itself); a dict of such by layer type where layers differ, None where there
        is nothing but states.
    write_index: LongTensor [groups], the column that the token gets, one per group of layers that look equally far
        back; a cache that forgets nothing has one group, and the column is the number of tokens before it.
    seen: LongTensor [], the tokens before it.

    It returns logits [rows, vocabulary] and writes the keys, values and states into its buffers, `cache.layer_0_keys`
    and so on, which are the tensors of `cache` until the program is saved: with `step_inputs` the cache goes on.
    """
    model = unwrapped(model)
    ModelRunner(model).check_graph("export_step")
    if not (can_migrate(cache) and len(cache.parts) == 1):
        raise OptionError(f"a {type(cache).__name__} has no tensors that can be exported: use cache='static'")
    with turn_of(model):  # whose parameters have no numbers while it is traced
        cache.check_fits(model.config)
        step = _Step(model, cache)
        cache.begin(1, graph=True)
        try:
            device = next(step.cache.buffers()).device
            inputs = step_inputs(model, cache, torch.zeros(cache.batch_size, 1, dtype=torch.long, device=device))
            with torch.no_grad():
                return torch.export.export(step, (), inputs, strict=False)
        finally:
            cache.abort()


def step_inputs(
    model: PreTrainedModel, cache: Cache, input_ids: torch.Tensor, mask: torch.Tensor | None = None
) -> dict[str, Any]:
    """What the program of `export_step` takes in the step that was opened with `cache.begin(1, graph=True)`.

    mask: [rows, tokens before and this one], 0 where a pad is; None when there are no pads.
    """
    end = cache.total_tokens + 1
    if mask is None:
        mask = torch.ones(len(input_ids), end, dtype=torch.long, device=input_ids.device)
    return ModelRunner(unwrapped(model)).graph_inputs(input_ids, Columns(mask, end), cache, end) | places(cache)


class _Step(torch.nn.Module):
    def __init__(self, model: PreTrainedModel, cache: Cache):
        super().__init__()
        self.model, self.cache = model, Buffers(cache)
        self._runner = ModelRunner(model)

    def forward(self, write_index: torch.Tensor, seen: torch.Tensor, **inputs: Any) -> torch.Tensor:
        with self.cache.in_use(write_index, seen) as cache:
            return self._runner.step_logits(inputs, cache)
