"""llama.cpp as a peer: a transformers Llama written as GGUF, in float32, and decoded greedily by the same loop.

Needs the packages `llama-cpp-python` and `gguf`; nothing else here does.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from gguf_files import write_gguf

__all__ = ["LlamaCpp", "cache_bits", "quantize", "write_gguf"]


def quantize(path: Path, kind: str, pure: bool = True, out: Path | None = None) -> Path:
    """The file `path` with its matrices, embeddings too, in another type, as "Q4_0", in `out` (default: beside it).
    pure: all in this one; else some in larger ones, as llama.cpp does by default."""
    import gguf
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.pure = gguf.LlamaFileType[f"MOSTLY_{kind}"], pure
    parameters.nthread, parameters.allow_requantize = torch.get_num_threads(), True
    out = path.with_suffix(f".{kind}.gguf") if out is None else out
    if llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(parameters)) != 0:
        raise RuntimeError(f"llama.cpp could not make {kind}")
    return out


@functools.cache
def _silence() -> Any:
    """What llama.cpp calls instead of printing, for as long as the process lives."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda *_: None)


def cache_bits(kind: str) -> float:
    """Bits per value of keys and values of this type, with their scales."""
    import gguf

    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return 8 * size / values


class LlamaCpp:
    """Greedy decoding and reading with llama.cpp. A new context per call, as `generate` makes a new cache."""

    def __init__(self, path: Path, threads: int, cache_type: str = "F32"):
        """cache_type: of keys and values in `generate`."""
        import llama_cpp

        self._library, self._threads, self._cache_type = llama_cpp, threads, cache_type
        llama_cpp.llama_log_set(_silence(), ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())

    def generate(self, ids: torch.Tensor, new: int, first: Any) -> list[int]:
        """The `new` tokens after `ids` [1, tokens]. `first.note()` is called when the first is there."""
        library, tokens = self._library, ids[0].tolist()
        context = self._context(len(tokens) + new, len(tokens), self._cache_type)
        vocabulary = self._vocabulary()
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

    def read(self, ids: torch.Tensor, piece_tokens: int, cache_type: str) -> Iterator[tuple[int, torch.Tensor]]:
        """The logits [tokens, vocabulary] of each piece of the text `ids` [tokens], and how many tokens come before
        it. cache_type: of keys and values, as "Q8_0"."""
        library, tokens = self._library, ids.tolist()
        context = self._context(len(tokens), piece_tokens, cache_type)
        batch = library.llama_batch_init(piece_tokens, 0, 1)
        for begin in range(0, len(tokens), piece_tokens):
            piece = tokens[begin : begin + piece_tokens]
            batch.n_tokens = len(piece)
            for number, token in enumerate(piece):
                batch.token[number], batch.pos[number], batch.logits[number] = token, begin + number, 1
                batch.n_seq_id[number], batch.seq_id[number][0] = 1, 0
            if library.llama_decode(context, batch) != 0:
                raise RuntimeError("llama.cpp could not decode")
            logits = np.ctypeslib.as_array(library.llama_get_logits(context), (len(piece), self._vocabulary()))
            yield begin, torch.from_numpy(logits)
        library.llama_batch_free(batch)
        library.llama_free(context)

    def release(self) -> None:
        """Free the model."""
        self._library.llama_model_free(self._model)

    def _context(self, tokens: int, batch_tokens: int, cache_type: str) -> Any:
        import gguf

        parameters = self._library.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch = tokens, batch_tokens
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.type_k = parameters.type_v = gguf.GGMLQuantizationType[cache_type]
        return self._library.llama_init_from_model(self._model, parameters)

    def _vocabulary(self) -> int:
        words: int = self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(self._model))
        return words
