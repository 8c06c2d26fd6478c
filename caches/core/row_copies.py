"""New caches from the content of others: another backend, some of the rows, several joined.

Written once over what layers say they hold, so a new backend has all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from caches.errors import StepError, UnsupportedLayerError
from caches.hf.cache import Cache
from caches.hf.encoder_decoder import EncoderDecoder
from caches.protocol import TokenLog
from caches.registry import recipe
from caches.stores.dense import chosen_rows, joined_rows
from caches.stores.recurrent_state import RecurrentState
from configs import CacheConfig, EncoderDecoderCacheConfig

C = TypeVar("C", Cache, EncoderDecoder)


def convert(cache: C, name: str, **options: Any) -> C:
    """A cache of the backend `name` with `options`, holding what `cache` holds, which stays as it is.

    Of an encoder-decoder cache `name` is for the decoder's tokens, unless it is "encoder_decoder".
    Raises `StepError` where the backend would keep other columns than there are, `CapacityError` where it is too small,
    `UnsupportedLayerError` where it cannot keep such layers.
    """
    empty = empty_for(cache, recipe(name).options.from_dict(options))
    for new, old in zip(empty.parts, cache.parts, strict=True):
        old.crop(0)  # lets the step of a foreign loop be settled
        if old.batch_size != -1:
            new.load_dense(old.total_tokens, old.batch_size, [layer.dense_state() for layer in old.layers])
            new.log = old.log
    return empty


def empty_for(cache: C, config: CacheConfig) -> C:
    """An empty cache of the backend that `config` is for, with the layers of `cache`."""
    if not isinstance(cache, (Cache, EncoderDecoder)):
        raise UnsupportedLayerError(
            f"a {type(cache).__name__} is none of caches.build, so its content cannot be read: only those can "
            "become others"
        )
    name = config.name
    if isinstance(cache, EncoderDecoder) and not isinstance(config, EncoderDecoderCacheConfig):
        config = EncoderDecoderCacheConfig(self_cache=config)
    finds_layers = any(part.finds_layers and not part.layers for part in cache.parts[:1])
    empty = recipe(config.name).build(None if finds_layers else cache.specs, config)
    if not isinstance(empty, EncoderDecoder if isinstance(cache, EncoderDecoder) else Cache):
        raise UnsupportedLayerError(
            f"cache={name!r} cannot hold what is in a {type(cache).__name__} named {cache.name!r}: some of it would be "
            "lost. Choose another, or keep the cache"
        )
    return empty


def select_rows(cache: C, index: torch.Tensor) -> C:
    """A cache of the same backend with copies of the rows `index` (LongTensor). It shares no columns any more.

    Where room is made once it is for these rows.
    """
    if isinstance(cache, EncoderDecoder):
        return EncoderDecoder(*(select_rows(part, index) for part in cache.parts))
    return _copied(
        cache.empty_like(),
        [cache],
        len(index),
        lambda written: chosen_rows(written[0], index),
        lambda logs: logs[0].select_rows(index),
    )


def join_rows(parts: Sequence[C]) -> C:
    """A cache with the rows of all `parts`, which hold the same layers after equally many tokens."""
    if not parts:
        raise StepError("there is nothing to join")
    if isinstance(parts[0], EncoderDecoder):
        return EncoderDecoder(*(join_rows(same) for same in zip(*(pair.parts for pair in parts), strict=True)))
    for part in parts:
        part.unshare()
        if (part.total_tokens, part.specs, part.name) != (parts[0].total_tokens, parts[0].specs, parts[0].name):
            raise StepError(f"{part!r} cannot be joined with {parts[0]!r}: they need the same layers and tokens")
        if part.layout != parts[0].layout:
            raise StepError(
                f"{part!r} cannot be joined with {parts[0]!r}: tokens were taken back in one of them and its blocks "
                "are others. Join them before, or convert them to cache='dynamic'"
            )
    for same in zip(*(states_of(part) for part in parts), strict=True):
        RecurrentState.agree(same)
    return _copied(parts[0].empty_like(), parts, sum(part.batch_size for part in parts), joined_rows, TokenLog.joined)


def states_of(cache: Cache) -> list[RecurrentState]:
    """The states of its layers, in order."""
    return [leaf for layer in cache.layers for leaf in layer.row_holders() if isinstance(leaf, RecurrentState)]


def _copied(
    empty: Cache,
    sources: Sequence[Cache],
    rows: int,
    of_written: Callable[[list[Any]], Any],
    of_logs: Callable[[list[TokenLog]], TokenLog],
) -> Cache:
    """`empty`, of the same recipe, with what `of_written` makes of what the sources have written down of a layer."""
    for source in sources:
        source.unshare()
    if sources[0].batch_size == -1:
        return empty
    layers = zip(*(source.layers for source in sources), strict=True)
    # A layer at a time: they may come from a place with more room than where they are put together.
    empty.load_state_dict(sources[0], rows, (of_written([layer.state_dict() for layer in same]) for same in layers))
    logs = [source.log for source in sources if source.log is not None]
    empty.log = of_logs(logs) if len(logs) == len(sources) else None
    return empty
