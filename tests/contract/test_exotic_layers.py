"""Layer kinds that only one model family has: transformers' own layer inside our dynamic cache."""

import pytest
import torch
import transformers
from architectures import _TINY, prompt
from exotic import MODELS, made
from packaging.version import Version

import caches
import engine

NEW = 14


@pytest.fixture(params=MODELS, scope="module")
def model(request):
    return made(request.param)


def reference(model, inputs, **options):
    return model.generate(**inputs, **({"max_new_tokens": NEW, "do_sample": False} | options))


@pytest.mark.parametrize("cache", ["dynamic", "none"])
def test_the_text_is_that_of_transformers(model, cache):
    inputs = prompt()
    expected = reference(model, inputs, use_cache=cache != "none")
    assert torch.equal(engine.generate(model, inputs, cache=cache, max_new_tokens=NEW).sequences, expected)


def test_in_transformers_own_loops(model):
    inputs = prompt()
    ours = caches.build("dynamic", model.config)
    assert torch.equal(reference(model, inputs, past_key_values=ours), reference(model, inputs))
    if "V4" in type(model).__name__ and Version(transformers.__version__) < Version("5.23"):
        return  # there transformers itself leaves the compressed entries where they are when beams change places
    ours = caches.build("dynamic", model.config)
    assert torch.equal(
        reference(model, inputs, num_beams=3, past_key_values=ours), reference(model, inputs, num_beams=3)
    )


def test_the_next_turn(model):
    inputs = prompt(pads=0)
    first = engine.generate(model, inputs, max_new_tokens=NEW)
    second = engine.generate(model, first.sequences, cache=first.cache, max_new_tokens=NEW)
    whole = engine.generate(model, inputs, max_new_tokens=2 * NEW)
    assert torch.equal(second.sequences, whole.sequences)
    assert second.stats.prompt_tokens == 2


def test_a_step_is_undone_as_a_whole(model):
    ids = prompt(pads=0)["input_ids"]
    cache, untouched = (caches.build("dynamic", model.config) for _ in range(2))

    def step(live, tokens):
        live.begin(tokens.shape[1])
        return model(tokens, past_key_values=live).logits[:, -1]

    with torch.no_grad():
        for live in (cache, untouched):
            step(live, ids)
            live.commit()
        step(cache, ids[:, :5] * 0 + 7)
        with pytest.raises(caches.StepError, match="takes back whole steps only"):
            cache.commit(rejected=2)
        cache.commit(rejected=5)
        step(cache, ids[:, :3] * 0 + 9)
        cache.abort()
        assert cache.total_tokens == untouched.total_tokens == 13
        if "Qwen4" not in type(model).__name__:  # its states keep what it takes to go back one step
            assert cache.bytes == untouched.bytes
        torch.testing.assert_close(step(cache, ids[:, :1]), step(untouched, ids[:, :1]))
        cache.commit()
    with pytest.raises(caches.StepError, match="only the last step can be taken back"):
        cache.crop(-1)
    cache.reset()
    assert cache.total_tokens == cache.bytes == 0


def test_a_failed_forward_leaves_no_trace(model, monkeypatch):
    inputs = prompt()
    expected = reference(model, inputs)
    calls = 0
    forward = type(model.model.layers[-1]).forward

    def fails_once(self, *arguments, **options):
        nonlocal calls
        calls += self is model.model.layers[-1]
        if calls == 8:
            calls += 1
            raise MemoryError("injected")
        return forward(self, *arguments, **options)

    monkeypatch.setattr(type(model.model.layers[-1]), "forward", fails_once)
    with pytest.raises(engine.GenerationInterrupted) as failure:
        engine.generate(model, inputs, max_new_tokens=NEW, on_oom=[])
    partial = failure.value.partial
    rest = engine.generate(model, partial.sequences, cache=partial.cache, max_new_tokens=NEW - 7)
    assert torch.equal(rest.sequences, expected)


def test_static_refuses_them(model):
    with pytest.raises(caches.UnsupportedLayerError, match=r"only transformers' own layer knows.*cache='dynamic'"):
        engine.generate(model, prompt(), cache="static", max_new_tokens=NEW)


def test_a_kind_that_nobody_has_tried_is_refused():
    config = transformers.LlamaConfig(**_TINY)
    config.layer_types = ["full_attention", "reference_sliding_attention"]
    for cache in ("dynamic", "static"):
        options = {"max_cache_len": 9} if cache == "static" else {}
        with pytest.raises(
            caches.UnsupportedLayerError, match=r"reference_sliding_attention.* keeps something unknown"
        ):
            caches.build(cache, config, **options)
