"""What the first layer of a live cache holds, so that it can be compared with what a text has there.

Keys and values of the first layer are a function of the tokens and their positions alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from caches.attention.segmented_tensor import plain
from caches.core.layer import Layer
from caches.errors import UnknownContentError
from caches.hf.adapter import HFCacheAdapter
from caches.hf.cache import Cache
from caches.protocol import EngineCache
from caches.timeline.shared_timeline import ForkedTimeline
from caches.timeline.timeline import Timeline
from caches.transfer.convert import can_migrate

# How far numbers in full precision may be apart, relative to their norm: products of other shapes round otherwise.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
_TOLERANCE = 0.03  # of all narrower types
_TIMES_ROUNDING = 2.0  # how far codes may be apart, in roundings of their codec


@dataclass(frozen=True)
class HeldColumns:
    """One tensor of a layer, [rows, heads, columns, width].

    codec: what wrote the columns before `exact`, and those of `later`, in fewer bits; None where all are in full.
    """

    held: torch.Tensor
    codec: Any = None
    exact: int = 0
    later: range = range(0)

    def differ(self, expected: torch.Tensor, begin: int) -> torch.Tensor:
        """Where the columns from `begin` on are not `expected` [rows, heads, n, width]: bool [rows, n].

        A codec's columns may differ by twice what the codec makes of `expected`.
        """
        end = begin + expected.shape[2]
        held = self.held[:, :, begin:end].to(expected.device)
        if held.shape != expected.shape:
            raise UnknownContentError(
                f"its first layer holds {_shape(self.held)}, where this model has {_shape(expected)} of {end - begin} "
                "tokens: it was filled by another model"
            )
        narrow = min(held.dtype, expected.dtype, key=lambda dtype: -torch.finfo(dtype).eps)
        wide = torch.promote_types(expected.dtype, torch.float32)
        expected, held = expected.to(wide), held.to(wide)
        allowed = _TOLERANCES.get(narrow, _TOLERANCE) * _norms(expected)
        if self.codec is not None:
            rounding = _TIMES_ROUNDING * _norms(_rounded(self.codec, expected.to(self.held.dtype)).to(wide) - expected)
            columns = torch.arange(begin, end, device=rounding.device)
            is_later = (columns >= self.later.start) & (columns < self.later.stop)
            allowed += rounding * ((columns < self.exact) | is_later)
        return ~(_norms(held - expected) <= allowed)  # also where one of them is no number


def first_layer(cache: EngineCache) -> list[tuple[HeldColumns, HeldColumns]]:
    """Keys and values of the first layer, of all tokens that the cache has seen, of a cache between two steps.

    Of an encoder-decoder cache the decoder's, then the encoder's. Raises `UnknownContentError`, and `StepError` while
    our loop has a step open.
    """
    if isinstance(cache, HFCacheAdapter):
        return [_of_transformers(cache, part) for part in cache.sections]
    if not can_migrate(cache):
        raise UnknownContentError(f"a {type(cache).__name__} does not say what its first layer holds")
    cache.crop(0)  # lets the step of a foreign loop be settled
    for part in cache.parts:
        part.finish_step()
    return [_of_ours(part) for part in cache.parts]


def _of_ours(part: Cache) -> tuple[HeldColumns, HeldColumns]:
    layer = part.layers[0] if part.layers else None
    if not isinstance(layer, Layer) or "keys" not in layer.stores:
        raise UnknownContentError(
            "its first layer keeps no keys" + ("" if layer is None else f" ({layer.spec.layer_type})")
        )
    if layer.keys is None or layer.timeline.kept_tokens < part.total_tokens:
        raise UnknownContentError(
            f"its first layer holds the last {layer.timeline.kept_tokens} of {part.total_tokens} tokens"
        )
    return _columns(layer, "keys"), _columns(layer, "values")


def _columns(layer: Layer, name: str) -> HeldColumns:
    store = layer.stores[name]
    held = store.committed()
    assert held is not None
    if not store.is_quantized:
        return HeldColumns(plain(held))
    codec = getattr(getattr(store, "prefix", store), "codec", None)
    bits = getattr(codec, "bits", None)
    if bits is None:
        raise UnknownContentError(f"nothing tells how the {type(store).__name__} of its first layer rounds")
    if bits < 2:  # tried: of tokens that were changed about every sixth went unnoticed, with 2 bits none
        raise UnknownContentError("codes of 1 bit do not tell tokens apart")
    timeline = layer.timeline
    if not isinstance(timeline, ForkedTimeline):
        return HeldColumns(plain(held), codec, _encoded(timeline))
    begin = timeline.prefix.kept_tokens
    return HeldColumns(plain(held), codec, _encoded(timeline.prefix), range(begin, begin + _encoded(timeline.suffix)))


def _encoded(timeline: Timeline) -> int:
    return getattr(timeline, "encoded", timeline.kept_tokens)


def _of_transformers(cache: HFCacheAdapter, part: Any) -> tuple[HeldColumns, HeldColumns]:
    layer = part.layers[0] if part.layers else None
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if layer is None or not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
        raise UnknownContentError("its first layer keeps no keys")
    seen = int(layer.get_seq_length())
    if isinstance(layer, StaticLayer) and seen <= keys.shape[2]:
        keys, values = keys[:, :, :seen], values[:, :, :seen]
    if keys.ndim != 4 or keys.shape[2] != seen or (part is cache.sections[0] and seen != cache.total_tokens):
        raise UnknownContentError(f"its first layer ({type(layer).__name__}) does not hold all {seen} tokens in full")
    return HeldColumns(keys), HeldColumns(values)


def _norms(numbers: torch.Tensor) -> torch.Tensor:
    """Of every row and column, [rows, columns]."""
    return numbers.transpose(1, 2).flatten(2).norm(dim=-1)


def _rounded(codec: Any, numbers: torch.Tensor) -> torch.Tensor:
    """What the codec makes of columns [rows, heads, n, width]."""
    columns = numbers.shape[2]
    fill = -columns % codec.block
    whole = torch.cat([numbers, numbers[:, :, -1:].expand(-1, -1, fill, -1)], dim=2) if fill else numbers
    out = torch.empty_like(whole, memory_format=torch.contiguous_format)
    scratch = torch.empty(whole.numel() // whole.shape[3] * -(-whole.shape[3] // 8) * 8, dtype=torch.uint8)
    piece = codec.decode(codec.encode(whole), lambda: (out, scratch.to(whole.device)))
    return piece.materialize()[:, :, :columns]


def _shape(columns: torch.Tensor) -> str:
    return f"{columns.shape[0]} rows of {columns.shape[1]} heads of {columns.shape[3]} numbers"
