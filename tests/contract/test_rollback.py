"""Rejected tokens leave no trace in the text, whatever keeps them: columns, windows or states."""

import functools

import pytest
import torch
from architectures import pairs, prompt, tiny_model
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
