"""A model with fewer layers than its configuration says, in loops that are not ours."""

import copy
import logging

import pytest
import torch
from architectures import four_layers, prompt
from transformers import DynamicCache

import caches
import engine
from caches.core.row_transfer import deal_rows, gather_rows

NAMES = ["llama", "gemma2", "qwen3", "bamba"]


def shortened(name, layers=2):
    """The model without its last layers; its configuration still has them."""
    model = copy.deepcopy(four_layers(name))
    model.model.layers = model.model.layers[:layers]
    return model


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_layers_cut_off_the_model(name, layers):
    model, inputs = shortened(name, layers), prompt()
    cache = caches.build("dynamic", model.config)
    options = {"max_new_tokens": 9, "do_sample": False}
    expected = model.generate(**inputs, **options, past_key_values=DynamicCache(config=model.config))
    assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), expected)
    assert cache.total_tokens == 13 + 8
    assert torch.equal(engine.generate(model, inputs, max_new_tokens=9).sequences, expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_layers_left_out_by_the_configuration(name):
    """As a model does that drafts for itself: the configuration changes after the cache was built."""
    model, inputs = copy.deepcopy(four_layers(name)), prompt()
    cache = caches.build("dynamic", model.config)
    model.config.num_hidden_layers = 2
    options = {"max_new_tokens": 9, "do_sample": False}
    expected = model.generate(**inputs, **options, past_key_values=DynamicCache(config=model.config))
    assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), expected)


def test_what_no_model_is_known_to_use_is_told(caplog):
    """Two layers of four are used, by code that is no model of transformers'."""
    cache = caches.build("dynamic", four_layers("llama").config)
    with caplog.at_level(logging.WARNING, "caches"):
        for _ in range(3):
            for layer in range(2):
                cache.update(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8), layer)
    assert caplog.text.count("reached 2 of the 4 layers of this dynamic cache (up to layer 1)") == 2
    assert "its 5 tokens were not kept" in caplog.text


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("seen", [0, 7])
def test_a_forward_that_failed_can_be_made_again(name, seen, monkeypatch, caplog):
    model = four_layers(name)
    ids = prompt(pads=0)["input_ids"]
    cache = caches.build("dynamic", model.config)
    with torch.no_grad():
        if seen:
            model(ids[:, :seen], past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[2], "forward", lambda *args, **kwargs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(ids[:, seen:], past_key_values=cache)
        assert cache.get_seq_length() == seen
        with caplog.at_level(logging.WARNING, "caches"):
            logits = model(ids[:, seen:], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(logits, model(ids).logits[:, -1], atol=1e-4, rtol=1e-4)
    assert "reached 2 of the 4 layers" in caplog.text
    assert cache.get_seq_length() == 13


COPIES = {
    "converted": lambda cache: caches.convert(cache, "quantized", residual_length=64),
    "moved": lambda cache: caches.migrate(cache, "offloaded"),
    "selected": lambda cache: caches.select_rows(cache, torch.tensor([0, 1])),
    "joined": lambda cache: caches.join_rows([caches.select_rows(cache, torch.tensor([row])) for row in (0, 1)]),
    "gathered": lambda cache: gather_rows(deal_rows(cache, [1, 1], [None, None])),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_a_copy_waits_for_no_more_layers(name, copied, caplog):
    model, ids = shortened(name), prompt(pads=0)["input_ids"]
    cache = caches.build("dynamic", model.config)
    with torch.no_grad():
        model(ids[:, :7], past_key_values=cache)
        cache.crop(0)  # the step of the model is settled
        both = [copy.deepcopy(cache), COPIES[copied](cache)]
        for column in range(7, 13):
            logits = [model(ids[:, column : column + 1], past_key_values=one).logits for one in both]
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert [one.total_tokens for one in both] == [13, 13]
    assert not caplog.records
