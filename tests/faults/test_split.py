"""Rows that are computed part after part: what splitting them takes, and what still holds afterwards."""

from __future__ import annotations

import pytest
import torch
from architectures import tiny_model
from fallbacks import OutAt

import caches
import engine
from caches.protocol import capabilities
from caches.transfer.split_rows import halves
from configs import EngineConfig
from engine.memory.peak_memory import PeakMemory


@pytest.mark.parametrize("backend", ["dynamic", "static"])
def test_splitting_takes_about_a_layer(backend):
    """And what the caller holds is emptied on the way."""
    model = tiny_model("llama")
    options = {"max_cache_len": 128} if backend == "static" else {}
    cache = caches.build(backend, model.config, **options)
    with PeakMemory(model) as live, torch.no_grad():
        model(torch.randint(3, 90, (8, 100)), past_key_values=cache)
        cache.crop(0)
        before, layers, peaks = cache.bytes, len(cache.layers), []
        split: caches.EngineCache | None = cache
        for _ in range(3):
            live.most = start = live._now
            split = halves(split, torch.arange(8))
            peaks.append(live.most - start)
    assert len(split.parts) == 8
    assert cache.bytes == 0
    assert max(peaks) <= 1.5 * before / layers
    assert split.bytes <= before


def test_parts_say_that_their_keys_are_codes():
    """Then prompts are not read in smaller chunks, which would read the codes of the chunks before."""
    model = tiny_model("llama")
    for backend, is_quantized in (("dynamic", False), ("quantized", True)):
        cache = caches.build(backend, model.config)
        with torch.no_grad():
            model(torch.randint(3, 90, (4, 100)), past_key_values=cache)
        cache.crop(0)
        assert capabilities(halves(cache, torch.arange(4))).is_quantized == is_quantized


def long_prompt(rows: int) -> torch.Tensor:
    return torch.randint(5, 90, (rows, 30), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("action", ["offload", "slide", "error"])
def test_a_budget_is_kept_by_rows_in_parts(action):
    model, prompts = tiny_model("llama"), long_prompt(4)
    undisturbed = engine.generate(model, prompts, max_new_tokens=100)
    most = undisturbed.stats.cache_bytes // 2
    config = EngineConfig(max_cache_bytes=most, over_budget=action, on_oom=("split",))
    live = caches.build("dynamic", model.config)
    with OutAt(model, [5]):
        generator = engine.Generator(model, config=config)
        if action == "error":
            with pytest.raises(engine.OutOfMemoryError, match="max_cache_bytes=") as raised:
                generator.generate(prompts, cache=live, max_new_tokens=100)
            assert raised.value.partial.stats.cache_bytes <= most
            return
        out = generator.generate(prompts, cache=live, max_new_tokens=100)
    assert [one.name for one in out.stats.fallbacks] == ["split", action]
    assert out.stats.fallbacks[1].bytes_after <= most
    assert (action == "offload") == torch.equal(out.sequences, undisturbed.sequences)
