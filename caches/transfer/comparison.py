"""Content of the first layer of a live cache, to be compared with that of a text.

Keys and values of the first layer depend on the tokens and their positions alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from caches.attention.kv_view import plain
from caches.core.layer import Layer
from caches.errors import UnknownContentError
from caches.hf.adapter import HFCacheAdapter
from caches.hf.cache import Cache
from caches.protocol import EngineCache
from caches.stores.shared_prefix import ForkedStore
from caches.stores.sink import SinkStore
from caches.timeline.shared_timeline import ForkedTimeline
from caches.timeline.timeline import Timeline
from caches.transfer.convert import can_migrate

# Relative distance that values in full precision may have: products of other shapes round differently.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
_TOLERANCE = 0.03  # of all narrower types
_TIMES_ROUNDING = 2.0  # distance that decoded values may have, in rounding errors of their codec


@dataclass(frozen=True)
class KeptTokens:
    """One tensor of a layer, [rows, heads, tokens, width].

    codec: encoded the tokens before `exact`, and those of `later`; None where all are in full.
    """

    kept: torch.Tensor
    codec: Any = None
    exact: int = 0
    later: range = range(0)

    def differ(self, expected: torch.Tensor, begin: int) -> torch.Tensor:
        """Where the tokens from `begin` on are not `expected` [rows, heads, n, width]: bool [rows, n].

        Encoded tokens may differ by twice the rounding error of their codec on `expected`.
        """
        end = begin + expected.shape[2]
        content = self.kept[:, :, begin:end].to(expected.device)
        if content.shape != expected.shape:
            raise UnknownContentError(
                f"its first layer holds {_shape(self.kept)}, where this model has {_shape(expected)} of {end - begin} "
                "tokens: it was filled by another model"
            )
        narrow = min(content.dtype, expected.dtype, key=lambda dtype: -torch.finfo(dtype).eps)
        wide = torch.promote_types(expected.dtype, torch.float32)
        expected, content = expected.to(wide), content.to(wide)
        allowed = _TOLERANCES.get(narrow, _TOLERANCE) * _norms(expected)
        if self.codec is not None:
            rounding = _TIMES_ROUNDING * _norms(_rounded(self.codec, expected.to(self.kept.dtype)).to(wide) - expected)
            tokens = torch.arange(begin, end, device=rounding.device)
            is_later = (tokens >= self.later.start) & (tokens < self.later.stop)
            allowed += rounding * ((tokens < self.exact) | is_later)
        return ~(_norms(content - expected) <= allowed)  # True for NaN too


def first_layer(cache: EngineCache) -> list[tuple[KeptTokens, KeptTokens]]:
    """Keys and values of the first layer for all tokens of a cache, which is between two steps.

    Of an encoder-decoder cache the decoder's, then the encoder's. Raises `UnknownContentError` where they are not all
    there, `StepError` while a step is open.
    """
    if isinstance(cache, HFCacheAdapter):
        return [_of_transformers(cache, section) for section in cache.sections]
    if not can_migrate(cache):
        raise UnknownContentError(f"a {type(cache).__name__} does not say what its first layer holds")
    cache.crop(0)  # commits the step of another loop
    for section in cache.parts:
        section.finish_step()
    return [_of_ours(section) for section in cache.parts]


def _of_ours(cache: Cache) -> tuple[KeptTokens, KeptTokens]:
    layer = cache.layers[0] if cache.layers else None
    if not isinstance(layer, Layer) or "keys" not in layer.stores:
        raise UnknownContentError(
            "its first layer keeps no keys" + ("" if layer is None else f" ({layer.spec.layer_type})")
        )
    if layer.keys is None or layer.timeline.kept_tokens < cache.total_tokens:
        raise UnknownContentError(
            f"its first layer holds the last {layer.timeline.kept_tokens} of {cache.total_tokens} tokens"
        )
    return _content(layer, "keys"), _content(layer, "values")


def _content(layer: Layer, name: str) -> KeptTokens:
    store = layer.stores[name]
    stored = store.committed()
    assert stored is not None
    if not store.is_quantized:
        return KeptTokens(plain(stored))
    store = store.prefix if isinstance(store, ForkedStore) else store
    store = store.store if isinstance(store, SinkStore) else store
    codec = getattr(store, "codec", None)
    bits = getattr(codec, "bits", None)
    if bits is None:
        raise UnknownContentError(f"nothing says how the {type(store).__name__} of its first layer rounds")
    if bits < 2:  # measured: a sixth of changed tokens went unnoticed, with 2 bits none
        raise UnknownContentError("codes of 1 bit do not distinguish tokens")
    timeline = layer.timeline
    if not isinstance(timeline, ForkedTimeline):
        return KeptTokens(plain(stored), codec, _encoded(timeline))
    begin = timeline.prefix.kept_tokens
    return KeptTokens(plain(stored), codec, _encoded(timeline.prefix), range(begin, begin + _encoded(timeline.suffix)))


def _encoded(timeline: Timeline) -> int:
    return getattr(timeline, "encoded", timeline.kept_tokens)


def _of_transformers(cache: HFCacheAdapter, section: Any) -> tuple[KeptTokens, KeptTokens]:
    layer = section.layers[0] if section.layers else None
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if layer is None or not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
        raise UnknownContentError("its first layer keeps no keys")
    total_tokens = int(layer.get_seq_length())
    if isinstance(layer, StaticLayer) and total_tokens <= keys.shape[2]:
        keys, values = keys[:, :, :total_tokens], values[:, :, :total_tokens]
    is_own = section is cache.sections[0]
    if keys.ndim != 4 or keys.shape[2] != total_tokens or (is_own and total_tokens != cache.total_tokens):
        raise UnknownContentError(
            f"its first layer ({type(layer).__name__}) does not hold all {total_tokens} tokens in full"
        )
    return KeptTokens(keys), KeptTokens(values)


def _norms(values: torch.Tensor) -> torch.Tensor:
    """Of every row and token, [rows, tokens]."""
    return values.transpose(1, 2).flatten(2).norm(dim=-1)


def _rounded(codec: Any, values: torch.Tensor) -> torch.Tensor:
    """`values` [rows, heads, n, width], encoded and decoded."""
    tokens = values.shape[2]
    fill = -tokens % codec.block
    blocks = torch.cat([values, values[:, :, -1:].expand(-1, -1, fill, -1)], dim=2) if fill else values
    out = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    scratch_bytes = blocks.numel() // blocks.shape[3] * -(-blocks.shape[3] // 8) * 8
    scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=blocks.device)
    segment = codec.decode(codec.encode(blocks), lambda: (out, scratch))
    return segment.materialize()[:, :, :tokens]


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.shape[0]} rows of {tensor.shape[1]} heads of {tensor.shape[3]} elements"
