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


@cache
def tiny_model(name: str) -> PreTrainedModel:
    """The architecture's model, float32, seeded.

    transformers initialises with a deviation of 0.02, where attention hardly moves the logits and a wrong cache goes
    unnoticed; here every matrix has 0.3.
    """
    config_class, arguments = ARCHITECTURES[name]
    config = getattr(transformers, config_class)(**arguments)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.3)
    # Some classes put an end-of-sequence id back that their configuration was told to leave out.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt(rows: int = 2, tokens: int = 13, pads: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids, longer than the window; the first row begins with `pads` pads."""
    ids = torch.randint(2, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    ids[mask == 0] = 0
    return {"input_ids": ids, "attention_mask": mask}
