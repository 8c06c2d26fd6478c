"""`max_cache_bytes`: kept before more memory is taken, by rows in parts, and on models that cannot be studied."""

from __future__ import annotations

import logging

import pytest
import torch
from architectures import tiny_model
from encoder_decoders import source, tiny_encoder_decoder
from fallbacks import OutAt, prompt
from multimodal import seeing_model, seen_prompt

import caches
import engine
from configs import EngineConfig
from engine.decoding.forward_executor import ForwardExecutor


def long_prompt(rows=1):
    return torch.randint(5, 90, (rows, 30), generator=torch.Generator().manual_seed(1))


def within(most, action, **options):
    generator = engine.Generator(tiny_model("llama"), config=EngineConfig(max_cache_bytes=most, over_budget=action))
    live = caches.build("dynamic", generator.model.config)
    return generator.generate(long_prompt(), cache=live, max_new_tokens=120, **options)


def test_a_budget_is_kept_before_more_memory_is_taken():
    undisturbed = engine.generate(tiny_model("llama"), long_prompt(), max_new_tokens=120)
    per_token = undisturbed.stats.cache_bytes / 192
    out = within(int(100 * per_token), "offload")
    assert torch.equal(out.sequences, undisturbed.sequences)
    assert [fallback.name for fallback in out.stats.fallbacks] == ["offload"]
    assert out.stats.fallbacks[0].tokens == 64
    assert out.stats.fallbacks[0].bytes_before <= 100 * per_token
    assert out.cache.device_bytes <= 100 * per_token

    with pytest.raises(engine.OutOfMemoryError, match="max_cache_bytes=") as raised:
        within(int(100 * per_token), "error")
    assert len(raised.value.partial.tokens[0]) == 64 - 30 + 1
    assert raised.value.partial.cache.device_bytes <= 100 * per_token


def test_a_budget_that_memory_was_out_for_is_kept_later(monkeypatch):
    offload, calls = ForwardExecutor.offload, []

    def fails_once(self):
        calls.append(self.cache.total_tokens)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return offload(self)

    monkeypatch.setattr(ForwardExecutor, "offload", fails_once)
    undisturbed = engine.generate(tiny_model("llama"), long_prompt(), max_new_tokens=120)
    out = within(int(undisturbed.stats.cache_bytes * 100 / 192), "offload", on_oom=["release"])
    assert torch.equal(out.sequences, undisturbed.sequences)
    assert [fallback.name for fallback in out.stats.fallbacks] == ["release", "offload"]
    assert calls == [64, 64]


def test_a_quantized_cache_is_offloaded_with_its_options():
    model, inputs = tiny_model("llama"), torch.randint(5, 90, (2, 120))
    cache = {"cache": "quantized", "cache_config": {"nbits": 2, "residual_length": 16}}
    undisturbed = engine.generate(model, inputs, **cache, max_new_tokens=20)
    config = EngineConfig(max_cache_bytes=undisturbed.stats.cache_bytes * 7 // 8)
    out = engine.Generator(model, config=config).generate(inputs, **cache, max_new_tokens=20)
    assert torch.equal(out.sequences, undisturbed.sequences)
    assert [one.name for one in out.stats.fallbacks] == ["offload"]
    options = out.cache.stack.layout.config
    assert (options.name, options.nbits, options.residual_length) == ("offloaded_quantized", 2, 16)


def test_a_window_that_fits_the_budget_goes_on():
    undisturbed = engine.generate(tiny_model("llama"), long_prompt(), max_new_tokens=120)
    most = int(undisturbed.stats.cache_bytes * 100 / 192)
    out = within(most, "slide")
    assert [fallback.name for fallback in out.stats.fallbacks] == ["slide"]
    assert out.stats.cache == "sliding_window"
    assert out.stats.cache_bytes <= most
    assert torch.equal(out.sequences[:, :66], undisturbed.sequences[:, :66])
    assert not torch.equal(out.sequences, undisturbed.sequences)
    # The window is the one that was announced: from there on the text is that of a window from the beginning.
    window = int(out.stats.fallbacks[0].what.split("window of ")[1].split()[0])
    live = caches.apply_window(prefix_cache(undisturbed.sequences[:, :64]), window)
    rest = engine.generate(tiny_model("llama"), undisturbed.sequences[:, :65], cache=live, max_new_tokens=85)
    assert torch.equal(out.sequences, rest.sequences)


def test_a_budget_for_less_than_a_token_is_out_of_memory():
    with pytest.raises(engine.OutOfMemoryError, match=r"over_budget='slide' is not possible: .*window_length=0"):
        within(200, "slide")


def prefix_cache(ids):
    model = tiny_model("llama")
    cache = caches.build("dynamic", model.config)
    model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("action", ["offload", "slide", "error"])
def test_a_budget_too_small_for_the_prompt_is_kept_from_the_beginning(action):
    undisturbed = engine.generate(tiny_model("llama"), prompt(rows=1, columns=100), max_new_tokens=20)
    most = undisturbed.stats.cache_bytes * 2 // 3
    generator = engine.Generator(tiny_model("llama"), config=EngineConfig(max_cache_bytes=most, over_budget=action))
    if action == "error":
        with pytest.raises(caches.CapacityError, match=f"max_cache_bytes={most:,}"):
            generator.generate(prompt(rows=1, columns=100), max_new_tokens=20)
        return
    out = generator.generate(prompt(rows=1, columns=100), max_new_tokens=20)
    assert [fallback.name for fallback in out.stats.fallbacks] == [action]
    assert out.cache.device_bytes <= most
    assert (action == "offload") == torch.equal(out.sequences, undisturbed.sequences)


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


# Models whose cache cannot be studied without weights: the budget is kept while the run goes on.

NEW = 20


def whisper():
    return tiny_encoder_decoder("whisper"), source("whisper")


def llava():
    return seeing_model("llava"), seen_prompt("llava")


def within_of(most, action, model, inputs):
    config = EngineConfig(max_cache_bytes=most, over_budget=action)
    return engine.Generator(model, config=config).generate(inputs, max_new_tokens=NEW)


@pytest.mark.parametrize("made", [whisper, llava])
def test_a_budget_that_is_wide_enough_changes_nothing(made):
    model, inputs = made()
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    out = within_of(10 * whole.stats.cache_bytes, "error", model, inputs)
    assert torch.equal(out.sequences, whole.sequences)
    assert out.stats.fallbacks == ()


def test_a_model_that_cannot_be_studied_is_kept_to_its_budget(caplog):
    model, inputs = whisper()
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    most = whole.stats.cache_bytes // 2
    with caplog.at_level(logging.INFO, logger="engine"):
        out = within_of(most, "offload", model, inputs)
    assert any("while the run goes on" in record.message for record in caplog.records)
    assert torch.equal(out.sequences, whole.sequences)
    assert [one.name for one in out.stats.fallbacks] == ["offload"]
    assert out.cache.device_bytes <= most
    with pytest.raises(engine.OutOfMemoryError, match="max_cache_bytes="):
        within_of(most, "error", model, inputs)


def test_a_model_of_another_auto_class_is_studied():
    """By its own class, so it is known before anything runs."""
    model, inputs = llava()
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    with pytest.raises(caches.CapacityError, match="max_cache_bytes="):
        within_of(whole.stats.cache_bytes // 2, "error", model, inputs)
