"""Models with a cache class of their own, and layers of transformers' own when rows become more."""

import pytest
import torch
import transformers
from architectures import _EXPERTS, prompt, randomised
from exotic import made
from packaging.version import Version
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import caches
import engine

NEW = 16
BEAMS = {"num_beams": 3, "num_return_sequences": 2}


@pytest.fixture(scope="module")
def minimax():
    """Lightning attention beside full attention, with prompts longer than its blocks."""
    return randomised(
        "MiniMaxConfig", _EXPERTS | dict(block_size=4, layer_types=["full_attention", "linear_attention"])
    )


@pytest.fixture(scope="module")
def deepseek_v4():
    return made("deepseek_v4")


def reference(model, inputs, **options):
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)


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


def test_minimax_in_pieces_and_in_the_next_turn(minimax):
    inputs = prompt(pads=0)
    whole = engine.generate(minimax, inputs, max_new_tokens=2 * NEW)
    first = engine.Generator(minimax, config=engine.EngineConfig(prefill_chunk_tokens=5)).generate(
        inputs, max_new_tokens=NEW
    )
    second = engine.generate(minimax, first.sequences, cache=first.cache, max_new_tokens=NEW)
    assert torch.equal(second.sequences, whole.sequences)
    assert second.stats.prompt_tokens == 2


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
def test_beams_after_a_prompt_shorter_than_what_is_compressed(deepseek_v4, tokens):
    """Compressed entries there are none of yet, [rows, 0, width], become as many rows as there are beams."""
    inputs = prompt(tokens=tokens, pads=0)
    out = engine.generate(deepseek_v4, inputs, max_new_tokens=NEW, **BEAMS)
    if Version(transformers.__version__) < Version("5.23"):  # there transformers itself leaves them where they are
        assert out.sequences.shape == (4, tokens + NEW)
    else:
        assert torch.equal(out.sequences, reference(deepseek_v4, inputs, **BEAMS))


def test_copies_share_nothing_that_the_model_writes_into(deepseek_v4, tmp_path):
    """Its layers keep tensors in dicts."""
    generator, options = engine.Generator(deepseek_v4), {"max_new_tokens": NEW}
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
    assert engine.generate(model, ids, max_new_tokens=NEW, prefill_chunk_size=4).tokens == expected.tokens
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
