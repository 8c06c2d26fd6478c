"""Models that keep no keys and values between their forwards run without a cache, and say so."""

import logging

import pytest
import torch
from architectures import prompt, randomised

import engine
from caches.platform.warn_once import warn_once

NEW = 15
_XLM = dict(
    vocab_size=101,
    emb_dim=32,
    n_layers=3,
    n_heads=4,
    causal=True,
    max_position_embeddings=256,
    mask_token_id=5,
    use_lang_emb=False,
)
MODELS = {
    "openai-gpt": ("OpenAIGPTConfig", dict(vocab_size=101, n_embd=32, n_layer=3, n_head=4, n_positions=256)),
    "xlm": ("XLMConfig", _XLM),
}


@pytest.fixture(params=MODELS)
def model(request):
    warn_once.cache_clear()
    return randomised(*MODELS[request.param])


@pytest.mark.parametrize("cache", [None, "none"])
def test_the_text_is_that_of_transformers(model, cache, caplog):
    inputs = prompt()
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    with caplog.at_level(logging.WARNING, logger="engine"):
        out = engine.generate(model, inputs, cache=cache, max_new_tokens=NEW)
        engine.generate(model, inputs, cache=cache, max_new_tokens=1)
    assert torch.equal(out.sequences, expected)
    assert out.stats.cache == "none"
    said = [record for record in caplog.messages if "runs with cache='none'" in record]
    assert len(said) == (cache is None)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_cache_asked_for_is_refused(model, cache):
    with pytest.raises(engine.OptionError, match=r"takes no cache of keys and values .* use cache='none'"):
        engine.generate(model, prompt(), cache=cache, max_new_tokens=NEW)
    with pytest.raises(engine.OptionError, match="use cache='none'"):
        engine.Generator(model, config=engine.EngineConfig(cache=cache)).generate(prompt(), max_new_tokens=NEW)
