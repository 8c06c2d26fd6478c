"""Strategies by name."""

from __future__ import annotations

from typing import TypeVar

from configs import ConfigError, nearest
from strategies.flow import Strategy

_strategies: dict[str, type[Strategy]] = {}
S = TypeVar("S", bound=type[Strategy])


def register(strategy: S) -> S:
    """Make a strategy class known under its `name`."""
    if strategy.name in _strategies:
        raise ValueError(f"a strategy named {strategy.name!r} is registered already")
    _strategies[strategy.name] = strategy
    return strategy


def names() -> list[str]:
    return list(_strategies)


def build(name: str) -> Strategy:
    """The strategy of that name with its default options. Raises `ConfigError` with the nearest names."""
    if name not in _strategies:
        raise ConfigError(f"there is no strategy named {name!r}; {nearest(name, names())}")
    return _strategies[name]()
