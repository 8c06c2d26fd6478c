"""A cache of another backend with the same content. Written once over what layers hold, so every backend has it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeGuard, TypeVar, cast

import torch
from torch import nn

from caches import files
from caches.core.layer import Layer
from caches.errors import StepError, UnsupportedLayerError
from caches.hf.cache import Cache
from caches.hf.encoder_decoder import EncoderDecoder
from caches.protocol import EngineCache, capabilities, check_has_layers_of_ours
from caches.registry import recipe
from caches.timeline.timeline import Timeline
from configs import CacheConfig, ConfigError, EncoderDecoderCacheConfig

C = TypeVar("C", Cache, EncoderDecoder)


def can_migrate(cache: EngineCache) -> TypeGuard[Cache | EncoderDecoder]:
    """Whether the cache consists of layers of ours, so that its content can go elsewhere."""
    return capabilities(cache).can_migrate


def convert(cache: C, name: str, **options: object) -> C:
    """A cache of the backend `name` with `options`, holding what `cache` holds, which stays as it is.

    Of an encoder-decoder cache `name` is for the decoder's tokens, unless it is "encoder_decoder".
    Raises `StepError` where the backend would keep other tokens than there are, `CapacityError` where it is too small,
    `UnsupportedLayerError` where it cannot keep such layers.
    """
    empty = empty_for(cache, recipe(name).options.from_dict(options))
    for target, source in zip(empty.parts, cache.parts, strict=True):
        source.crop(0)  # commits the step of another loop
        if source.batch_size != -1:
            committed_tokens = [
                layer.timeline.kept_tokens if isinstance(layer, Layer) and layer.stores else None
                for layer in source.layers
            ]
            for giver, taker in zip(source.layers, target.layers, strict=True):
                check_sinks(giver.timeline, taker.timeline)
            contents = (layer.dense_state() for layer in source.layers)  # of codes and files, copies
            hook_state = source.stack.hook.state_dict(source.batch_size)
            target.stack.load_dense(source.total_tokens, source.batch_size, committed_tokens, contents, hook_state)
            target.log = source.log
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


def check_sinks(source: Timeline, target: Timeline) -> None:
    """Raise `StepError` where one keeps the first tokens of a text whose window has moved, and the other does not."""
    counts = [getattr(timeline.retention, "sinks", 0) for timeline in (source, target)]
    if source.evicted_tokens and target.retention.bound is not None and counts[0] != counts[1]:
        raise StepError(
            f"after {source.total_tokens} tokens the cache has a window and the first {counts[0]} tokens of each row, "
            f"and the other backend keeps the first {counts[1]}: give it the same num_sink_tokens, or read the text "
            "again"
        )


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
