"""Key-value caches, chosen by name. They work in our engine, in transformers' `generate` and in plain `model(...)`."""

from kvengine import check_siblings

check_siblings(__file__, "configs")

from caches.heavy_imports import import_transformers

import_transformers()

from transformers.cache_utils import Cache as _TransformersCache

import caches.backends  # noqa: F401 - registers the recipes
from caches.cache import Cache
from caches.classic import (
    DynamicCache,
    EncoderDecoderCache,
    HQQQuantizedCache,
    HybridCache,
    HybridChunkedCache,
    HybridMambaAttentionDynamicCache,
    MambaCache,
    OffloadedCache,
    OffloadedStaticCache,
    QuantizedCache,
    QuantoQuantizedCache,
    SinkCache,
    SlidingWindowCache,
    StaticCache,
    from_legacy_cache,
)
from caches.comparison import first_layer
from caches.conversion import convert, join_rows, select_rows
from caches.driven import Driven, Log
from caches.encoder_decoder import EncoderDecoder
from caches.errors import CacheError, CapacityError, StepError, Unknowable, UnknownCache, UnsupportedLayer
from caches.foreign import ForeignCache
from caches.moving import move
from caches.no_cache import NoCache
from caches.registry import Recipe, build, names, recipe, register
from caches.slide import slide
from caches.spec import LayerSpec, mask_kinds, read_specs
from caches.store import FixedStore, GrowingStore, Store
from caches.timeline import Timeline
from configs import CacheConfig, QuantizedCacheConfig


def driven(cache: Driven | _TransformersCache) -> Driven:
    """A live cache as the engine's loop drives it: ours as it is, transformers' own wrapped."""
    return cache if isinstance(cache, Driven) else ForeignCache(cache)


__all__ = [
    "Cache",
    "CacheConfig",
    "CacheError",
    "CapacityError",
    "Driven",
    "DynamicCache",
    "EncoderDecoder",
    "EncoderDecoderCache",
    "FixedStore",
    "ForeignCache",
    "GrowingStore",
    "HQQQuantizedCache",
    "HybridCache",
    "HybridChunkedCache",
    "HybridMambaAttentionDynamicCache",
    "LayerSpec",
    "Log",
    "MambaCache",
    "NoCache",
    "OffloadedCache",
    "OffloadedStaticCache",
    "QuantizedCache",
    "QuantizedCacheConfig",
    "QuantoQuantizedCache",
    "Recipe",
    "SinkCache",
    "SlidingWindowCache",
    "StaticCache",
    "StepError",
    "Store",
    "Timeline",
    "Unknowable",
    "UnknownCache",
    "UnsupportedLayer",
    "build",
    "convert",
    "driven",
    "first_layer",
    "from_legacy_cache",
    "join_rows",
    "mask_kinds",
    "move",
    "names",
    "read_specs",
    "recipe",
    "register",
    "select_rows",
    "slide",
]
