"""Caches whose model has changed since: read again where the engine keeps them, else refused with what has changed."""

import copy
import gc
import pickle

import changed
import pytest
import torch
from architectures import ARCHITECTURES, randomised, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import caches
import engine

NEW = 4
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])


@pytest.mark.parametrize(
    ("first", "operations"),
    [
        *((first, 2) for first in range(0, 100, 50)),
        *(pytest.param(first, 5, marks=pytest.mark.slow) for first in range(250, 400, 50)),  # `make histories` has more
    ],
)
def test_random_histories_are_right_or_refused(first, operations):
    counts = changed.run(range(first, first + 50), operations)
    assert counts["went on"] > 0
    assert any(name.startswith("refused") for name in counts)


def llama():
    return copy.deepcopy(tiny_model("llama"))


def other_model():
    model = llama()
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(2)  # of which the first layer tells nothing
    return model


def write(model):
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(2)


def go_on(model, out, cache=None, **options):
    cache = out.cache if cache is None else cache
    return engine.generate(model, out.sequences, cache=cache, max_new_tokens=NEW, **options)


def test_a_pickled_cache_goes_on_with_the_same_weights_alone():
    model = llama()
    out = engine.generate(model, IDS, max_new_tokens=NEW)
    again = pickle.dumps(out.cache)
    with pytest.raises(engine.InputError, match=r"another model has filled it \(weights: others\)"):
        go_on(other_model(), out, pickle.loads(again))
    expected = go_on(model, out, copy.deepcopy(out.cache)).tokens
    assert go_on(llama(), out, pickle.loads(again)).tokens == expected
    write(model)
    with pytest.raises(engine.InputError, match="since it was filled, weights were written"):
        go_on(model, out, pickle.loads(pickle.dumps(out.cache)))


def test_a_cache_of_a_model_that_was_freed_is_refused():
    model = llama()
    out = engine.generate(model, IDS, max_new_tokens=NEW)
    del model
    gc.collect()
    with pytest.raises(engine.InputError, match=r"the model that has filled it was freed.*trust_cache=True"):
        go_on(llama(), out)
    with pytest.raises(caches.CacheFileError, match="which model filled this cache is not known"):
        out.cache.save("nowhere")
    assert go_on(llama(), out, trust_cache=True).stats.prompt_tokens == 1


def test_who_vouches_once_goes_on_with_the_same_model():
    model, other = llama(), other_model()
    out = engine.generate(model, IDS, max_new_tokens=NEW)
    second = go_on(other, go_on(other, out, trust_cache=True))
    assert second.stats.prompt_tokens == 1
    with pytest.raises(engine.InputError, match="another model object has filled it"):
        go_on(model, second)
    more = {"input_ids": second.sequences[:, -1:], "attention_mask": torch.ones_like(second.sequences)}
    third = engine.generate(model, more, cache=second.cache, max_new_tokens=NEW, trust_cache=True)
    whole = torch.cat([second.sequences, third.sequences[:, 1:]], dim=1)
    assert engine.generate(model, whole, cache=third.cache, max_new_tokens=NEW).stats.prompt_tokens == 1


def test_a_cache_of_transformers_remembers_too():
    model = llama()
    out = engine.generate(model, IDS, cache=DynamicCache(config=model.config), max_new_tokens=NEW)
    write(model)
    with pytest.raises(engine.InputError, match="weights were written"):
        go_on(model, out)


def test_weights_that_are_written_in_the_middle_of_a_stream():
    model = llama()
    generator = engine.Generator(model, config=engine.EngineConfig(prefix_store_bytes=10**7))
    long = torch.arange(40)[None] % 90 + 2
    stream = generator.stream(long, max_new_tokens=NEW)
    next(stream)
    write(model)
    out = list(stream) and stream.result()
    with pytest.raises(engine.InputError, match="while it was filled, weights were written"):
        go_on(model, out)
    assert generator.generate(long, max_new_tokens=NEW).stats.cached_tokens == 0


def test_a_prefix_is_refused_until_it_is_read_again():
    model = llama()
    generator = engine.Generator(model)
    prefix = generator.prefill(IDS)
    expected = prefix.generate([3, 4], max_new_tokens=NEW).tokens
    write(model)
    with pytest.raises(engine.InputError, match="since it was filled, weights were written"):
        prefix.generate([3, 4], max_new_tokens=NEW)
    with pytest.raises(caches.CacheFileError, match="since it was filled, weights were written"):
        prefix.save("nowhere")
    assert prefix.generate([3, 4], max_new_tokens=NEW, trust_cache=True).stats.prompt_tokens == 2
    assert generator.prefill(IDS).generate([3, 4], max_new_tokens=NEW).tokens != expected


@pytest.fixture
def shipped():
    model = AutoModelForCausalLM.from_pretrained(engine.SHIPPED_MODEL)
    return engine.Generator(model, AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL))


def test_a_chat_reads_again(shipped, tmp_path):
    chat = shipped.chat(max_new_tokens=NEW)
    chat.send("import os")
    shipped.model.model.rotary_emb.inv_freq.mul_(2)
    chat.save(tmp_path / "chat")  # without a cache that is not this model's
    resumed = shipped.chat(resume=tmp_path / "chat", max_new_tokens=NEW)
    assert resumed.cache.total_tokens == 0
    for one in (chat, resumed):
        out = one.send("x = 1")
        assert out.stats.cached_tokens == 0
        assert one.messages == chat.messages
    assert resumed.send("y").stats.cached_tokens > 0


def test_windows_of_other_turns():
    model = randomised(*ARCHITECTURES["mistral"])
    tokenizer = AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)
    model.resize_token_embeddings(len(tokenizer))
    generator = engine.Generator(model, tokenizer, engine.EngineConfig(prefix_store_bytes=10**7))
    chat, long = generator.chat(max_new_tokens=NEW), torch.arange(60)[None] % 90 + 2
    chat.send("import os")
    first = generator.generate(long, max_new_tokens=NEW).sequences
    model.config.sliding_window = 3
    ids = torch.cat([first, long[:, :2]], dim=1)
    assert generator.generate(ids, max_new_tokens=NEW).tokens == engine.generate(model, ids, max_new_tokens=NEW).tokens
    out = chat.send("x = 1")
    assert out.stats.cached_tokens == 0
    assert out.tokens == engine.generate(model, out.sequences[:, :-NEW], max_new_tokens=NEW).tokens


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_copies_of_handles_say_how(shipped, copied):
    with pytest.raises(TypeError, match=r"fork\(\) makes a second one, save\(path\) keeps it"):
        copied(shipped.chat())
    with pytest.raises(TypeError, match=r"save\(path\) keeps it"):
        copied(shipped.prefill("import os"))


def test_stored_prefixes_in_a_folder_are_of_the_weights_that_read_them(tmp_path):
    """A cache that goes to the folder after the model has changed is not written as one of the new weights."""
    options = engine.EngineConfig(prefix_store_bytes=10**7, prefix_store_folder=str(tmp_path))
    model, long = llama(), torch.arange(60)[None] % 90 + 2
    generator = engine.Generator(model, config=options)
    generator.generate(long, max_new_tokens=NEW)
    write(model)
    generator.release()
    again = engine.Generator(model, config=options).generate(long, max_new_tokens=NEW)
    assert (again.tokens, again.stats.cached_tokens) == (engine.generate(model, long, max_new_tokens=NEW).tokens, 0)


def test_a_sink_asks_again_how_keys_are_rotated():
    """What was measured of a model is of its frequencies then."""
    model = randomised(*ARCHITECTURES["llama"])
    options = {"cache": "sink", "cache_config": {"window_length": 8, "num_sink_tokens": 2}, "max_new_tokens": NEW}
    engine.generate(model, IDS, **options)
    model.model.rotary_emb.inv_freq.mul_(1.5)
    with pytest.raises(caches.UnsupportedLayerError, match=r"are not rotated as its configuration says.*\. Use cache="):
        engine.generate(model, IDS, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sink_says_how_to_load_a_model_in_place_of_a_cast(dtype, tmp_path):
    options = {"cache": "sink", "cache_config": {"window_length": 8, "num_sink_tokens": 2}, "max_new_tokens": NEW}
    model = randomised(*ARCHITECTURES["llama"])
    model.save_pretrained(tmp_path)
    name = str(dtype).removeprefix("torch.")
    model.config.max_position_embeddings = 2048  # roundings show far away
    for cast in (model.to(dtype), model.to(torch.float32)):
        with pytest.raises(
            caches.UnsupportedLayerError, match=f"rounded to {name}.*load the model with dtype='{name}'"
        ):
            engine.generate(cast, IDS, **options)
    engine.generate(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=name), IDS, **options)
