"""One frozen dataclass per cache family; its fields are the options of that family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from configs.base import Config, require_positive


@dataclass(frozen=True)
class CacheConfig(Config):
    """Base of the cache configurations. `name` is the backend's name in the registry."""

    name: ClassVar[str]


@dataclass(frozen=True)
class DynamicCacheConfig(CacheConfig):
    """A cache that makes room as tokens come. It has no options."""

    name: ClassVar[str] = "dynamic"


@dataclass(frozen=True)
class StaticCacheConfig(CacheConfig):
    """A cache of fixed size whose tensors never move.

    max_cache_len: tokens it can hold per row; None means prompt + new tokens of the first call that uses it.
    """

    name: ClassVar[str] = "static"
    max_cache_len: int | None = None

    def validate(self) -> None:
        require_positive("StaticCacheConfig", max_cache_len=self.max_cache_len)


@dataclass(frozen=True)
class NoCacheConfig(CacheConfig):
    """No cache: every step computes the whole sequence again. It has no options."""

    name: ClassVar[str] = "none"
