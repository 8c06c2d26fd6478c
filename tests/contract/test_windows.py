"""Forgetting equals hiding: the text of a cache with a window is that of a model that keeps everything and may not
look at what the cache has forgotten."""

import pytest
import torch
from architectures import WINDOW, prompt, tiny_model

import caches
import engine

NEW = 16


def text_with_hidden_columns(model, inputs, windows: dict[str, int]) -> torch.Tensor:
    """Greedy text, everything computed anew in every step; `windows`: columns a token may look at, by kind of mask."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    kinds = caches.mask_kinds(model.config)
    for _ in range(NEW):
        column = torch.arange(ids.shape[1])
        distance = column[:, None] - column

        def visible(window, distance=distance, mask=mask):
            seen = ((distance >= 0) & (distance < window))[None, None] & (mask != 0)[:, None, None]
            seen = seen | (distance == 0)  # pads see themselves
            if model.config._attn_implementation == "eager":
                return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
            return seen

        masks = (
            visible(windows[kinds]) if isinstance(kinds, str) else {k: visible(windows[v]) for k, v in kinds.items()}
        )
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        with torch.no_grad():
            out = model(ids, attention_mask=masks, position_ids=positions, use_cache=False)
        ids = torch.cat([ids, out.logits[:, -1:].argmax(dim=-1)], dim=1)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    return ids


@pytest.mark.parametrize("chunk", [None, 3], ids=["whole", "in pieces"])
@pytest.mark.parametrize("pads", [0, 4])
@pytest.mark.parametrize(
    ("name", "window"),
    [("llama", 6), ("llama", 1), ("llama", 500), ("gpt2", 6), ("opt", 7), ("gemma2", 5), ("qwen3", 5)],
)
def test_an_imposed_window(name, window, pads, chunk):
    model, inputs = tiny_model(name), prompt(pads=pads)
    expected = text_with_hidden_columns(model, inputs, {"all": window, "window": min(window, WINDOW)})
    generator = engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=chunk))
    options = {"cache": "sliding_window", "cache_config": {"window_length": window}}
    out = generator.generate(inputs, **options, max_new_tokens=NEW)
    assert torch.equal(out.sequences, expected)
    if window < 500:
        assert not torch.equal(expected, model.generate(**inputs, max_new_tokens=NEW, do_sample=False))


@pytest.mark.parametrize("cache", ["dynamic", "static", "sliding_window"])
def test_the_models_own_window(cache):
    model, inputs = tiny_model("mistral"), prompt()
    out = engine.generate(model, inputs, cache=cache, max_new_tokens=NEW)
    assert torch.equal(out.sequences, text_with_hidden_columns(model, inputs, {"window": WINDOW}))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_memory_stays_constant(name):
    model, inputs = tiny_model(name), prompt()
    options = {"cache": "sliding_window", "cache_config": {"window_length": 6}}
    sizes = {engine.generate(model, inputs, **options, max_new_tokens=new).stats.cache_bytes for new in (5, 50, 80)}
    assert len(sizes) == 1


def test_the_next_turn_under_an_imposed_window():
    model, inputs = tiny_model("llama"), prompt(pads=0)
    options = {"cache": "sliding_window", "cache_config": {"window_length": 6}}
    first = engine.generate(model, inputs, **options, max_new_tokens=9)
    ids = torch.cat([first.sequences, prompt(pads=0, tokens=5, seed=3)["input_ids"]], dim=1)
    so_far = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    second = engine.generate(model, so_far, cache=first.cache, max_new_tokens=NEW)
    assert second.stats.prompt_tokens == 2 * 6
    assert torch.equal(second.sequences, text_with_hidden_columns(model, so_far, {"all": 6}))


def test_an_imposed_window_in_a_foreign_loop():
    """Only our own loop can hide columns from the tokens of one step: the others have to come one by one."""
    model, ids = tiny_model("llama"), prompt(pads=0)["input_ids"]
    with torch.no_grad():
        ours = caches.build("sliding_window", model.config, window_length=6)
        with pytest.raises(caches.StepError, match=r"a step of 13 tokens after 0 would look further back .* of 6"):
            model(ids, past_key_values=ours)
        model(ids[:, :6], past_key_values=ours)
        with pytest.raises(caches.StepError, match="a step of 2 tokens after 6"):
            model(ids[:, 6:8], past_key_values=ours)
        for column in range(6, 13):
            logits = model(ids[:, column : column + 1], past_key_values=ours).logits[:, -1]
    mask = torch.ones_like(ids)
    expected = text_with_hidden_columns(model, {"input_ids": ids, "attention_mask": mask}, {"all": 6})
    assert torch.equal(logits.argmax(dim=-1), expected[:, 13])


def test_hybrid_of_windows_alone():
    """transformers takes this name for every cache of a fixed size."""
    model, inputs = tiny_model("mistral"), prompt()
    options = {"cache_implementation": "hybrid", "max_new_tokens": 14}
    out = engine.generate(model, inputs, **options)
    assert out.stats.cache == "hybrid"
    assert torch.equal(out.sequences, model.generate(**inputs, do_sample=False, max_new_tokens=14))


def test_refusals():
    build = caches.build
    with pytest.raises(
        caches.UnsupportedLayerError, match=r"layer 1 \(full_attention\) looks at everything\. Give a window"
    ):
        build("sliding_window", tiny_model("gemma2").config)
    with pytest.raises(caches.UnsupportedLayerError, match="which looks at chunks"):
        build("sliding_window", tiny_model("llama4_text").config, window_length=5)
    with pytest.raises(caches.UnsupportedLayerError, match=r"all look at everything\. Use cache='static'"):
        build("hybrid", tiny_model("llama").config, max_cache_len=9)
    with pytest.raises(caches.UnsupportedLayerError, match="cache='mamba'"):
        build("sliding_window", tiny_model("mamba").config)
    with pytest.raises(
        caches.UnsupportedLayerError, match=r"layer 1 \(full_attention\) keeps keys and values, which cache='mamba' has"
    ):
        build("mamba", tiny_model("bamba").config)
    model = tiny_model("bloom")
    with pytest.raises(caches.UnsupportedLayerError, match="does not mark the model as one that takes such masks"):
        engine.generate(model, prompt(), cache="sliding_window", cache_config={"window_length": 5})
