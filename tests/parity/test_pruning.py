"""Code that shortens a cache in a hook, as kvpress does: transformers' text, or a refusal."""

import pytest
import torch
from architectures import prompt, suiting, tiny_model
from helpers import new_cache
from pruning import largest, last, pruning
from transformers import DynamicCache

import caches
import engine

NEW = 12


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("choose", [largest(9), last(6)], ids=["largest norms", "last"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_transformers_cache(name, choose, seed):
    model, ids = tiny_model(name), prompt(rows=2, pads=0, tokens=20, seed=seed)["input_ids"]
    theirs, ours = DynamicCache(), DynamicCache()
    options = {"max_new_tokens": NEW, "do_sample": False}
    with pruning(model, choose) as before:
        expected = model.generate(ids, past_key_values=theirs, **options)
        out = engine.generate(model, ids, cache=ours, **options)
    assert before == [20] * len(before)
    assert torch.equal(out.sequences, expected)
    assert ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_several_texts(options):
    model, ids = tiny_model("llama"), prompt(rows=1, pads=0, tokens=20)["input_ids"]
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    with pruning(model, last(6)):
        torch.manual_seed(4)
        expected = model.generate(ids, past_key_values=DynamicCache(), **options)
        torch.manual_seed(4)
        out = engine.generate(model, ids, cache=DynamicCache(), **options)
    assert torch.equal(out.sequences, expected)


def test_a_later_turn():
    model, ids = tiny_model("llama"), prompt(rows=1, pads=0, tokens=20)["input_ids"]
    turn, options = torch.tensor([[50, 51, 52]]), {"max_new_tokens": NEW, "do_sample": False}
    theirs, ours = DynamicCache(), DynamicCache()
    with pruning(model, largest(9)):
        first = model.generate(ids, past_key_values=theirs, **options)
        assert torch.equal(engine.generate(model, ids, cache=ours, **options).sequences, first)
    whole = torch.cat([first, turn], dim=1)
    out = engine.generate(model, whole, cache=ours, **options)
    assert (out.stats.cached_tokens, ours.get_seq_length()) == (20 + NEW - 1, 9 + 2 * NEW - 1 + 3)
    rest = engine.generate(model, ids, max_new_tokens=1, cache=DynamicCache()).sequences
    assert rest.shape[1] == 21, "the model is as it was"


def test_layers_of_different_lengths_are_refused():
    model, ids = tiny_model("llama"), prompt(rows=1, pads=0, tokens=20)["input_ids"]
    lengths = iter([9, 8, 7, 6])
    with (
        pruning(model, lambda keys: last(next(lengths))(keys)),
        pytest.raises(engine.GenerationInterrupted, match="shorten all layers alike"),
    ):
        engine.generate(model, ids, cache=DynamicCache(), max_new_tokens=NEW)


def test_a_shortened_cache_gives_no_tokens_back():
    model, ids = tiny_model("llama"), prompt(rows=1, pads=0, tokens=20)["input_ids"]
    ours = DynamicCache()
    with pruning(model, last(6)):
        engine.generate(model, ids, cache=ours, max_new_tokens=3)
    driven = caches.driven(ours)
    assert driven.total_tokens == 22
    with pytest.raises(caches.StepError, match="14 of its 22 tokens are evicted"):
        driven.crop(-1)
    driven.reset()
    assert driven.total_tokens == 0


@pytest.mark.parametrize("cache", suiting("llama"))
def test_caches_of_ours(cache):
    """They show a hook the tokens of the step, or say that they cannot; they refuse to be shortened."""
    model, ids = tiny_model("llama"), prompt(rows=1, pads=0, tokens=20)["input_ids"]
    if cache == "none":
        pytest.skip("it has no layers")
    ours = new_cache(cache, model)
    why = "were assigned .* cache=transformers.DynamicCache|read in the middle of a step, .* use cache='dynamic'"
    with pruning(model, last(6)) as before, pytest.raises(engine.GenerationInterrupted, match=why):
        engine.generate(model, ids, cache=ours, max_new_tokens=3)
    assert before in ([], [20])
    assert ours.total_tokens == 0
    assert (before == [20]) == (cache in ("dynamic", "static", "sliding_window", "sink"))


def test_keys_in_a_hook_are_those_of_the_step():
    model, ids, seen = tiny_model("llama"), prompt(rows=1, pads=0, tokens=20)["input_ids"], []

    def look(module, args, kwargs, output):
        seen.append(kwargs["past_key_values"].layers[module.layer_idx].keys.shape[-2])

    for generate in (engine.generate, type(model).generate):
        hooks = [layer.self_attn.register_forward_hook(look, with_kwargs=True) for layer in model.model.layers]
        generate(model, ids, past_key_values=caches.build("dynamic", model.config), max_new_tokens=3, do_sample=False)
        for hook in hooks:
            hook.remove()
    assert seen == [20] * 4 + [21] * 4 + [22] * 4 + ([20] * 4 + [21] * 4 + [22] * 4)
