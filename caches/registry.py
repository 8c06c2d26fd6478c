"""The registry of cache backends: a recipe builds a cache from a model's layers and the backend's options.

A recipe that gets None for the layers builds a cache that learns them as they are used, or refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from caches.errors import UnknownCacheError, UnsupportedLayerError
from caches.layers.layer_spec import LayerSpec, read_specs
from caches.memory.expected_device import ExpectedDevice
from caches.platform.warn_once import warn_once
from caches.protocol import EngineCache
from configs import CacheConfig, ConfigError, EncoderDecoderCacheConfig, PlacedCacheConfig, nearest
from configs.cache import CACHE_PLUGINS
from configs.plugins import check_name, load_plugins


@dataclass(frozen=True)
class Recipe:
    """One registered backend.

    name: what users write. options: its configuration class. build: (layers, options) -> an empty cache.
    summary: one line for lists. any_layers: it works for every model, without knowing its layers.
    """

    name: str
    options: type[CacheConfig]
    build: Callable[[Sequence[LayerSpec] | None, object], EngineCache]
    summary: str
    any_layers: bool = False

    @property
    def has_a_size(self) -> bool:
        """Whether the number of tokens, max_cache_len, is needed to build it."""
        return self.options.needs_size

    def make(self, specs: Sequence[LayerSpec] | None, options: object) -> EngineCache:
        """`build`, with the options in the cache's layout, where files, stored prefixes and checks look for them."""
        if isinstance(options, CacheConfig) and options.harms_text is not None:
            warn_once(options.harms_text, "caches")
        cache = self.build(specs, options)
        stack = getattr(cache, "stack", None)
        if stack is None or stack.layout.config is not None or not isinstance(options, PlacedCacheConfig):
            return cache
        rows = options.max_batch_size if stack.layout.max_rows is None else stack.layout.max_rows
        expected = ExpectedDevice(options)
        changes = {"config": options, "max_rows": rows, "expected": expected if expected.is_given else None}
        stack.restart(dataclasses.replace(stack.layout, **changes))
        return cache


_recipes: dict[str, Recipe] = {}


def register(
    options: type[CacheConfig], *, any_layers: bool = False, replace: bool = False
) -> Callable[[Callable], Callable]:
    """Decorator: register a function as the recipe for `options.name`.

    The first line of its docstring becomes the summary. Executing the same definition again is allowed, as in a
    notebook; for another definition of the same name, `replace=True` is needed, or `configs.ConfigError` is raised.
    """

    def decorate(build: Callable) -> Callable:
        if options.name in _recipes:
            existing = _recipes[options.name]
            check_name(f"a cache named {options.name!r}", [existing.options, existing.build], [options, build], replace)
        summary = (build.__doc__ or "").strip().splitlines()
        _recipes[options.name] = Recipe(options.name, options, build, summary[0] if summary else "", any_layers)
        return build

    return decorate


def recipe(name: str) -> Recipe:
    """The recipe for `name`. Raises `UnknownCacheError` with the nearest names."""
    if name not in _recipes:
        load_plugins(CACHE_PLUGINS)
    if name not in _recipes:
        raise UnknownCacheError(f"there is no cache named {name!r}; {nearest(name, names())}")
    return _recipes[name]


def names() -> list[str]:
    """The names of all backends, plug-ins (entry points of the group "kvengine.caches") included."""
    load_plugins(CACHE_PLUGINS)
    return list(_recipes)


def build(
    name: str, model_config: PreTrainedConfig, options: CacheConfig | None = None, **changes: object
) -> EngineCache:
    """Build an empty cache.

    name: the backend. model_config: the model's `PreTrainedConfig`. options: the backend's configuration, by default
    all defaults; changes: fields that override it. For an encoder-decoder model the backend keeps the decoder's tokens,
    and `cross_cache` (a name or a `CacheConfig`) selects the backend for the encoder's.
    Raises `UnknownCacheError`, `configs.ConfigError` (an unknown or impossible option), `UnsupportedLayerError`.
    """
    chosen = recipe(name)
    if not isinstance(model_config, PreTrainedConfig):
        type_name = "None" if model_config is None else f"a {type(model_config).__name__}"
        raise ConfigError(f"model_config has to be a PreTrainedConfig, not {type_name}: pass model.config")
    if chosen.any_layers:
        return chosen.make((), _complete(chosen, options, changes))
    return build_layers(name, read_specs(model_config), model_config.is_encoder_decoder, options, **changes)


def build_layers(
    name: str, specs: Sequence[LayerSpec], is_encoder_decoder: bool, options: CacheConfig | None = None, **changes: Any
) -> EngineCache:
    """`build` for layers that are given as specs."""
    chosen = recipe(name)
    builds_both_caches = issubclass(chosen.options, EncoderDecoderCacheConfig)
    if builds_both_caches and not is_encoder_decoder:
        raise UnsupportedLayerError(
            f"cache={name!r} is for encoder-decoder models, and this one has no encoder: leave it out"
        )
    if builds_both_caches or chosen.any_layers or not is_encoder_decoder:
        return chosen.make(specs, _complete(chosen, options, changes))
    cross_cache = changes.pop("cross_cache", None)
    pair_options = EncoderDecoderCacheConfig(self_cache=_complete(chosen, options, changes), cross_cache=cross_cache)
    return recipe(pair_options.name).make(specs, pair_options)


def _complete(chosen: Recipe, options: CacheConfig | None, changes: Mapping[str, object]) -> CacheConfig:
    return chosen.options.from_dict({} if options is None else options.to_dict(), **changes)
