"""Layer kinds that only one model family has: transformers' own layer inside our dynamic cache."""

import pytest
import torch
import transformers
from architectures import _EXPERTS, _TINY, WINDOW, prompt, randomised
from packaging.version import Version

import caches
import engine

NEW = 14
MODELS = {
    "deepseek_v4": (
        "DeepseekV4Config",
        _TINY
        | dict(num_key_value_heads=1, head_dim=16, q_lora_rank=16, num_experts_per_tok=2, n_routed_experts=4,
               moe_intermediate_size=32, sliding_window=WINDOW, o_groups=2, o_lora_rank=8, index_n_heads=4,
               index_head_dim=16, index_topk=2, partial_rotary_factor=0.5, num_nextn_predict_layers=0,
               layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                            "sliding_attention"],
               compress_rates=dict(compressed_sparse_attention=2, heavily_compressed_attention=4),
               mlp_layer_types=["hash_moe", "moe", "moe", "moe"]),
    ),
    "minimax_m3": (
        "MiniMaxM3VLTextConfig",
        _EXPERTS
        | dict(dense_intermediate_size=64, shared_intermediate_size=32, rotary_dim=4, index_n_heads=2,
               index_head_dim=8, index_block_size=4, index_topk_blocks=2, mlp_layer_types=["dense", "sparse"] * 2,
               layer_types=["full_attention", "minimax_m3_sparse"] * 2),
    ),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        _TINY
        | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
               linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
               hc_count=2, hc_lowrank=8, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=4,
               indexer_compress_ratio=2, layer_types=["linear_attention", "indexed_attention"] * 2,
               ple_layer_ids=[1], ngram_size=3, heads_per_ngram=2, ngram_vocab_size_base=50,
               make_ngram_vocab_size_divisible_by=8, eos_token_id=2,
               rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1],
                                    partial_rotary_factor=1.0)),
    ),
}  # fmt: skip


def made(name):
    config_class, arguments = MODELS[name]
    named_otherwise = name == "qwen4_exp" and Version(transformers.__version__) < Version("5.23")  # its layers
    if named_otherwise or not hasattr(transformers, config_class):
        pytest.skip("this release of transformers does not know it yet")
    return randomised(config_class, arguments)


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
            live.settle()
        step(cache, ids[:, :5] * 0 + 7)
        with pytest.raises(caches.StepError, match="takes back whole steps only"):
            cache.settle(drop=2)
        cache.settle(drop=5)
        step(cache, ids[:, :3] * 0 + 9)
        cache.abort()
        assert cache.seen == untouched.seen == 13
        if "Qwen4" not in type(model).__name__:  # its states keep what it takes to go back one step
            assert cache.bytes == untouched.bytes
        torch.testing.assert_close(step(cache, ids[:, :1]), step(untouched, ids[:, :1]))
        cache.settle()
    with pytest.raises(caches.StepError, match="only the last step can be taken back"):
        cache.crop(-1)
    cache.reset()
    assert cache.seen == cache.bytes == 0


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
    with pytest.raises(engine.Interrupted) as failure:
        engine.generate(model, inputs, max_new_tokens=NEW, on_oom=[])
    partial = failure.value.partial
    rest = engine.generate(model, partial.sequences, cache=partial.cache, max_new_tokens=NEW - 7)
    assert torch.equal(rest.sequences, expected)


def test_static_refuses_them(model):
    with pytest.raises(caches.UnsupportedLayer, match=r"only transformers' own layer knows.*cache='dynamic'"):
        engine.generate(model, prompt(), cache="static", max_new_tokens=NEW)


def test_a_kind_that_nobody_has_tried_is_refused():
    config = transformers.LlamaConfig(**_TINY | dict(num_hidden_layers=2))
    config.layer_types = ["full_attention", "reference_sliding_attention"]
    for cache in ("dynamic", "static"):
        options = {"max_cache_len": 9} if cache == "static" else {}
        with pytest.raises(caches.UnsupportedLayer, match=r"reference_sliding_attention.* keeps something unknown"):
            caches.build(cache, config, **options)
