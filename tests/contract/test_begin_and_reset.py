"""`begin` changes nothing when it raises, and a reset leaves an empty cache: of any number of rows."""

import pytest
import torch
from architectures import four_layers, prompt, tiny_model
from failing_memory import memory

import caches
import engine


def fed(model, cache, ids):
    """The logits after `ids`, by plain calls of one token each."""
    with torch.no_grad():
        for column in ids.split(1, dim=1):
            cache.begin(1)
            logits = model(column, past_key_values=cache).logits[:, -1]
            cache.commit()
    return logits


@pytest.mark.parametrize("name", ["lfm2", "bamba", "llama"])
def test_the_last_step_can_still_be_taken_back(name):
    """Room for the next step is not there: what the states were before the last step has to be."""
    model = tiny_model(name)
    ids = prompt(tokens=65, pads=0)["input_ids"]
    cache = caches.build("dynamic", model.config)
    fed(model, cache, ids[:, :63])
    expected = fed(model, cache, ids[:, 63:64])
    failed = 0
    for moment in range(1, 40):
        with memory(fails_at=moment):
            try:
                cache.begin(1)
            except torch.OutOfMemoryError:
                failed += 1
            else:
                cache.abort()
                break
        assert (cache.total_tokens, cache.is_open) == (64, False)
        cache.crop(-1)
        assert torch.equal(fed(model, cache, ids[:, 63:64]), expected)
    assert failed > 1


@pytest.mark.parametrize("backend", ["static", "offloaded_static", "sliding_window", "hybrid", "mamba", "sink"])
@pytest.mark.parametrize("why", ["a reset", "a first step that failed"])
def test_an_empty_cache_takes_any_number_of_rows(backend, why, monkeypatch):
    model = four_layers({"mamba": "mamba", "sliding_window": "mistral", "hybrid": "gemma2"}.get(backend, "llama"))
    known = caches.recipe(backend).options.option_names()
    options = {"max_cache_len": 40, "window_length": 20} if "sink" in backend else {"max_cache_len": 40}
    cache = caches.build(backend, model.config, **{name: value for name, value in options.items() if name in known})
    if why == "a reset":
        engine.generate(model, prompt(), cache=cache, max_new_tokens=4)
        cache.reset()
    else:
        layers = (model.backbone if backend == "mamba" else model.model).layers
        with monkeypatch.context() as patch:
            patch.setattr(layers[2], "forward", lambda *args, **kwargs: 1 / 0)
            with pytest.raises(engine.GenerationInterrupted):
                engine.generate(model, prompt(), cache=cache, max_new_tokens=4)
    for rows in (4, 1, 3):
        assert cache.max_rows is None
        expected = engine.generate(model, prompt(rows=rows), max_new_tokens=8).sequences
        out = engine.generate(model, prompt(rows=rows), cache=cache, max_new_tokens=8)
        assert torch.equal(out.sequences, expected)
        assert cache.max_rows is None or cache.max_rows >= rows
        cache.reset()
