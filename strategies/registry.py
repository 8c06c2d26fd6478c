"""Strategies by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from configs import ConfigError, nearest
from strategies.flow import Strategy

_strategies: dict[str, type[Strategy]] = {}
S = TypeVar("S", bound=type[Strategy])


def register(strategy: S) -> S:
    """Make a strategy class known under its `name`. It is a dataclass: see `Strategy`."""
    if strategy.name in _strategies:
        raise ValueError(f"a strategy named {strategy.name!r} is registered already")
    _strategies[strategy.name] = strategy
    return strategy


def names() -> list[str]:
    return list(_strategies)


def options(name: str) -> list[str]:
    """What a strategy of that name can be told. Raises `ConfigError` with the nearest names."""
    return [field.name for field in fields(_named(name))]  # type: ignore[arg-type]


def build(name: str, **given: Any) -> Strategy:
    """The strategy of that name with these options. Raises `ConfigError` with the nearest names."""
    return _named(name)(**given)


def _named(name: str) -> type[Strategy]:
    if name not in _strategies:
        raise ConfigError(f"there is no strategy named {name!r}; {nearest(name, names())}")
    return _strategies[name]
