"""A cache of another backend with the same content. Written once over what layers hold, so every backend has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import nn

from caches import files
from caches.core.transfer import move, plan
from caches.errors import StepError, UnsupportedLayerError
from caches.hf.cache import Cache
from caches.hf.encoder_decoder import EncoderDecoder
from caches.protocol import EngineCache, capabilities, check_has_layers_of_ours
from caches.registry import recipe
from configs import (
    CacheConfig,
    ConfigError,
    EncoderDecoderCacheConfig,
    PlacedCacheConfig,
    QuantizedCacheConfig,
    SlidingWindowCacheConfig,
)

C = TypeVar("C", Cache, EncoderDecoder)

_NOT_OF_A_CODEC = {*PlacedCacheConfig.option_names(), "residency", "folder", "residual_length"}
_OF_A_CODEC = set(QuantizedCacheConfig.option_names()) - _NOT_OF_A_CODEC


def can_migrate(cache: EngineCache) -> TypeGuard[Cache | EncoderDecoder]:
    """Whether the cache consists of layers of ours, so that its content can go elsewhere."""
    return capabilities(cache).can_migrate


def convert(cache: C, name: str, **options: object) -> C:
    """A cache of the backend `name` with `options`, holding what `cache` holds, which stays as it is.

    Of an encoder-decoder cache `name` is for the decoder's tokens, unless it is "encoder_decoder". Rows share nothing
    in it. Raises `StepError` where the backend would keep other tokens than there are, `CapacityError` where it is too
    small, `UnsupportedLayerError` where it cannot keep such layers.
    """
    empty = empty_for(cache, recipe(name).options.from_dict(options))
    for target, source in zip(empty.parts, cache.parts, strict=True):
        source.crop(0)  # commits the step of another loop
        for share in plan([source.implicit], [target.implicit], shares_prefixes=False):
            share.apply()
    return empty


def migrate(cache: C, name: str, **options: Any) -> C:
    """A cache of the backend `name` with `options`, holding what `cache` held, which is empty afterwards.

    Rows that were only half selected (see `EngineCache.unfinished`) are selected on the way. Codes stay as they are,
    unless `options` say how to encode. Raises as `convert` does, before anything has changed. When memory or a disk is
    full later, `cache` gets back what was moved and holds the same as before; what was encoded comes back as the codes
    say. Only where that fails too is it left empty, with a `StepError`.
    """
    chosen = recipe(name).options
    if _OF_A_CODEC.isdisjoint(options):
        options = _codec_of(cache, chosen) | options
    target = empty_for(cache, chosen.from_dict(options))
    shares = []
    for giver, taker in zip(cache.parts, target.parts, strict=True):
        if not giver.selection.is_pending:
            giver.crop(0)  # commits the step of another loop
        shares += plan([giver.implicit], [taker.implicit], moves=True)
        taker.selection.defer_merge()
    move([cache], shares, "moving")
    return target


def apply_window(cache: Cache | EncoderDecoder, window_length: int) -> Cache:
    """A `sliding_window` cache that holds what of `cache` is in the window of `window_length` tokens. `cache` stays.

    Raises `UnsupportedLayerError` where no window can be imposed on the layers, `StepError` where tokens in the window
    were evicted.
    """
    check_has_layers_of_ours(cache)
    if not isinstance(cache, Cache):
        raise StepError(f"a window cannot be imposed on a {cache.name} cache of an encoder-decoder model")
    options = SlidingWindowCacheConfig(window_length=window_length, max_batch_size=cache.max_rows)
    empty = recipe(options.name).make(cache.specs, options)
    assert isinstance(empty, Cache)
    if cache.view.imposes_windows or cache.is_quantized:
        raise UnsupportedLayerError(f"the tokens of a {cache.name} cache cannot go on in another window")
    cache.crop(0)  # commits the step of another loop
    for share in plan([cache.implicit], [empty.implicit], shares_prefixes=False, cuts=True):
        share.apply()
    return empty


def load(
    path: str | Path,
    model: nn.Module,
    cache: str | None = None,
    device: torch.device | str | None = None,
    **options: object,
) -> Cache | EncoderDecoder:
    """The cache in a file that `Cache.save` wrote.

    path: the file. It is read as it is and checked byte by byte; nothing in it is executed. model: that which filled
    it. cache: the name of another backend to hold it, with `options`; None is the backend that it was saved from.
    device: where it is put; None is the model's.
    Raises `CacheFileError`, with what differs, for a damaged file and another model, and as `convert` does.
    """
    loaded = cast(Cache | EncoderDecoder, files.load(path, model, device))
    if cache is not None:
        return convert(loaded, cache, **options)
    if options:
        raise ConfigError(f"{', '.join(options)}: options are for another backend, so name it: cache=...")
    return loaded


def empty_for(cache: C, config: CacheConfig) -> C:
    """An empty cache of the backend that `config` is for, with the layers of `cache`."""
    check_has_layers_of_ours(cache)
    name = config.name
    if len(cache.parts) == 2 and not isinstance(config, EncoderDecoderCacheConfig):
        config = EncoderDecoderCacheConfig(self_cache=config)
    finds_layers = cache.stacks[0].finds_layers and not cache.layers
    empty = recipe(config.name).make(None if finds_layers else cache.specs, config)
    if not can_migrate(empty) or len(empty.parts) != len(cache.parts):
        raise UnsupportedLayerError(
            f"cache={name!r} cannot hold what is in a {type(cache).__name__} named {cache.name!r}: some of it would be "
            "lost. Choose another, or keep the cache"
        )
    return empty


def _codec_of(cache: C, options: type[Any]) -> dict[str, Any]:
    """The options by which `cache` quantizes, for a backend that has such options."""
    config = cache.stacks[0].layout.config if can_migrate(cache) else None
    if not isinstance(config, QuantizedCacheConfig) or not issubclass(options, QuantizedCacheConfig):
        return {}
    return {name: getattr(config, name) for name in (*_OF_A_CODEC, "residual_length")}
