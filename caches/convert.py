"""New caches from the content of others: another backend, some of the rows, several joined.

Written once over what layers say they hold, so a new backend has all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from caches.cache import Cache
from caches.driven import Log
from caches.encoder_decoder import EncoderDecoder
from caches.errors import StepError, UnsupportedLayer
from caches.registry import recipe

C = TypeVar("C", Cache, EncoderDecoder)


def convert(cache: C, name: str, **options: Any) -> C:
    """A cache of the backend `name` with `options`, holding what `cache` holds, which stays as it is.

    Of an encoder-decoder cache the part of the decoder's own tokens is converted.
    Raises `StepError` where the backend would keep other columns than there are, `CapacityError` where it is too small.
    """
    if isinstance(cache, EncoderDecoder):
        own, cross = cache.parts
        return EncoderDecoder(convert(own, name, **options), select_rows(cross, torch.arange(max(0, cross.batch_size))))
    chosen = recipe(name)
    empty = chosen.build(cache.specs, chosen.options.from_dict(options))
    if not isinstance(empty, Cache):
        raise UnsupportedLayer(f"a {name} cache cannot hold what is in a {cache.name} one: all of it would be lost")
    return _fill(empty, [cache], lambda tensors: tensors[0], lambda logs: logs[0])


def select_rows(cache: C, index: torch.Tensor) -> C:
    """A cache of the same backend with copies of the rows `index` (LongTensor)."""
    if isinstance(cache, EncoderDecoder):
        return EncoderDecoder(*(select_rows(part, index) for part in cache.parts))
    return _fill(
        cache.empty_like(),
        [cache],
        lambda tensors: tensors[0].index_select(0, index.to(tensors[0].device)),
        lambda logs: logs[0].rows(index),
    )


def join_rows(parts: Sequence[C]) -> C:
    """A cache with the rows of all `parts`, which hold the same layers after equally many tokens."""
    if not parts:
        raise StepError("there is nothing to join")
    first = parts[0]
    for part in parts:
        if (part.seen, part.specs, part.name) != (first.seen, first.specs, first.name):
            raise StepError(f"{part!r} cannot be joined with {first!r}: they need the same layers and tokens")
    if isinstance(first, EncoderDecoder):
        return EncoderDecoder(*(join_rows(same) for same in zip(*(part.parts for part in parts), strict=True)))
    return _fill(first.empty_like(), parts, torch.cat, Log.joined)


def _fill(
    empty: Cache,
    sources: Sequence[Cache],
    of_tensors: Callable[[list[torch.Tensor]], torch.Tensor],
    of_logs: Callable[[list[Log]], Log],
) -> Cache:
    """`empty` with every tensor that `of_tensors` makes of those at the same place in the sources."""
    for source in sources:
        source.crop(0)  # finishes the step of a foreign loop
    if sources[0].batch_size == -1:
        return empty

    def combined(values: list[Any]) -> Any:
        first = values[0]
        if isinstance(first, dict):
            return {name: combined([value[name] for value in values]) for name in first}
        if isinstance(first, torch.Tensor) and first.ndim > 0 and first.numel() > 0:
            return of_tensors(values)
        return first

    rows = len(of_tensors([torch.empty(source.batch_size) for source in sources]))
    layers = zip(*(source.layers for source in sources), strict=True)
    empty.load(sources[0].seen, rows, [combined([layer.content() for layer in same]) for same in layers])
    logs = [source.log for source in sources if source.log is not None]
    empty.log = of_logs(logs) if len(logs) == len(sources) else None
    return empty
