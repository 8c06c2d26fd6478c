"""Llama models written as GGUF files, for tests and benchmarks, and random blocks of their types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
          "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
          "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
          "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
          "model.layers.": "blk."}  # fmt: skip


def random_blocks(type_of_blocks: Any, outs: int, width: int) -> torch.Tensor:
    """Bytes uint8 [outs, bytes] of weights with a standard deviation of 0.3, whose scales are of several magnitudes."""
    import gguf

    inputs, size = gguf.GGML_QUANT_SIZES[type_of_blocks]
    blocks = outs, width // inputs
    raw = torch.randint(0, 256, (*blocks, size), dtype=torch.uint8)
    numbers = 2 if type_of_blocks.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
    at = slice(-2, None) if type_of_blocks.name == "Q6_K" else slice(0, 2 * numbers)
    scales = 0.01 * torch.randn(*blocks, numbers) * 10.0 ** torch.randint(-3, 1, (*blocks, 1))
    for _ in range(2):
        raw[..., at] = scales.half().view(torch.uint8)
        scales *= 0.3 / gguf.dequantize(raw.flatten(1).numpy(), type_of_blocks).std()
    return raw.flatten(1)


def write_gguf(
    model: LlamaForCausalLM,
    path: Path,
    type_of_blocks: Any | Callable[[str], Any] = None,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """A file with the matrices of `model` as blocks of a type of the package gguf, and everything else in float32.

    type_of_blocks: may depend on the name in the file; None for float32. Blocks of types that the package cannot write
    are random. tokenizer: the model of a tokenizer.json, with its vocabulary and merges; None for a file without one,
    whose tokens go in and come out as ids.
    """
    import gguf

    config, float32 = model.config, gguf.GGMLQuantizationType.F32
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab" if tokenizer is None else "gpt2")
    if tokenizer is not None:
        writer.add_token_list(sorted(tokenizer["vocab"], key=tokenizer["vocab"].get))
        writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
        writer.add_bos_token_id(config.bos_token_id or 0)
        writer.add_eos_token_id(config.eos_token_id or 0)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for theirs, its in (("self_attn.q_proj", "num_attention_heads"), ("self_attn.k_proj", "num_key_value_heads")):
            if theirs in name:  # llama.cpp keeps pairs of rotated elements side by side
                heads = getattr(config, its)
                weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        for theirs, its in _NAMES.items():
            name = name.replace(theirs, its)
        values = weight.float().contiguous().numpy()
        block_type = type_of_blocks(name) if callable(type_of_blocks) else type_of_blocks
        block_type = float32 if values.ndim != 2 or block_type is None else block_type
        try:
            blocks = gguf.quants.quantize(values, block_type)
        except NotImplementedError:
            blocks = random_blocks(block_type, *values.shape).numpy()
        writer.add_tensor(name, blocks, raw_dtype=block_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
