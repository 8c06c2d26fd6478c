"""llama.cpp as a peer: a transformers Llama written as GGUF, in float32, and decoded greedily by the same loop.

Needs the packages `llama-cpp-python` and `gguf`; nothing else here does.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """The model's weights in float32, without a vocabulary: tokens go in and come out as ids."""
    import gguf

    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("no_vocab")
    writer.add_tensor("token_embd.weight", model.model.embed_tokens.weight.detach().numpy())
    writer.add_tensor("output_norm.weight", model.model.norm.weight.detach().numpy())
    writer.add_tensor("output.weight", model.lm_head.weight.detach().numpy())
    for layer, block in enumerate(model.model.layers):
        for name, short in _NAMES.items():
            weight = block.get_submodule(name).weight.detach()
            if short in ("attn_q", "attn_k"):  # llama.cpp rotates neighbouring channels, transformers the two halves
                weight = weight.view(-1, 2, head_dim // 2, config.hidden_size).transpose(1, 2).reshape(weight.shape)
            writer.add_tensor(f"blk.{layer}.{short}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


FILE_TYPES = {"Q8_0": 7, "Q4_0": 2}  # of llama.cpp's `llama_ftype`


def quantize(path: Path, kind: str) -> Path:
    """The file `path` with its matrices, embeddings too, in another type of `FILE_TYPES`."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.pure = FILE_TYPES[kind], True
    out = path.with_suffix(f".{kind}.gguf")
    if llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(parameters)) != 0:
        raise RuntimeError(f"llama.cpp could not make {kind}")
    return out


class LlamaCpp:
    """Greedy decoding with llama.cpp. A new context per call, as `generate` makes a new cache."""

    def __init__(self, path: Path, threads: int):
        import llama_cpp

        self._library, self._threads = llama_cpp, threads
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())

    def generate(self, ids: torch.Tensor, new: int, first: Any) -> list[int]:
        """The `new` tokens after `ids` [1, tokens]. `first.note()` is called when the first is there."""
        library, tokens = self._library, ids[0].tolist()
        parameters = library.llama_context_default_params()
        parameters.n_ctx = len(tokens) + new
        parameters.n_batch = len(tokens)
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.type_k = parameters.type_v = 0  # GGML_TYPE_F32
        context = library.llama_init_from_model(self._model, parameters)
        vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        made: list[int] = []
        while len(made) < new:
            array = (library.llama_token * len(tokens))(*tokens)
            if library.llama_decode(context, library.llama_batch_get_one(array, len(tokens))) != 0:
                raise RuntimeError("llama.cpp could not decode")
            logits = np.ctypeslib.as_array(library.llama_get_logits_ith(context, -1), (vocabulary,))
            tokens = [int(logits.argmax())]
            made += tokens
            first.note()
        library.llama_free(context)
        return made
