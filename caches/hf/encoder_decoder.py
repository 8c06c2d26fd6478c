"""What an encoder-decoder model keeps: of the decoder's own tokens, and of the encoder's, which are written once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import EncoderDecoderCache as TransformersEncoderDecoderCache

from caches.errors import UnsupportedLayerError
from caches.hf.cache import Cache
from caches.hf.classic_names import ClassicNames
from caches.protocol import Capabilities


class EncoderDecoder(ClassicNames, TransformersEncoderDecoderCache):
    """Two caches as one. Steps are those of the decoder; the first also writes the cross part, which then stays.

    See `EngineCache` for the methods of a step.
    """

    def __init__(self, self_cache: Cache, cross: Cache):
        for cache in (self_cache, cross):
            if cache.view.imposes_windows:
                raise UnsupportedLayerError(f"cache={cache.name!r} cannot impose a window on an encoder-decoder model")
        self.self_attention_cache, self.cross_attention_cache = self_cache, cross
        self.stacks, self.implicit_steps = (self_cache.stack, cross.stack), (self_cache.implicit, cross.implicit)
        self.is_updated = Updated(cross)
        self._cross_tokens_before = 0  # before the open step

    @property
    def parts(self) -> tuple[Cache, Cache]:
        """The decoder's cache, and the encoder's."""
        return self.self_attention_cache, self.cross_attention_cache

    @property
    def capabilities(self) -> Capabilities:
        return self.self_attention_cache.capabilities

    def empty_like(self, max_rows: int | None = None) -> EncoderDecoder:
        """An empty cache of the same layouts."""
        return type(self)(*(cache.empty_like(max_rows) for cache in self.parts))

    def check_fits(self, model_config: PreTrainedConfig) -> None:
        if not model_config.is_encoder_decoder:
            raise UnsupportedLayerError("it was built for an encoder-decoder model, and this one has no encoder")
        self.self_attention_cache.check_fits(model_config)

    # One step is a transaction.

    def begin(self, tokens: int, graph: bool = False) -> None:
        self.check_finished()
        self.self_attention_cache.begin(tokens, graph)
        self._cross_tokens_before = self.cross_attention_cache.total_tokens
        self.cross_attention_cache.sharing.discard_reads()

    def commit(self, rejected: int = 0) -> None:
        tokens = self.self_attention_cache.stack.pending
        self.self_attention_cache.commit(rejected)
        self.cross_attention_cache.finish_step(is_over=True)
        if tokens == 1:
            self.cross_attention_cache.selection.unshare_if_materialized()

    def abort(self) -> None:
        if self.self_attention_cache.stack.is_open and self._cross_tokens_before == 0:
            self.cross_attention_cache.reset()
        self.self_attention_cache.abort()

    # What the decoder's cache is, can and does.

    def reserve(self, tokens: int) -> None:
        self.check_finished()
        self.self_attention_cache.reserve(tokens)

    def crop(self, tokens: int) -> None:
        """Of the decoder's tokens. Positive: the new size. Negative: how many of the last ones to remove."""
        self.check_finished()
        tokens_before = self.total_tokens
        self.self_attention_cache.crop(tokens)
        if tokens_before and self.total_tokens == 0:  # the next source may be another one
            self.cross_attention_cache.reset()

    def set_padding(self, padding: torch.Tensor | Sequence[int] | None) -> None:
        self.self_attention_cache.set_padding(padding)

    @property
    def total_tokens(self) -> int:
        return self.self_attention_cache.total_tokens

    # What transformers asks. Its class passes sizes and kinds on to the decoder's cache, but for this.

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        return self.self_attention_cache.get_query_offset(layer_idx)

    def __getitem__(self, layer_idx: int) -> tuple[torch.Tensor | None, ...]:
        return self.self_attention_cache[layer_idx] + self.cross_attention_cache[layer_idx]

    def to_legacy_cache(self) -> tuple[tuple[torch.Tensor | None, ...], ...]:
        """Keys and values of every layer, then those of its cross-attention. See `ClassicNames.to_legacy_cache`."""
        layers, cross_layers = (cache.to_legacy_cache() for cache in self.parts)
        return tuple(pair[0] + pair[1] for pair in zip(layers, cross_layers, strict=True))

    def __repr__(self) -> str:
        return f"EncoderDecoder({self.self_attention_cache!r}, cross={self.cross_attention_cache!r})"


class Updated(dict):
    """Which layers of the cross part hold the encoder's keys: models read it before they compute them.

    No layer counts until all hold them: those of a forward that failed half-way may not belong to the next one.
    """

    def __init__(self, cross: Cache):
        super().__init__()
        self._cross = cross

    def __len__(self) -> int:
        return len(self._cross.stack.layers)

    def get(self, layer_idx: int, default: object = None) -> bool:
        if self._cross.implicit.has_reached(layer_idx):  # in a forward before this one
            self._cross.finish_step()
        return self._cross.batch_size != -1 and not self._cross.stack.is_open

    def __getitem__(self, layer_idx: int) -> bool:
        return self.get(layer_idx)
