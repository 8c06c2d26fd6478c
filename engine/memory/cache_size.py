"""The empty cache of a run: its size, its rows, and the room that is made at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import caches
from caches import CapacityError, EngineCache
from configs import CacheConfig, EncoderDecoderCacheConfig
from engine.request.inputs.checks import is_fixed
from engine.request.run_shape import RunShape
from engine.tables import counted

_SIZE_STEP = 128  # tokens
_FIRST_TOKENS = 129  # new ones of a row that may end early; the last of them needs no room
_MOST_AT_ONCE = 2**21  # tokens per row that room is made for in advance, unless a size is given


def empty_cache(config: CacheConfig, run_shape: RunShape, build: Callable[[CacheConfig], EngineCache]) -> EngineCache:
    """An empty cache with room for this run. build: makes a cache of the model's layers."""
    config = _sized(config, run_shape)
    cache = build(config)
    if run_shape.rows > run_shape.prompts and is_fixed(cache):
        cache = build(_with_rows(config, run_shape.rows))
    cache.reserve(beginning_of(run_shape).kept)
    return cache


def beginning_of(run_shape: RunShape) -> RunShape:
    """The run as far as room is made for it in advance: a row may end early, and room stay unused."""
    as_they_come = run_shape.ends_early or run_shape.kept > _MOST_AT_ONCE
    return replace(run_shape, new_tokens=min(run_shape.new_tokens, _FIRST_TOKENS)) if as_they_come else run_shape


def _sized(choice: str | CacheConfig, run_shape: RunShape) -> CacheConfig:
    """The cache's configuration, with `max_cache_len` where it needs one and has none, also in its parts."""
    config = caches.recipe(choice).options() if isinstance(choice, str) else choice
    if isinstance(config, EncoderDecoderCacheConfig):
        config = replace(config, self_cache=_sized(config.self_cache, run_shape))
    if not config.needs_size or config.to_dict()["max_cache_len"] is not None:
        return config
    size = max(run_shape.kept + 1, run_shape.max_cache_len or 0)
    if size > _MOST_AT_ONCE:
        raise CapacityError(
            f"cache={config.name!r} makes room for all tokens before the first one, and {run_shape.prompt_tokens:,} of "
            f"the prompt and {counted(run_shape.new_tokens, 'new one')} are more than the {_MOST_AT_ONCE:,} per row "
            "that it makes room for by itself: ask for fewer, give max_cache_len in cache_config, or use "
            "cache='dynamic' or 'sink'"
        )
    # A compiled step is compiled for a size: calls of similar length share one.
    return config.update(max_cache_len=-(-size // _SIZE_STEP) * _SIZE_STEP)[0]


def _with_rows(choice: str | CacheConfig, rows: int) -> CacheConfig:
    """The configuration with `max_batch_size=rows` where none was given, also in its parts."""
    config = caches.recipe(choice).options() if isinstance(choice, str) else choice
    if isinstance(config, EncoderDecoderCacheConfig):
        cross = None if config.cross_cache is None else _with_rows(config.cross_cache, rows)
        return replace(config, self_cache=_with_rows(config.self_cache, rows), cross_cache=cross)
    is_set = config.to_dict().get("max_batch_size", rows) is not None
    return config if is_set else config.update(max_batch_size=rows)[0]
