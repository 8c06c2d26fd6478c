"""Which cache a call chooses: a live one that was given, one by name, or the one that a plan finds."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache

import caches
from caches import Driven
from configs import CacheConfig, EngineConfig, nearest
from engine.budget import Budget
from engine.call import Call
from engine.errors import InputError, OptionError
from engine.fresh import check_kept, fresh_cache
from engine.request import Request

AUTO = "auto"  # no backend: a plan chooses one


@dataclass(frozen=True)
class CacheChoice:
    """What a call says about its cache. live: the object that was given. chosen, options: of a new one."""

    live: Driven | None
    chosen: str | CacheConfig | None
    options: dict[str, Any] | CacheConfig | None


def read_cache_choice(model: PreTrainedModel, call: Call, config: EngineConfig) -> CacheChoice:
    """The one cache that the call names, in whichever of its arguments. Raises `OptionError` where several do, and
    what its configuration raises.
    """
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
        if use_cache is False and chosen not in (None, "none"):
            raise OptionError(f"use_cache=False contradicts cache={chosen!r}: leave one of them out")
        _check_new(model, (config.cache or "dynamic") if chosen is None else chosen, options)
        return CacheChoice(None, chosen, options)
    if use_cache is False:
        raise OptionError("use_cache=False contradicts the live cache that was given: leave one of them out")
    if options is not None:
        raise OptionError("cache_config builds a new cache, but a live one was given: leave one of them out")
    if not isinstance(chosen, (TransformersCache, Driven)):
        raise OptionError(
            f"a cache is a name, a CacheConfig or a cache object, not a {type(chosen).__name__}; "
            f"names: {', '.join([*caches.names(), AUTO])}"
        )
    live = caches.driven(chosen)
    live.check_fits(model.config)
    return CacheChoice(live, None, None)


def _check_new(model: PreTrainedModel, chosen: str | CacheConfig, options: dict[str, Any] | CacheConfig | None) -> None:
    """Whether there is such a cache with these options, before an encoder has worked for it."""
    if chosen == AUTO and options is not None:
        raise OptionError("cache_config has the options of one cache, and cache='auto' chooses which: leave it out")
    if chosen == AUTO:
        return
    config = _configured(chosen, options)
    if model.config.is_encoder_decoder:
        check_kept(config, functools.partial(_built, model.config))


def _said(model: PreTrainedModel, call: Call, name: str, value: Any) -> Any:
    """An argument of the call, or what its `generation_config` says other than the model's own."""
    in_config = getattr(call.generation_config, name, None)
    if in_config == getattr(model.generation_config, name, None):
        return value
    return _one_of(**{name: value, f"generation_config.{name}": in_config})


def _one_of(**given: Any) -> Any:
    """The one argument that is not None. Raises `OptionError` when there are several."""
    named = {name: value for name, value in given.items() if value is not None}
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
) -> Driven:
    """An empty cache for this request. takes_cache: whether the model's forward takes one of keys and values."""
    chosen, options = choice.chosen, choice.options
    if chosen is None and request.config.use_cache is False:
        chosen = "none"  # said by this call, or by the model's own configuration
    if chosen is None and config.cache is None and not takes_cache:
        _warn_once(
            f"{type(model).__name__} takes no cache of keys and values: it runs with cache='none' and reads the whole "
            "text again for every token"
        )
        chosen = "none"
    if chosen is None:
        chosen = config.cache
    if chosen is None:  # only now the model's own setting, whose options are for its own choice
        chosen = request.config.cache_implementation or "dynamic"
        options = request.config.cache_config if options is None else options
    if chosen == AUTO:
        chosen = _planned(model, request, compiled=config.compile != "off")
    fitted = budget.fitted(_configured(chosen, options), request.course, model)
    return fresh_cache(fitted, request.course, functools.partial(_built, model.config))


def _configured(chosen: str | CacheConfig, options: dict[str, Any] | CacheConfig | None) -> CacheConfig:
    """The configuration of the cache that was chosen. Raises `UnknownCache` and `ConfigError`."""
    name = chosen if isinstance(chosen, str) else chosen.name
    try:
        recipe = caches.recipe(name)
    except caches.UnknownCache:
        known = nearest(name, [*caches.names(), AUTO])
        raise caches.UnknownCache(f"there is no cache named {name!r}; {known}") from None
    values = {} if isinstance(chosen, str) else chosen.to_dict()
    return recipe.options.from_dict(values | dict(options or {}))


def _planned(model: PreTrainedModel, request: Request, compiled: bool) -> CacheConfig:
    """What `cache="auto"` is for this request."""
    from engine.planning import choose_cache  # which needs a Generator's parts

    try:
        return choose_cache(model, replace(request.course, shares=not compiled), compiled)
    except InputError as error:
        _warn_once(f"cache='auto' cannot plan this model, so it is 'dynamic': {error}")
        return caches.recipe("dynamic").options()


def _built(model_config: Any, config: CacheConfig) -> Driven:
    return caches.build(config.name, model_config, config)


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger("engine").warning(message)
