"""Configurations: frozen dataclasses that travel as dicts and JSON. Knows neither torch nor models."""

from configs.base import Config, nearest
from configs.cache import (
    CacheConfig,
    DynamicCacheConfig,
    EncoderDecoderCacheConfig,
    HybridCacheConfig,
    MambaCacheConfig,
    NoCacheConfig,
    PlacedCacheConfig,
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
    "HybridCacheConfig",
    "MambaCacheConfig",
    "NoCacheConfig",
    "PlacedCacheConfig",
    "SlidingWindowCacheConfig",
    "StaticCacheConfig",
    "nearest",
    "preset",
    "presets",
]
