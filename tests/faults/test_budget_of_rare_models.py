"""`max_cache_bytes` on models whose cache cannot be studied without weights: it is kept while the run goes on."""

from __future__ import annotations

import logging

import pytest
import torch
from encoder_decoders import source, tiny_encoder_decoder
from multimodal import seeing_model, seen_prompt

import engine
from caches import CapacityError
from configs import EngineConfig

NEW = 20


def whisper():
    return tiny_encoder_decoder("whisper"), source("whisper")


def llava():
    return seeing_model("llava"), seen_prompt("llava")


def within(most, action, model, inputs):
    config = EngineConfig(max_cache_bytes=most, over_budget=action)
    return engine.Generator(model, config=config).generate(inputs, max_new_tokens=NEW)


@pytest.mark.parametrize("made", [whisper, llava])
def test_a_budget_that_is_wide_enough_changes_nothing(made):
    model, inputs = made()
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    out = within(10 * whole.stats.cache_bytes, "error", model, inputs)
    assert torch.equal(out.sequences, whole.sequences)
    assert out.stats.fallbacks == ()


def test_a_model_that_cannot_be_studied_is_kept_to_its_budget(caplog):
    model, inputs = whisper()
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    most = whole.stats.cache_bytes // 2
    with caplog.at_level(logging.INFO, logger="engine"):
        out = within(most, "offload", model, inputs)
    assert any("while the run goes on" in record.message for record in caplog.records)
    assert torch.equal(out.sequences, whole.sequences)
    assert [one.name for one in out.stats.fallbacks] == ["offload"]
    assert out.cache.device_bytes <= most
    with pytest.raises(engine.OutOfMemoryError, match="max_cache_bytes="):
        within(most, "error", model, inputs)


def test_a_model_of_another_auto_class_is_studied():
    """By its own class, so it is known before anything runs."""
    model, inputs = llava()
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    with pytest.raises(CapacityError, match="max_cache_bytes="):
        within(whole.stats.cache_bytes // 2, "error", model, inputs)
