"""Configurations: frozen dataclasses that travel as dicts and JSON. Knows neither torch nor models."""

from configs.base import Config, nearest
from configs.cache import (
    CacheConfig,
    DynamicCacheConfig,
    EncoderDecoderCacheConfig,
    FixedCacheConfig,
    HybridCacheConfig,
    MambaCacheConfig,
    NoCacheConfig,
    SlidingWindowCacheConfig,
    StaticCacheConfig,
)
from configs.engine import EngineConfig, preset, presets
from configs.errors import ConfigError, EngineError

__all__ = [
    "CacheConfig",
    "Config",
    "ConfigError",
    "DynamicCacheConfig",
    "EncoderDecoderCacheConfig",
    "EngineConfig",
    "EngineError",
    "FixedCacheConfig",
    "HybridCacheConfig",
    "MambaCacheConfig",
    "NoCacheConfig",
    "SlidingWindowCacheConfig",
    "StaticCacheConfig",
    "nearest",
    "preset",
    "presets",
]
