"""Tiny random models, one line per architecture: what every comparison with transformers runs on."""

from __future__ import annotations

from functools import cache

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 101
WINDOW = 8

_TINY = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    tie_word_embeddings=False,
)  # fmt: skip
_MIXED = ["sliding_attention", "full_attention"] * 2
_GPT2 = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=None,
             tie_word_embeddings=False)  # fmt: skip

# name: (configuration class, its arguments)
ARCHITECTURES = {
    "llama": ("LlamaConfig", _TINY),
    "mistral": ("MistralConfig", _TINY | dict(sliding_window=WINDOW)),
    "gemma2": ("Gemma2Config", _TINY | dict(sliding_window=WINDOW, layer_types=_MIXED, query_pre_attn_scalar=8)),
    "gpt2": ("GPT2Config", _GPT2),
    "opt": ("OPTConfig", _TINY | dict(ffn_dim=64, word_embed_proj_dim=32)),
    "phi3": ("Phi3Config", _TINY | dict(sliding_window=WINDOW)),
    "qwen3": ("Qwen3Config", _TINY | dict(use_sliding_window=True, sliding_window=WINDOW, layer_types=_MIXED)),
    "llama4_text": (
        "Llama4TextConfig",
        _TINY | dict(intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=WINDOW, use_qk_norm=True,
                     layer_types=["chunked_attention", "full_attention"] * 2, no_rope_layers=[1, 0, 1, 0]),
    ),
}  # fmt: skip

_WINDOWS = _TINY | dict(sliding_window=WINDOW, layer_types=_MIXED)
_EXPERTS = _TINY | dict(num_local_experts=4, num_experts_per_tok=2)
_NO_HEAD_DIM = {name: value for name, value in _TINY.items() if name != "head_dim"}
_LATENT = _TINY | dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4
)
_DEEPSEEK = _LATENT | dict(
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)
_LAYERS = dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=None)
_GEMMA3N = _TINY | dict(
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"] * 3,
    num_hidden_layers=6,
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCABULARY,
    laurel_rank=8,
    altup_num_inputs=2,
    intermediate_size=[64] * 6,
    activation_sparsity_pattern=[0.0] * 6,
)
_XGLM = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    ffn_dim=64,
    num_layers=3,
    attention_heads=4,
    max_position_embeddings=256,
    eos_token_id=None,
)
_MPT = dict(
    vocab_size=VOCABULARY, d_model=32, n_layers=3, n_heads=4, max_seq_len=256, bos_token_id=1, eos_token_id=None
)
_NEO = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    window_size=WINDOW,
    attention_types=[[["global", "local"], 2]],
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=None,
)

# More of them, for the comparison with transformers only.
MORE_ARCHITECTURES = {
    "apertus": ("ApertusConfig", _TINY),
    "arcee": ("ArceeConfig", _TINY),
    "biogpt": ("BioGptConfig", _TINY),
    "bloom": ("BloomConfig", _LAYERS),
    "codegen": ("CodeGenConfig", _GPT2 | dict(rotary_dim=4)),
    "cohere": ("CohereConfig", _TINY),
    "cohere2": ("Cohere2Config", _WINDOWS),
    "ctrl": ("CTRLConfig", _GPT2 | dict(dff=64)),
    "deepseek_v2": ("DeepseekV2Config", _DEEPSEEK),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK),
    "deepseek_v32": ("DeepseekV32Config", _DEEPSEEK | dict(index_n_heads=4, index_head_dim=16, index_topk=6)),
    "ernie4_5": ("Ernie4_5Config", _TINY),
    "exaone4": ("Exaone4Config", _WINDOWS),
    "falcon": ("FalconConfig", _NO_HEAD_DIM | dict(new_decoder_architecture=True, num_kv_heads=2)),
    "falcon_alibi": ("FalconConfig", _NO_HEAD_DIM | dict(alibi=True, multi_query=False)),
    "gemma": ("GemmaConfig", _TINY),
    "gemma3_text": ("Gemma3TextConfig", _WINDOWS | dict(query_pre_attn_scalar=8)),
    "gemma3n_text": ("Gemma3nTextConfig", _GEMMA3N),
    "glm": ("GlmConfig", _TINY | dict(partial_rotary_factor=0.5)),
    "glm4": ("Glm4Config", _TINY | dict(partial_rotary_factor=0.5)),
    "glm4_moe": ("Glm4MoeConfig", _TINY | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT2),
    "gpt_neo": ("GPTNeoConfig", _NEO),
    "gpt_neox": ("GPTNeoXConfig", _TINY),
    "gpt_oss": ("GptOssConfig", _EXPERTS | dict(sliding_window=WINDOW, layer_types=_MIXED,
                                                rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
    "gptj": ("GPTJConfig", _GPT2 | dict(rotary_dim=4)),
    "granite": ("GraniteConfig", _TINY),
    "granitemoe": ("GraniteMoeConfig", _EXPERTS),
    "helium": ("HeliumConfig", _TINY),
    "minicpm3": ("MiniCPM3Config", _LATENT),
    "mixtral": ("MixtralConfig", _EXPERTS | dict(sliding_window=WINDOW)),
    "mpt": ("MptConfig", _MPT),
    "nemotron": ("NemotronConfig", _TINY),
    "olmo": ("OlmoConfig", _TINY),
    "olmo2": ("Olmo2Config", _TINY),
    "olmo3": ("Olmo3Config", _WINDOWS),
    "persimmon": ("PersimmonConfig", _TINY),
    "phi": ("PhiConfig", _TINY),
    "phimoe": ("PhimoeConfig", _EXPERTS),
    "qwen2": ("Qwen2Config", _WINDOWS | dict(use_sliding_window=True)),
    "qwen2_moe": ("Qwen2MoeConfig", _TINY | dict(num_experts=4, moe_intermediate_size=32)),
    "qwen3_moe": ("Qwen3MoeConfig", _TINY | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
    "seed_oss": ("SeedOssConfig", _TINY),
    "smollm3": ("SmolLM3Config", _TINY | dict(no_rope_layers=[1, 0, 1, 0])),
    "stablelm": ("StableLmConfig", _TINY),
    "starcoder2": ("Starcoder2Config", _TINY | dict(sliding_window=WINDOW)),
    "xglm": ("XGLMConfig", _XGLM),
}  # fmt: skip


@cache
def tiny_model(name: str) -> PreTrainedModel:
    """The architecture's model."""
    return randomised(*(ARCHITECTURES | MORE_ARCHITECTURES)[name])


def randomised(config_class: str, arguments: dict) -> PreTrainedModel:
    """A model with this configuration, float32, seeded.

    transformers initialises with a deviation of 0.02, where attention hardly moves the logits and a wrong cache goes
    unnoticed; here every matrix has 0.3.
    """
    config = getattr(transformers, config_class)(**arguments)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.3)
    # Some classes put an end-of-sequence id back that their configuration was told to leave out.
    model.generation_config.eos_token_id = None
    model.generation_config.use_cache = True  # mpt says no
    model.generation_config.pad_token_id = 0
    return model


def prompt(rows: int = 2, tokens: int = 13, pads: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids, longer than the window; the first row begins with `pads` pads."""
    ids = torch.randint(2, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    ids[mask == 0] = 0
    return {"input_ids": ids, "attention_mask": mask}
