"""The first fallback drops what a step makes anew."""

from __future__ import annotations

import torch
from architectures import tiny_model
from fallbacks import OutAt, prompt

import caches
import engine
from engine.decoding.forward_executor import ForwardExecutor


def test_scratch_memory_is_dropped(monkeypatch):
    model = tiny_model("llama")
    cache = caches.build("offloaded", model.config)
    held, release = [], ForwardExecutor.release

    def watched(executor):
        held.append(sum(tensor.nbytes for tensor in cache.scratch.tensors()))
        release(executor)
        held.append(sum(tensor.nbytes for tensor in cache.scratch.tensors()))

    monkeypatch.setattr(ForwardExecutor, "release", watched)
    whole = engine.generate(model, prompt(), max_new_tokens=8)
    with OutAt(model, [4]):
        out = engine.generate(model, prompt(), cache=cache, max_new_tokens=8, on_oom=["release"])
    assert held[0] > 0
    assert held[1] == 0
    assert torch.equal(out.sequences, whole.sequences)
