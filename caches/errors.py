"""Errors of the caches.

CacheError (an `EngineError`)
├── UnknownCacheError (also a ValueError)       a name that is not registered
├── CapacityError (also a ValueError)      more tokens than a fixed cache can hold
├── UnsupportedLayerError (also a ValueError)   a layer kind that a backend cannot keep
├── UnknownContentError (also a ValueError)         what a cache holds cannot be compared with a text
└── StepError (also a RuntimeError)        begin / commit / abort called out of order, or tokens that are gone
"""

from __future__ import annotations

from configs import EngineError


class CacheError(EngineError):
    """Base of every error a cache raises."""


class UnknownCacheError(CacheError, ValueError):
    """A backend name that is not registered."""


class CapacityError(CacheError, ValueError):
    """More tokens than the cache can hold. Nothing was changed."""


class UnsupportedLayerError(CacheError, ValueError):
    """A model has a kind of layer that this backend cannot keep."""


class UnknownContentError(CacheError, ValueError):
    """What a cache holds cannot be compared with a text. The message is the reason."""


class StepError(CacheError, RuntimeError):
    """The steps of a cache were used out of order, or tokens are asked for that it no longer has."""
