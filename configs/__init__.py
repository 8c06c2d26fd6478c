"""Configurations: frozen dataclasses that travel as dicts and JSON. Knows neither torch nor models."""

from configs.base import Config, nearest, require_positive
from configs.cache import (
    CacheConfig,
    DynamicCacheConfig,
    EncoderDecoderCacheConfig,
    HybridCacheConfig,
    MambaCacheConfig,
    NoCacheConfig,
    OffloadedCacheConfig,
    OffloadedStaticCacheConfig,
    PlacedCacheConfig,
    SinkCacheConfig,
    SlidingWindowCacheConfig,
    StaticCacheConfig,
)
from configs.engine import EngineConfig, preset, presets
from configs.errors import ConfigError, EngineError
from configs.fallbacks import FALLBACKS, checked_fallbacks
from configs.quantized import (
    CODECS,
    CodecFacts,
    OffloadedQuantizedCacheConfig,
    QuantizedCacheConfig,
    QuantizedSinkCacheConfig,
)

__all__ = [
    "CODECS",
    "FALLBACKS",
    "CacheConfig",
    "CodecFacts",
    "Config",
    "ConfigError",
    "DynamicCacheConfig",
    "EncoderDecoderCacheConfig",
    "EngineConfig",
    "EngineError",
    "HybridCacheConfig",
    "MambaCacheConfig",
    "NoCacheConfig",
    "OffloadedCacheConfig",
    "OffloadedQuantizedCacheConfig",
    "OffloadedStaticCacheConfig",
    "PlacedCacheConfig",
    "QuantizedCacheConfig",
    "QuantizedSinkCacheConfig",
    "SinkCacheConfig",
    "SlidingWindowCacheConfig",
    "StaticCacheConfig",
    "checked_fallbacks",
    "nearest",
    "preset",
    "presets",
    "require_positive",
]
