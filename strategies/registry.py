"""Strategies by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TypeVar, overload

from configs import ConfigError, nearest
from configs.plugins import check_name, load_plugins
from strategies.operations import Strategy

_PLUGINS = "kvengine.strategies"  # the group of entry points
_strategies: dict[str, type[Strategy]] = {}
S = TypeVar("S", bound=type[Strategy])


@overload
def register(strategy: S) -> S: ...


@overload
def register(*, replace: bool = False) -> Callable[[S], S]: ...


def register(strategy: S | None = None, *, replace: bool = False) -> S | Callable[[S], S]:
    """Make a strategy class known under its `name`. It is a dataclass: see `Strategy`.

    The same class may be defined again. Raises `ConfigError` where another has the name, unless
    `@register(replace=True)` says that this one takes its place.
    """
    if strategy is None:
        return lambda strategy: _registered(strategy, replace)
    return _registered(strategy, replace)


def _registered(strategy: S, replace: bool) -> S:
    if strategy.name in _strategies:
        check_name(f"a strategy named {strategy.name!r}", [_strategies[strategy.name]], [strategy], replace)
    _strategies[strategy.name] = strategy
    return strategy


def names() -> list[str]:
    """All there are, those of plug-ins too: entry points of the group "kvengine.strategies"."""
    load_plugins(_PLUGINS)
    return list(_strategies)


def options(name: str) -> list[str]:
    """The options of the strategy of that name. Raises `ConfigError` with the nearest names."""
    return [field.name for field in fields(_named(name))]  # type: ignore[arg-type]


def build(name: str, **settings: object) -> Strategy:
    """The strategy of that name with these options. Raises `ConfigError` with the nearest names."""
    return _named(name)(**settings)


def _named(name: str) -> type[Strategy]:
    if name not in _strategies:
        load_plugins(_PLUGINS)
    if name not in _strategies:
        raise ConfigError(f"there is no strategy named {name!r}; {nearest(name, names())}")
    return _strategies[name]
