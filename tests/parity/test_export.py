"""An exported step is the engine's own: the same tokens, from whatever the cache holds."""

import pytest
import torch
from architectures import prompt, tiny_model

import caches
import engine
from caches.transfer.export_buffers import Buffers

NEW = 14  # a window's buffer is compacted on the way


@pytest.fixture(autouse=True)
def _short_buffers():
    """Not here: a graph is for buffers of one length."""


def go_on(step, model, cache, inputs, new):
    """Read the prompt with the engine, then let the exported step write."""
    cache.reset()
    sequences = engine.generate(model, inputs, cache=cache, max_new_tokens=1).sequences
    mask = inputs["attention_mask"]
    for _ in range(new - 1):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        cache.begin(1, graph=True)
        with torch.no_grad():
            logits = step(**engine.step_inputs(model, cache, sequences[:, -1:], mask))
        cache.commit()
        sequences = torch.cat([sequences, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return sequences


@pytest.mark.parametrize(
    ("name", "cache", "options"),
    [
        ("llama", "static", {"max_cache_len": 64}),
        ("mistral", "sliding_window", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama", "sliding_window", {"window_length": 6}),
                ("gemma2", "hybrid", {"max_cache_len": 64}),
                ("bamba", "static", {"max_cache_len": 64}),
                ("lfm2", "static", {"max_cache_len": 64}),
                ("mamba", "mamba", {}),
            )
        ),
    ],
)
def test_one_program_for_two_fillings(name, cache, options):
    model = tiny_model(name)
    live, fresh = (caches.build(cache, model.config, **options) for _ in range(2))
    engine.generate(model, prompt(seed=3), cache=live, max_new_tokens=1)
    step = engine.export_step(model, live).module()
    for seed, pads in ((0, 4), (1, 0)):
        inputs = prompt(seed=seed, pads=pads)
        fresh.reset()
        expected = engine.generate(model, inputs, cache=fresh, max_new_tokens=NEW).sequences
        assert torch.equal(go_on(step, model, live, inputs, NEW), expected)


@pytest.mark.slow
def test_a_saved_program_needs_nothing_from_here(tmp_path):
    model, inputs = tiny_model("llama"), prompt(pads=0)
    cache = caches.build("static", model.config, max_cache_len=64)
    ids = engine.generate(model, inputs, cache=cache, max_new_tokens=1).sequences
    torch.export.save(engine.export_step(model, cache), tmp_path / "step.pt2")
    step = torch.export.load(tmp_path / "step.pt2").module()
    cache.reset()
    for column in range(13, 13 + NEW - 1):
        visible = (torch.arange(64) <= column).expand(2, 1, 1, 64)
        place = torch.full((2, 1), column)
        logits = step(
            input_ids=ids[:, -1:],
            position_ids=place,
            attention_mask=visible,
            write_index=place[0],
            seen=torch.tensor(column),
        )
        ids = torch.cat([ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    assert torch.equal(ids, model.generate(**inputs, max_new_tokens=NEW, do_sample=False))


def test_to_export_leaves_the_cache_as_it_was():
    model, inputs = tiny_model("bamba"), prompt()
    cache = caches.build("static", model.config, max_cache_len=64)
    engine.generate(model, inputs, cache=cache, max_new_tokens=5)
    before = {name: buffer.clone() for name, buffer in Buffers(cache).named_buffers()}
    engine.export_step(model, cache)
    assert cache.total_tokens == 13 + 4
    assert not cache.is_open
    for name, buffer in Buffers(cache).named_buffers():
        assert torch.equal(buffer, before.pop(name))
    assert not before


def test_what_cannot_be_exported():
    model = tiny_model("llama")
    with pytest.raises(caches.StepError, match="fixed cache that has read a prompt"):
        engine.export_step(model, caches.build("static", model.config, max_cache_len=64))
    cache = engine.generate(model, prompt(), cache="dynamic", max_new_tokens=1).cache
    with pytest.raises(caches.StepError, match="tensors of this dynamic cache are not there to stay"):
        engine.export_step(model, cache)
    with pytest.raises(caches.UnsupportedLayerError, match="was built for"):
        engine.export_step(tiny_model("mistral"), cache)
    with pytest.raises(engine.OptionError, match="NoCache has no tensors"):
        engine.export_step(model, caches.build("none", model.config))
    with pytest.raises(engine.OptionError, match="GPTNeoForCausalLM"):
        engine.export_step(tiny_model("gpt_neo"), cache)
