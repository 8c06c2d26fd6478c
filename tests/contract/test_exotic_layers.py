"""Layer kinds that only one model family has, as transformers' own layers inside our dynamic cache; models with a cache
class of their own."""

import pytest
import torch
import transformers
from architectures import _EXPERTS, _TINY, prompt, randomised
from exotic import MODELS, made
from packaging.version import Version
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import caches
import engine

NEW = 14
BEAMS = {"num_beams": 3, "num_return_sequences": 2}


@pytest.fixture(params=MODELS)
def model(request):
    return made(request.param)


@pytest.fixture(scope="module")
def minimax():
    """Lightning attention beside full attention, with prompts longer than its blocks."""
    return randomised(
        "MiniMaxConfig", _EXPERTS | dict(block_size=4, layer_types=["full_attention", "linear_attention"])
    )


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


@pytest.mark.parametrize("name", [*MODELS, "minimax"])
def test_in_pieces_and_in_the_next_turn(name, minimax):
    model, inputs = minimax if name == "minimax" else made(name), prompt(pads=0)
    whole = engine.generate(model, inputs, max_new_tokens=2 * NEW)
    first = engine.generate(model, inputs, max_new_tokens=NEW, prefill_chunk_size=5)
    second = engine.generate(model, first.sequences, cache=first.cache, max_new_tokens=NEW)
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


# Models with a cache class of their own, and layers when rows become more.


@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded", "quantized"])
def test_minimax(minimax, cache):
    inputs = prompt()
    out = engine.generate(minimax, inputs, cache=cache, max_new_tokens=NEW)
    assert torch.equal(out.sequences, reference(minimax, inputs))


def test_minimax_with_beams(minimax):
    """The cache of its own does not reorder the states of its lightning attention: without a cache nothing is wrong."""
    inputs = prompt()
    out = engine.generate(minimax, inputs, max_new_tokens=NEW, **BEAMS)
    assert torch.equal(out.sequences, reference(minimax, inputs, use_cache=False, **BEAMS))


def test_minimax_refuses_caches_of_transformers(minimax):
    for theirs in (MiniMaxCache(), transformers.DynamicCache()):
        with pytest.raises(caches.UnsupportedLayerError, match=r"'minimax' keep states .* use cache='dynamic'"):
            engine.generate(minimax, prompt(), past_key_values=theirs, max_new_tokens=NEW)


def test_minimax_takes_no_other_class_in_transformers_own_loop(minimax):
    with pytest.raises(ValueError, match="MiniMax uses cache of its own"):
        reference(minimax, prompt(), past_key_values=caches.build("dynamic", minimax.config))


def test_minimax_is_planned(minimax):
    plan = engine.plan(minimax, prompt_tokens=40, max_new_tokens=NEW)
    assert {"dynamic", "static"} <= {one.cache for one in plan.backends if one.fits}


@pytest.mark.parametrize("tokens", [1, 3])
def test_beams_after_a_prompt_shorter_than_what_is_compressed(tokens):
    """Compressed entries there are none of yet, [rows, 0, width], become as many rows as there are beams."""
    model, inputs = made("deepseek_v4"), prompt(tokens=tokens, pads=0)
    out = engine.generate(model, inputs, max_new_tokens=NEW, **BEAMS)
    if Version(transformers.__version__) < Version("5.23"):  # there transformers itself leaves them where they are
        assert out.sequences.shape == (4, tokens + NEW)
    else:
        assert torch.equal(out.sequences, reference(model, inputs, **BEAMS))


def test_copies_share_nothing_that_the_model_writes_into(tmp_path):
    """Its layers keep tensors in dicts."""
    generator, options = engine.Generator(made("deepseek_v4")), {"max_new_tokens": NEW}
    first, *others = (prompt(rows=1, tokens=tokens, pads=0, seed=tokens)["input_ids"] for tokens in (13, 5, 6))
    asked = [torch.cat([first, other], dim=1) for other in (*others, others[0])]
    expected = [generator.generate(ids, **options).tokens for ids in asked]
    prefix = generator.prefill(first)
    for ids, tokens in zip(asked, expected, strict=True):
        assert prefix.generate(ids[:, 13:], **options).tokens == tokens
    for copied in (caches.branch(prefix.cache), caches.convert(prefix.cache, "dynamic")):
        for ids, tokens in zip(asked, expected, strict=True):
            assert generator.generate(ids, cache=caches.branch(copied), **options).tokens == tokens
    prefix.save(tmp_path / "prefix")  # keys and values are one tensor
    saved = generator.prefill(resume=tmp_path / "prefix")
    for ids, tokens in zip(asked, expected, strict=True):
        assert saved.generate(ids[:, 13:], **options).tokens == tokens


def test_layers_with_an_index_and_states_read_on():
    model, ids = made("qwen4_exp"), prompt(rows=1, pads=0)["input_ids"]
    expected = engine.generate(model, ids, max_new_tokens=NEW)
    assert engine.generate(model, ids, max_new_tokens=NEW, prompt_lookup_num_tokens=3).tokens == expected.tokens
    first = engine.generate(model, ids, max_new_tokens=4)
    rest = engine.generate(model, first.sequences, cache=first.cache, max_new_tokens=NEW - 4)
    assert torch.equal(rest.sequences, expected.sequences)


def test_positions_of_a_forward_that_died_in_a_foreign_loop():
    model, ids = made("qwen4_exp"), prompt(pads=0)["input_ids"]
    cache = caches.build("dynamic", model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        dies = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, :3], past_key_values=cache)
        dies.remove()
        with pytest.raises(caches.StepError, match=r"positions of 16 tokens here, but there are 14.*Reset the cache"):
            model(ids[:, :1], past_key_values=cache)
        cache.reset()
        again = model(ids, past_key_values=cache).logits
        torch.testing.assert_close(again, model(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_reformer_counts_its_tokens_itself(options):
    """It takes no cache of keys and values, and fails where it has to lengthen positions that it was given."""
    model = randomised(
        "ReformerConfig",
        dict(vocab_size=101, hidden_size=32, attention_head_size=8, num_attention_heads=4, feed_forward_size=64,
             attn_layers=["local", "local"], is_decoder=True, local_attn_chunk_length=8, axial_pos_embds=False,
             max_position_embeddings=256, pad_token_id=0, eos_token_id=None),
    )  # fmt: skip
    inputs = prompt(pads=0)
    expected = model.generate(**inputs, max_new_tokens=5, do_sample=False, use_cache=False, **options)
    assert torch.equal(engine.generate(model, inputs, max_new_tokens=5, **options).sequences, expected)
