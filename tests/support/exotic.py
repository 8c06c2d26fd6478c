"""Models with layer kinds that only their family has."""

from functools import cache

import pytest
import transformers
from architectures import _EXPERTS, _TINY, WINDOW, randomised
from packaging.version import Version

_FOUR = dict(num_hidden_layers=4)
MODELS = {
    "deepseek_v4": (
        "DeepseekV4Config",
        _TINY
        | _FOUR
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
        | _FOUR
        | dict(dense_intermediate_size=64, shared_intermediate_size=32, rotary_dim=4, index_n_heads=2,
               index_head_dim=8, index_block_size=4, index_topk_blocks=2, mlp_layer_types=["dense", "sparse"] * 2,
               layer_types=["full_attention", "minimax_m3_sparse"] * 2),
    ),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        _TINY
        | _FOUR
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


@cache
def made(name):
    config_class, arguments = MODELS[name]
    named_otherwise = name == "qwen4_exp" and Version(transformers.__version__) < Version("5.23")  # its layers
    if named_otherwise or not hasattr(transformers, config_class):
        pytest.skip("this release of transformers does not know it yet")
    return randomised(config_class, arguments)
