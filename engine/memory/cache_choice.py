"""The cache of a call: a live one that was given, one by name, or the one that a plan chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache

import caches
from caches import EngineCache
from caches.platform.warn_once import warn_once
from configs import CacheConfig, EngineConfig, nearest
from configs.cache import COMPILED_CACHE, DEFAULT_CACHE, NO_CACHE
from engine.compiling.full_step import makes_graphs
from engine.errors import InputError, OptionError
from engine.memory.budget import Budget
from engine.memory.cache_size import empty_cache
from engine.memory.plan import choose_cache
from engine.model.model_lock import turn_of
from engine.request.call import Call
from engine.request.request import Request

_Value = TypeVar("_Value")
AUTO = "auto"  # not a backend: a plan chooses one


@dataclass(frozen=True)
class CacheChoice:
    """The cache arguments of a call. live: the cache object. chosen, options, max_cache_len: of a new cache."""

    live: EngineCache | None
    chosen: str | CacheConfig | None
    options: Mapping[str, object] | CacheConfig | None
    max_cache_len: int | None = None

    @property
    def name(self) -> str | None:
        """The name of the cache, as far as the call says it."""
        named = self.chosen if self.live is None else self.live
        return named if isinstance(named, str | None) else named.name


def read_cache_choice(model: PreTrainedModel, call: Call, config: EngineConfig) -> CacheChoice:
    """The one cache that the arguments of a call name. Raises `OptionError` where they name several."""
    past = call.past_key_values
    if isinstance(past, tuple):
        past = caches.from_legacy_cache(past, model.config)
    named = _said(model, call, "cache_implementation", call.cache_implementation)
    options = _said(model, call, "cache_config", call.cache_config)
    chosen = _one_of(cache=call.cache, past_key_values=past, cache_implementation=named)
    use_cache = call.options.get("use_cache", getattr(call.generation_config, "use_cache", None))
    if chosen is None or isinstance(chosen, (str, CacheConfig)):
        if call.trust_cache:
            raise OptionError("trust_cache=True is about a live cache, and none was given: leave it out")
        check_new((config.cache or DEFAULT_CACHE) if chosen is None else chosen, options)
        keeps_some = chosen is not None and (chosen == AUTO or not _configured(chosen, options).keeps_nothing)
        if use_cache is False and keeps_some:
            raise OptionError(f"use_cache=False contradicts cache={chosen!r}: leave one of them out")
        size = call.options.get("max_cache_len")
        if chosen is not None and chosen != AUTO:
            _check_size(_configured(chosen, options), size)
        return CacheChoice(None, chosen, options, size)
    if call.options.get("max_cache_len") is not None:
        raise OptionError("max_cache_len is of a new cache, but a live one was given: leave one of them out")
    if use_cache is False:
        raise OptionError("use_cache=False contradicts the live cache that was given: leave one of them out")
    if options is not None:
        raise OptionError("cache_config builds a new cache, but a live one was given: leave one of them out")
    if not isinstance(chosen, (TransformersCache, EngineCache)):
        raise OptionError(
            f"a cache is a name, a CacheConfig or a cache object, not a {type(chosen).__name__}; "
            f"names: {', '.join([*caches.names(), AUTO])}"
        )
    live = caches.driven(chosen)
    with turn_of(model):
        live.check_fits(model.config)
    return CacheChoice(live, None, None)


def check_new(chosen: str | CacheConfig, options: Mapping[str, object] | CacheConfig | None) -> None:
    """Raise `UnknownCacheError` or `ConfigError` unless there is such a cache with these options."""
    if chosen == AUTO and options is not None:
        raise OptionError("cache_config has the options of one cache, and cache='auto' chooses which: leave it out")
    if chosen != AUTO:
        _configured(chosen, options)


def _said(model: PreTrainedModel, call: Call, name: str, value: _Value | None) -> _Value | None:
    """An argument of the call, or the value of its `generation_config` where that differs from the model's own."""
    in_config = getattr(call.generation_config, name, None)
    if in_config == getattr(model.generation_config, name, None):
        return value
    return _one_of(**{name: value, f"generation_config.{name}": in_config})


def _one_of(**choices: _Value | None) -> _Value | None:
    """The one argument that is not None. Raises `OptionError` when there are several."""
    named = {name: value for name, value in choices.items() if value is not None}
    if len(named) > 1:
        raise OptionError(f"{' and '.join(named)} both choose the cache: leave all but one out")
    return next(iter(named.values()), None)


def new_cache(
    model: PreTrainedModel,
    choice: CacheChoice,
    request: Request,
    config: EngineConfig,
    budget: Budget,
    takes_cache: bool,
) -> EngineCache:
    """An empty cache for this request; of preliminary size before the encoder has run. takes_cache: of the runner."""
    chosen, options = choice.chosen, choice.options
    if chosen is None and request.config.use_cache is False:
        chosen = NO_CACHE  # set by the call, or by the model's generation_config
    if chosen is None and config.cache is None and not takes_cache:
        warn_once(
            f"{type(model).__name__} takes no cache of keys and values: it runs with cache='none' and reads the whole "
            "text again for every token"
        )
        chosen = NO_CACHE
    if chosen is None:
        chosen = config.cache
    if chosen is None:  # last the model's own setting, with its own options
        chosen = request.config.cache_implementation or DEFAULT_CACHE
        options = request.config.cache_config if options is None else options
    run_shape, compiled = request.run_shape, makes_graphs(config.compile)

    def build(config: CacheConfig) -> EngineCache:
        with turn_of(model):  # a trial changes the windows of the configuration while it lasts
            return caches.build(config.name, model.config, config)

    if chosen == AUTO and not request.is_encoded:
        return empty_cache(_configured(COMPILED_CACHE if compiled else DEFAULT_CACHE, None), run_shape, build)
    if chosen == AUTO:
        chosen = _planned(model, request, compiled)
    configured = _configured(chosen, options)
    _check_size(configured, choice.max_cache_len)
    return empty_cache(
        budget.fitted(configured, run_shape, model) if request.is_encoded else configured, run_shape, build
    )


def _configured(chosen: str | CacheConfig, options: Mapping[str, object] | CacheConfig | None) -> CacheConfig:
    """The configuration of the cache that was chosen. Raises `UnknownCacheError` and `ConfigError`."""
    name = chosen if isinstance(chosen, str) else chosen.name
    try:
        recipe = caches.recipe(name)
    except caches.UnknownCacheError:
        suggestion = nearest(name, [*caches.names(), AUTO])
        raise caches.UnknownCacheError(f"there is no cache named {name!r}; {suggestion}") from None
    values = {} if isinstance(chosen, str) else chosen.to_dict()
    return recipe.options.from_dict(values | dict(options or {}))


def _check_size(config: CacheConfig, size: int | None) -> None:
    """Raise `OptionError` where the call's `max_cache_len` does not apply to this cache."""
    self_config = config.parts[0]
    config_size = self_config.to_dict().get("max_cache_len")
    if size is not None and not self_config.needs_size:
        raise OptionError(
            f"max_cache_len={size} cannot apply: cache={self_config.name!r} needs no size. Leave it out, or give "
            "cache='static'"
        )
    if size is not None and config_size not in (None, size):
        raise OptionError(
            f"max_cache_len={size} contradicts max_cache_len={config_size} of the cache: leave one of them out"
        )


def _planned(model: PreTrainedModel, request: Request, compiled: bool) -> CacheConfig:
    """The cache that `cache="auto"` chooses for this request."""
    try:
        return choose_cache(model, replace(request.run_shape, shares=not compiled), compiled)
    except InputError as error:
        warn_once(f"cache='auto' cannot plan this model, so it is 'dynamic': {error}")
        return caches.recipe(DEFAULT_CACHE).options()
