"""Key-value caches, chosen by name. They work in our engine, in transformers' `generate` and in plain `model(...)`."""

from transformers.cache_utils import Cache as _TransformersCache

import caches.backends  # noqa: F401 - registers the recipes
from caches.cache import Cache, Driven
from caches.errors import CacheError, CapacityError, StepError, UnknownCache, UnsupportedLayer
from caches.foreign import ForeignCache
from caches.no_cache import NoCache
from caches.registry import Recipe, build, names, recipe, register


def driven(cache: Driven | _TransformersCache) -> Driven:
    """A live cache as the engine's loop drives it: ours as it is, transformers' own wrapped."""
    return cache if isinstance(cache, (Cache, ForeignCache, NoCache)) else ForeignCache(cache)


__all__ = [
    "Cache",
    "CacheError",
    "CapacityError",
    "Driven",
    "ForeignCache",
    "NoCache",
    "Recipe",
    "StepError",
    "UnknownCache",
    "UnsupportedLayer",
    "build",
    "driven",
    "names",
    "recipe",
    "register",
]
