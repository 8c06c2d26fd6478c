"""Texts of any length: what is kept per token gets room as tokens come, and nothing else changes."""

import copy
import gc
import resource
import time

import pytest
import torch
from architectures import prompt, tiny_model
from on_disk import limited
from references import draft_of
from torch.utils._python_dispatch import TorchDispatchMode

import caches
import engine
from engine.decoding import feeder, token_buffer
from engine.model import columns
from engine.model.columns import room_for, widened

WITHOUT_END = 10**9
SINK = {"window_length": 32}


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that was made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numbers = max(self.numbers, made.untyped_storage().nbytes() // made.itemsize)
        return made


def little_memory():
    """So that what takes far too much is an error and does not stop the machine."""
    with open("/proc/self/status") as status:
        data = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
    return limited(resource.RLIMIT_DATA, data + 2**29)


def boundless():
    """A model that can tell any number of positions apart."""
    model = copy.copy(tiny_model("llama"))
    model.config = copy.deepcopy(model.config)
    model.config.max_position_embeddings = 2**40
    return model


@pytest.mark.parametrize("cache", ["sink", "quantized_sink"])
def test_a_text_without_end_begins_at_once(cache):
    options = SINK | ({"residual_length": 4} if cache == "quantized_sink" else {})
    model, bounded = tiny_model("llama"), {"cache": cache, "cache_config": options}
    expected = engine.generate(model, prompt(), **bounded, max_new_tokens=45)
    with little_memory(), Largest() as largest:
        stream = engine.stream(model, prompt(), **bounded, max_new_tokens=WITHOUT_END)
        tokens = [next(stream).tokens[0] for _ in range(2 * 45)]
        out = stream.result()
    assert tokens[::2] == expected.tokens[0]
    assert out.stats.cache_bytes == expected.stats.cache_bytes < 60_000
    assert largest.numbers < 50_000


def test_it_ends_as_others_do():
    begun = time.perf_counter()
    out = engine.generate(
        tiny_model("llama"), prompt(), cache="sink", cache_config=SINK, max_new_tokens=WITHOUT_END, max_time=0.2
    )
    assert time.perf_counter() - begun < 10
    assert out.finish_reasons == ["time", "time"]
    row = out.tokens[0]
    stops = [lambda ids, scores: torch.full((len(ids),), ids.shape[1] >= 13 + 20)]
    again = engine.generate(
        tiny_model("llama"),
        prompt(),
        cache="sink",
        cache_config=SINK,
        max_new_tokens=WITHOUT_END,
        stopping_criteria=stops,
    )
    assert row  # however few tokens a busy machine comes to
    assert again.tokens[0][: len(row)] == row[:20]


@pytest.mark.parametrize("cache", ["dynamic", "sliding_window", "offloaded", "quantized", "none"])
def test_caches_that_grow_take_what_they_need(cache):
    options = {"window_length": 32} if cache == "sliding_window" else None
    with little_memory():
        stream = engine.stream(boundless(), prompt(), cache=cache, cache_config=options, max_new_tokens=WITHOUT_END)
        pieces = [next(stream) for _ in range(6)]
        out = stream.result()
    assert out.stats.fallbacks == ()
    expected = engine.generate(tiny_model("llama"), prompt(), cache=cache, cache_config=options, max_new_tokens=3)
    assert [piece.tokens[0] for piece in pieces if piece.row == 0] == expected.tokens[0]


@pytest.mark.parametrize("cache", ["static", "offloaded_static"])
def test_caches_of_fixed_size_refuse(cache):
    refusal = rf"cache='{cache}' makes room .* 13 of the prompt and 1,000,000,000 new ones .* max_cache_len .*'sink'"
    with pytest.raises(caches.CapacityError, match=refusal):
        engine.generate(boundless(), prompt(), cache=cache, max_new_tokens=WITHOUT_END)


# The same text, wherever room is made.

CALLS = {
    "greedy": ("llama", {}),
    "pads": ("llama", {"pads": 3}),
    "windows": ("gemma2", {"pads": 3}),
    "sink": ("llama", {"pads": 3, "cache": "sink", "cache_config": SINK}),
    "static": ("llama", {"pads": 3, "cache": "static"}),
    "states": ("bamba", {"pads": 3}),
    "none": ("llama", {"pads": 3, "cache": "none"}),
    "in pieces": ("llama", {"pads": 3, "prefill_chunk_size": 4}),
    "rows that end": ("llama", {"pads": 3, "eos_token_id": list(range(0, 101, 9))}),
    "samples": ("llama", {"pads": 3, "do_sample": True, "num_return_sequences": 2}),
    "beams": ("llama", {"pads": 3, "num_beams": 3}),
    "contrastive": ("llama", {"penalty_alpha": 0.6, "top_k": 3}),
    "lookup": ("llama", {"pads": 3, "prompt_lookup_num_tokens": 3}),
    "draft": ("llama", {"pads": 3, "draft": True}),
    "token types": ("gpt2", {"pads": 3, "token_type_ids": torch.tensor([[7], [8]]).expand(2, 13)}),
    "guidance": ("llama", {"pads": 3, "guidance_scale": 1.5}),
}


@pytest.mark.parametrize("call", CALLS)
def test_room_is_made_without_a_trace(call, monkeypatch):
    name, options = CALLS[call]
    model, options = tiny_model(name), {"max_new_tokens": 40, "output_logits": call != "contrastive"} | options
    inputs = prompt(pads=options.pop("pads", 0))
    if options.pop("draft", False):
        options["assistant_model"] = draft_of(name)

    def generated():
        torch.manual_seed(0)
        out = engine.generate(model, inputs, **options)
        assert out.cache is None or out.cache.log is None or out.cache.log.ids.shape[1] >= out.cache.total_tokens
        return out

    expected = generated()
    made = []
    for module in (feeder, columns, token_buffer):
        monkeypatch.setattr(module, "widened", lambda tensor, *more: made.append(0) or widened(tensor, *more))
    monkeypatch.setattr(columns, "_LEAST", 2)
    found = generated()
    assert len(made) > 4
    assert torch.equal(found.sequences, expected.sequences)
    assert found.tokens == expected.tokens
    for one, other in zip(found.logits or (), expected.logits or (), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("call", ["rows that end", "samples", "beams"])
def test_nor_where_tokens_are_read_late(call, monkeypatch):
    monkeypatch.setattr(token_buffer, "reads_late", lambda device: True)
    test_room_is_made_without_a_trace(call, monkeypatch)


def test_positions_of_the_caller(monkeypatch):
    inputs = prompt(pads=3)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0) + 5
    expected = engine.generate(tiny_model("llama"), inputs, max_new_tokens=30)
    monkeypatch.setattr(columns, "_LEAST", 2)
    assert torch.equal(engine.generate(tiny_model("llama"), inputs, max_new_tokens=30).sequences, expected.sequences)


# When there is none.


@pytest.mark.parametrize(
    ("module", "first"), [(feeder, 1), (columns, 2), (token_buffer, 3)], ids=["ids fed", "masks", "texts"]
)
def test_without_room_the_run_does_with_less(module, first, monkeypatch):
    """first: which call is the first one that makes more room."""
    model, inputs = tiny_model("llama"), prompt(pads=3)
    expected = engine.generate(model, inputs, max_new_tokens=20)
    monkeypatch.setattr(columns, "_LEAST", 2)
    calls = [0]

    def fails(tensor, *more):
        calls[0] += 1
        if calls[0] in (first, first + 1):
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        return widened(tensor, *more)

    monkeypatch.setattr(module, "widened", fails)
    gc.freeze()  # a recovery collects garbage, and nothing that was there before is any
    out = engine.generate(model, inputs, max_new_tokens=20, on_oom=["release", "offload"])
    assert [fallback.name for fallback in out.stats.fallbacks] == ["release", "offload"]
    assert torch.equal(out.sequences, expected.sequences)
    calls[0] = 0
    with pytest.raises(engine.OutOfMemoryError, match="can't allocate memory") as raised:
        engine.generate(model, inputs, max_new_tokens=20, on_oom=[])
    partial = raised.value.partial.sequences
    assert torch.equal(partial, expected.sequences[:, : partial.shape[1]])
    assert partial.shape[1] > 13


def test_rooms():
    assert [room_for(10, most) for most in (5, 200, 300)] == [5, 200, 266]
    assert [room_for(columns, 1000, 100) for columns in (90, 101, 160, 2000)] == [100, 150, 160, 1000]
    wide = widened(torch.tensor([[1, 2], [3, 4]]), 4, torch.tensor([7, 8]))
    assert wide.tolist() == [[1, 2, 7, 7], [3, 4, 8, 8]]
    with torch.inference_mode():
        wide = widened(torch.zeros(1, 2), 4)
    wide += 1  # also outside of it
