"""Errors of the caches.

CacheError (an `EngineError`)
├── UnknownCacheError (also a ValueError)      a name that is not registered
├── CapacityError (also a ValueError)          more tokens or rows than the cache has room for
├── UnsupportedLayerError (also a ValueError)  a kind of layer that a backend cannot keep
├── UnknownContentError (also a ValueError)    the content of a cache cannot be compared with a text
├── CacheFileError (also a ValueError)         a file that is damaged, or of another model
└── StepError (also a RuntimeError)            begin / commit / abort out of order, or tokens that were evicted
"""

from __future__ import annotations

from configs.errors import CacheError, CacheFileError

__all__ = [
    "CacheError",
    "CacheFileError",
    "CapacityError",
    "StepError",
    "UnknownCacheError",
    "UnknownContentError",
    "UnsupportedLayerError",
]


class UnknownCacheError(CacheError, ValueError):
    """The name of a backend is not registered."""


class CapacityError(CacheError, ValueError):
    """More tokens or rows than the cache has room for. The cache is unchanged."""


class UnsupportedLayerError(CacheError, ValueError):
    """The model has a kind of layer that this backend cannot keep."""


class UnknownContentError(CacheError, ValueError):
    """The content of a cache cannot be compared with a text. The message says why."""


class StepError(CacheError, RuntimeError):
    """Steps were called out of order, or an operation needs tokens that the cache has evicted."""
