"""Cache backends by name. A recipe is a function from a model's layers and the backend's options to a cache.

Without any layers (None) it makes a cache that finds them as they are used, where it can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from caches.errors import UnknownCacheError, UnsupportedLayerError
from caches.protocol import EngineCache
from caches.spec.layer_spec import LayerSpec, read_specs
from configs import CacheConfig, EncoderDecoderCacheConfig, nearest
from configs.cache import CACHE_PLUGINS
from configs.plugins import check_name, load_plugins


@dataclass(frozen=True)
class Recipe:
    """name: what users write. options: the backend's configuration class. summary: one line on what it is for.

    any_layers: it suits every model, also one of whose layers nothing is known.
    """

    name: str
    options: type[CacheConfig]
    build: Callable[[Sequence[LayerSpec] | None, Any], EngineCache]
    summary: str
    any_layers: bool = False

    @property
    def has_a_size(self) -> bool:
        """Whether it has to be told how many tokens it will hold."""
        return self.options.needs_size


_recipes: dict[str, Recipe] = {}


def register(
    options: type[CacheConfig], *, any_layers: bool = False, replace: bool = False
) -> Callable[[Callable], Callable]:
    """Make a function the recipe for `options.name`. Its docstring's first line becomes the summary.

    The same definitions may be executed again. Raises `configs.ConfigError` where the name is taken by others, unless
    `replace` says that these take their place.
    """

    def decorate(build: Callable) -> Callable:
        if options.name in _recipes:
            holder = _recipes[options.name]
            check_name(f"a cache named {options.name!r}", [holder.options, holder.build], [options, build], replace)
        summary = (build.__doc__ or "").strip().splitlines()
        _recipes[options.name] = Recipe(options.name, options, build, summary[0] if summary else "", any_layers)
        return build

    return decorate


def recipe(name: str) -> Recipe:
    """The recipe of that name. Raises `UnknownCacheError` with the nearest names."""
    if name not in _recipes:
        load_plugins(CACHE_PLUGINS)
    if name not in _recipes:
        raise UnknownCacheError(f"there is no cache named {name!r}; {nearest(name, names())}")
    return _recipes[name]


def names() -> list[str]:
    """All there are, those of plug-ins too: entry points of the group "kvengine.caches"."""
    load_plugins(CACHE_PLUGINS)
    return list(_recipes)


def build(name: str, model_config: Any, options: CacheConfig | None = None, **changes: Any) -> EngineCache:
    """An empty cache for a model with this configuration (a `PreTrainedConfig`).

    options: the backend's configuration; `changes` override its fields, or stand alone. For an encoder-decoder model
    the backend keeps the decoder's tokens; `cross_cache` (a name or a `CacheConfig`) chooses another for the encoder's.
    Raises `UnknownCacheError`, `configs.ConfigError` (an unknown or impossible option), `UnsupportedLayerError`.
    """
    chosen = recipe(name)
    if chosen.any_layers:
        return chosen.build((), _complete(chosen, options, changes))
    return build_layers(name, read_specs(model_config), model_config.is_encoder_decoder, options, **changes)


def build_layers(
    name: str, specs: Sequence[LayerSpec], is_encoder_decoder: bool, options: CacheConfig | None = None, **changes: Any
) -> EngineCache:
    """`build` for these layers, whatever model they are of."""
    chosen = recipe(name)
    is_pair = chosen.options is EncoderDecoderCacheConfig
    if is_pair and not is_encoder_decoder:
        raise UnsupportedLayerError(
            f"cache={name!r} is for encoder-decoder models, and this one has no encoder: leave it out"
        )
    if is_pair or chosen.any_layers or not is_encoder_decoder:
        return chosen.build(specs, _complete(chosen, options, changes))
    cross_cache = changes.pop("cross_cache", None)
    pair = EncoderDecoderCacheConfig(self_cache=_complete(chosen, options, changes), cross_cache=cross_cache)
    return recipe(pair.name).build(specs, pair)


def _complete(chosen: Recipe, options: CacheConfig | None, changes: dict[str, Any]) -> CacheConfig:
    return chosen.options.from_dict({} if options is None else options.to_dict(), **changes)
