"""What an encoder-decoder model keeps: of the decoder's own tokens, and of the encoder's, which are written once."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache as TransformersEncoderDecoderCache

from caches.errors import UnsupportedLayerError
from caches.hf.cache import Cache
from caches.hf.legacy_names import LegacyNames
from caches.protocol import TokenLog


class EncoderDecoder(LegacyNames, TransformersEncoderDecoderCache):
    """Two caches as one. Steps are those of the decoder; the first also writes the cross part, which then stays.

    For the methods of a step see `EngineCache`.
    """

    def __init__(self, own: Cache, cross: Cache):
        self.self_attention_cache, self.cross_attention_cache = own, cross
        self.is_updated = Updated(cross)
        self._cross_seen_before = 0  # before the open step

    @property
    def name(self) -> str:
        return self.self_attention_cache.name

    @property
    def fixed(self) -> bool:
        return all(part.fixed for part in self.parts)

    @property
    def why_not_compiled(self) -> str | None:
        return next((part.why_not_compiled for part in self.parts if part.why_not_compiled is not None), None)

    @property
    def log(self) -> TokenLog | None:
        return self.self_attention_cache.log

    @log.setter
    def log(self, log: TokenLog | None) -> None:
        self.self_attention_cache.log = log

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        return self.self_attention_cache.layers

    @property
    def specs(self) -> tuple[Any, ...]:
        return self.self_attention_cache.specs

    def check_fits(self, model_config: Any) -> None:
        if not model_config.is_encoder_decoder:
            raise UnsupportedLayerError("it was built for an encoder-decoder model, and this one has no encoder")
        self.self_attention_cache.check_fits(model_config)

    # One step is a transaction.

    def begin(self, tokens: int, graph: bool = False) -> None:
        self._check_whole()
        self.self_attention_cache.begin(tokens, graph)
        self._cross_seen_before = self.cross_attention_cache.total_tokens
        self.cross_attention_cache.forget_reads()

    def can_reject(self, rejected: int) -> bool:
        return self.self_attention_cache.can_reject(rejected)

    def commit(self, rejected: int = 0) -> None:
        tokens = self.self_attention_cache.pending
        self.self_attention_cache.commit(rejected)
        self.cross_attention_cache.finish_step(whole=True)
        if tokens == 1:
            self.cross_attention_cache.unshare_if_materialized()

    def abort(self) -> None:
        if self.self_attention_cache.is_open and self._cross_seen_before == 0:
            self.cross_attention_cache.reset()
        self.self_attention_cache.abort()

    def select_rows(self, index: torch.Tensor) -> None:
        self._check_whole()
        for part in self.parts:
            part.check_rows(index)
        for part in self.parts:  # so that both are to be finished, whichever of them fails
            part.start_rows(index)
        self.finish()

    def fork(self, times: int) -> None:
        self._check_whole()
        for part in self.parts:
            part.check_fork(times)
        for part in self.parts:
            part.start_fork(times)
        self.finish()

    def unshare(self) -> None:
        self._check_whole()
        for part in self.parts:
            part.start_unshare()
        self.finish()

    @property
    def unfinished(self) -> bool:
        return any(part.unfinished for part in self.parts)

    def finish(self) -> None:
        for part in self.parts:
            part.finish()

    def _check_whole(self) -> None:
        for part in self.parts:
            part.check_whole()

    def reserve(self, tokens: int) -> None:
        self._check_whole()
        self.self_attention_cache.reserve(tokens)

    def growth(self, tokens: int) -> float:
        return self.self_attention_cache.growth(tokens)

    def crop(self, tokens: int) -> None:
        """Of the decoder's tokens. Positive: the new size. Negative: how many of the last ones to remove."""
        self._check_whole()
        self.self_attention_cache.crop(tokens)

    def reset(self) -> None:
        self.self_attention_cache.reset()
        self.cross_attention_cache.reset()

    def release(self) -> None:
        for part in self.parts:
            part.release()

    @property
    def is_quantized(self) -> bool:
        return self.self_attention_cache.is_quantized

    @property
    def total_tokens(self) -> int:
        return self.self_attention_cache.total_tokens

    @property
    def batch_size(self) -> int:
        return self.self_attention_cache.batch_size

    @property
    def max_tokens(self) -> int | None:
        return self.self_attention_cache.max_tokens

    @property
    def max_rows(self) -> int | None:
        return self.self_attention_cache.max_rows

    @property
    def parts(self) -> tuple[Cache, Cache]:
        return self.self_attention_cache, self.cross_attention_cache

    # What transformers asks.

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        return self.self_attention_cache.get_seq_length(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.self_attention_cache.get_query_offset(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.self_attention_cache.get_mask_sizes(query_length, layer_idx)

    @property
    def is_compileable(self) -> bool:
        return self.self_attention_cache.is_compileable

    @property
    def is_croppable(self) -> bool:
        return self.self_attention_cache.is_croppable

    def __getitem__(self, layer_idx: int) -> tuple[torch.Tensor | None, ...]:
        return self.self_attention_cache[layer_idx] + self.cross_attention_cache[layer_idx]

    def to_legacy_cache(self) -> tuple[tuple[torch.Tensor | None, ...], ...]:
        """Keys and values of every layer, then those of its cross-attention. See `LegacyNames.to_legacy_cache`."""
        own, cross = (part.to_legacy_cache() for part in self.parts)
        return tuple(both[0] + both[1] for both in zip(own, cross, strict=True))

    def check_finite(self) -> None:
        for part in self.parts:
            part.check_finite()

    def __repr__(self) -> str:
        return f"EncoderDecoder({self.self_attention_cache!r}, cross={self.cross_attention_cache!r})"


class Updated(dict):
    """Which layers of the cross part hold the encoder's keys: what models ask before they compute them.

    None does until all do: a forward that died half-way left keys of which it is not known whether they belong to the
    next one.
    """

    def __init__(self, cross: Cache):
        super().__init__()
        self._cross = cross

    def get(self, layer_idx: int, default: Any = None) -> bool:
        if self._cross.has_reached(layer_idx):  # in a forward before this one
            self._cross.finish_step()
        return self._cross.batch_size != -1 and not self._cross.is_open

    def __getitem__(self, layer_idx: int) -> bool:
        return self.get(layer_idx)
