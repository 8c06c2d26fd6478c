"""Prompts given as embeddings."""

import functools

import pytest
import torch
from architectures import ARCHITECTURES, pairs, prompt, tiny_model

import engine

pytestmark = pytest.mark.covering("values", "pairs")

NEW = 12


def embedded(model, shift=0.3):
    """A padded batch as embeddings that belong to no token, its mask, and ids that could stand beside them."""
    inputs = prompt()
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    embeds += shift * torch.randn(embeds.shape, generator=torch.Generator().manual_seed(1))
    return {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}, inputs["input_ids"]


@functools.cache
def transformers_says(name, named):
    model = tiny_model(name)
    inputs, ids = embedded(model)
    return model.generate(**with_ids(inputs, ids, named), max_new_tokens=NEW, do_sample=False)


def with_ids(inputs, ids, named):
    return inputs | {"input_ids": ids[:, -named:]} if named else inputs


@pytest.mark.parametrize("named", [0, 5, 13], ids=["no ids", "ids of the end", "ids of all"])
@pytest.mark.parametrize("chunk", [None, 5], ids=["whole", "chunked"])
@pytest.mark.parametrize(("name", "cache"), pairs(ARCHITECTURES))
def test_the_text_is_that_of_transformers(name, cache, chunk, named):
    if cache == "none" and chunk is not None:
        pytest.skip("without a cache a prompt cannot be read in pieces")
    model = tiny_model(name)
    inputs = with_ids(*embedded(model), named)
    config = engine.EngineConfig(prefill_chunk_tokens=chunk)
    out = engine.Generator(model, config=config).generate(inputs, cache=cache, max_new_tokens=NEW)
    assert torch.equal(out.sequences, transformers_says(name, named))
    assert out.stats.prompt_tokens == 2 * 13 - 4


def test_embeddings_of_the_ids_are_the_ids():
    model = tiny_model("llama")
    inputs, ids = embedded(model, shift=0)
    out = engine.generate(model, inputs, max_new_tokens=NEW)
    expected = engine.generate(model, ids, attention_mask=inputs["attention_mask"], max_new_tokens=NEW)
    assert out.tokens == expected.tokens
    assert not torch.equal(out.sequences, engine.generate(model, embedded(model)[0], max_new_tokens=NEW).sequences)


def test_ids_beside_the_embeddings_tell_the_pads():
    model = tiny_model("llama")
    inputs, ids = embedded(model)
    del inputs["attention_mask"]
    expected = model.generate(**inputs, input_ids=ids, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(engine.generate(model, **inputs, input_ids=ids, max_new_tokens=NEW).sequences, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_conversation_goes_on_from_its_embeddings(cache):
    model = tiny_model("mistral")
    inputs, _ = embedded(model)
    config = {"max_cache_len": 64} if cache == "static" else None
    first = engine.generate(model, inputs, cache=cache, cache_config=config, max_new_tokens=NEW)
    assert first.cache.log is None
    new = model.get_input_embeddings()(torch.cat([first.sequences, torch.tensor([[7, 8], [9, 10]])], dim=1)).detach()
    whole = {
        "inputs_embeds": torch.cat([inputs["inputs_embeds"], new], dim=1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, NEW + 2, dtype=torch.long)], dim=1),
    }
    with pytest.raises(engine.InputError, match="cannot be checked: its first layer holds the last 7 of"):
        engine.generate(model, whole, cache=first.cache, max_new_tokens=NEW)
    second = engine.generate(model, whole, cache=first.cache, trust_cache=True, max_new_tokens=NEW)
    assert torch.equal(second.sequences, model.generate(**whole, max_new_tokens=NEW, do_sample=False))
    assert second.stats.prompt_tokens == 2 * 3


def test_streams_and_failures_count_the_new_tokens_only():
    model = tiny_model("llama")
    inputs, _ = embedded(model)
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    stream = engine.stream(model, inputs, max_new_tokens=NEW)
    for _ in range(2 * 7):
        next(stream)
    part = stream.result()
    assert torch.equal(part.sequences, whole.sequences[:, :7])
    assert part.cache.total_tokens == 13 + 6


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"inputs_embeds": torch.zeros(2, 13, 31)},
            engine.InputError,
            r"shape \[2, 13, 31\] .* \[2 rows, columns, 32\]",
        ),
        ({"inputs_embeds": torch.zeros(2, 13, 32, dtype=torch.long)}, engine.InputError, "int64"),
        ({"input_ids": torch.ones(3, 13, dtype=torch.long)}, engine.InputError, "3 rows"),
        ({"input_ids": torch.ones(2, 14, dtype=torch.long)}, engine.InputError, "14 token ids but only 13 columns"),
        ({"attention_mask": torch.ones(2, 12)}, engine.InputError, r"\[2, 12\], but the embeddings have \[2, 13\]"),
        ({"inputs_embeds": torch.zeros(2, 0, 32), "attention_mask": None}, engine.InputError, "the prompt is empty"),
    ],
    ids=["width", "integers", "rows", "too many ids", "mask", "empty"],
)
def test_what_does_not_fit_is_refused(change, error, message):
    inputs, _ = embedded(tiny_model("llama"))
    with pytest.raises(error, match=message):
        engine.generate(tiny_model("llama"), **(inputs | change), max_new_tokens=NEW)


def test_a_model_that_takes_none(monkeypatch):
    model = tiny_model("llama")
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda input_ids, past_key_values=None: forward(input_ids))
    with pytest.raises(engine.OptionError, match="takes no inputs_embeds"):
        engine.generate(model, embedded(model)[0], max_new_tokens=NEW)


def test_what_needs_ids_beside_embeddings_needs_a_cache():
    model = tiny_model("gemma3n_text")
    inputs, _ = embedded(model)
    assert engine.generate(model, inputs, max_new_tokens=3).stats.new_tokens == 6
    with pytest.raises(engine.OptionError, match="looks up more of every token by its id"):
        engine.generate(model, inputs, cache="none", max_new_tokens=3)
