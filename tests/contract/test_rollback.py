"""Rejected tokens leave no trace in the text, whatever keeps them: columns, windows or states."""

import functools

import pytest
import torch
from architectures import four_layers, pairs, prompt, tiny_model
from encoder_decoders import source, tiny_encoder_decoder
from helpers import looks_ahead

import engine

pytestmark = pytest.mark.covering("values", "pairs")

NEW = 16


NAMES = [
    "llama",
    "mistral",
    "gemma2",
    "llama4_text",
    "mamba",
    "mamba2",
    "jamba",
    "bamba",
    "falcon_h1",
    "lfm2",
    "qwen3_next",
]


@functools.cache
def text_of(model):
    return model.generate(**prompt(), max_new_tokens=NEW, do_sample=False)


PAIRS = [pair for pair in pairs(NAMES) if pair[1] != "none"]


@pytest.mark.parametrize(("name", "cache", "ahead"), [(*pair, (1, 3)[number % 2]) for number, pair in enumerate(PAIRS)])
def test_tokens_fed_ahead_and_taken_back(name, cache, ahead):
    model, inputs, text = tiny_model(name), prompt(), text_of(tiny_model(name))
    out = engine.generate(model, inputs, cache=cache, strategy=looks_ahead(text, ahead), max_new_tokens=NEW)
    assert out.sequences.shape[1] > 13 + NEW - ahead - 2
    assert torch.equal(out.sequences, text[:, : out.sequences.shape[1]])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_with_an_encoder(cache):
    model, inputs = tiny_encoder_decoder("bart"), source("bart")
    text = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    out = engine.generate(model, inputs, cache=cache, strategy=looks_ahead(text, 2), max_new_tokens=NEW)
    assert torch.equal(out.sequences, text[:, : out.sequences.shape[1]])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["mamba2", "bamba", "lfm2", "falcon_h1"])
@pytest.mark.parametrize("new_tokens", [1, 2, 9])
def test_a_failed_step_leaves_no_trace_in_states(name, cache, new_tokens, monkeypatch):
    model, inputs = four_layers(name), prompt()
    layers = getattr(model, "model", None) or model.backbone
    layer, calls = layers.layers[2], []
    forward = layer.forward

    def fails_at_last(*args, **kwargs):
        calls.append(0)
        out = forward(*args, **kwargs)
        return 1 / 0 if len(calls) == new_tokens else out

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", fails_at_last)
        with pytest.raises(engine.GenerationInterrupted, match="ZeroDivisionError") as failure:
            engine.generate(model, inputs, cache=cache, max_new_tokens=NEW)
    part = failure.value.partial
    whole = text_of(model)
    assert torch.equal(part.sequences, whole[:, : 13 + new_tokens - 1])
    rest = NEW - new_tokens + 1
    mask = torch.ones_like(part.sequences)
    mask[0, :4] = 0
    out = engine.generate(model, part.sequences, attention_mask=mask, cache=part.cache, max_new_tokens=rest)
    assert torch.equal(out.sequences, whole)


@pytest.mark.parametrize("name", ["mamba2", "bamba", "lfm2"])
def test_a_processor_that_fails_after_the_forward(name):
    model, inputs = tiny_model(name), prompt()
    calls = []

    def fails(ids, scores):
        calls.append(0)
        return scores if len(calls) < 6 else 1 / 0

    with pytest.raises(engine.GenerationInterrupted) as failure:
        engine.generate(model, inputs, logits_processor=[fails], max_new_tokens=NEW)
    part = failure.value.partial
    assert part.cache.total_tokens == 13 + 4
    out = engine.generate(model, part.sequences, cache=part.cache, max_new_tokens=NEW - 5)
    assert torch.equal(out.sequences, model.generate(**inputs, max_new_tokens=NEW, do_sample=False))


@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_a_rows_end_goes_into_its_state(name):
    """LeftPadding after a row's end cannot be hidden from a state: such a batch is not continued."""
    model, inputs = tiny_model(name), prompt(pads=0)
    whole = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    end = int(whole[0, 16])
    first = engine.generate(model, inputs, max_new_tokens=NEW, eos_token_id=end)
    more = torch.cat([first.sequences, prompt(pads=0, tokens=3)["input_ids"]], dim=1)
    with pytest.raises(engine.InputError, match="pad tokens between others change what comes behind"):
        engine.generate(model, more, cache=first.cache, max_new_tokens=5)
