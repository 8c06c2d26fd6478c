"""Configurations: frozen dataclasses that travel as dicts and JSON. Knows neither torch nor models."""

from configs.base import Config, nearest
from configs.cache import CacheConfig, DynamicCacheConfig, NoCacheConfig, StaticCacheConfig
from configs.engine import EngineConfig
from configs.errors import ConfigError, EngineError

__all__ = [
    "CacheConfig",
    "Config",
    "ConfigError",
    "DynamicCacheConfig",
    "EngineConfig",
    "EngineError",
    "NoCacheConfig",
    "StaticCacheConfig",
    "nearest",
]
