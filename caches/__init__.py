"""Key-value caches, chosen by name. They work in our engine, in transformers' `generate` and in plain `model(...)`."""

from kvengine import check_siblings

check_siblings(__file__, "configs")

from caches.platform.heavy_imports import import_transformers

import_transformers()

from transformers.cache_utils import Cache as _TransformersCache

import caches.backends  # noqa: F401 - registers the recipes
from caches.core.branch import branch
from caches.core.row_transfer import join_rows, select_rows
from caches.errors import (
    CacheError,
    CacheFileError,
    CapacityError,
    StepError,
    UnknownCacheError,
    UnknownContentError,
    UnsupportedLayerError,
)
from caches.hf.adapter import HFCacheAdapter
from caches.hf.cache import Cache
from caches.hf.classic import (
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
from caches.hf.encoder_decoder import EncoderDecoder
from caches.hf.no_cache import NoCache
from caches.layers.layer_spec import LayerSpec, mask_kinds, read_specs
from caches.protocol import EngineCache, TokenLog
from caches.quantization.codec import register_codec
from caches.registry import Recipe, build, names, recipe, register
from caches.stores.dense import FixedStore, GrowingStore
from caches.stores.store import Store
from caches.timeline.timeline import Timeline
from caches.transfer.comparison import first_layer
from caches.transfer.convert import apply_window, convert, load, migrate
from configs import CacheConfig, QuantizedCacheConfig
from configs.cache_file import CacheFile, inspect


def driven(cache: EngineCache | _TransformersCache) -> EngineCache:
    """A live cache as the engine's loop drives it: ours as it is, transformers' own wrapped."""
    return cache if isinstance(cache, EngineCache) else HFCacheAdapter(cache)


__all__ = [
    "Cache", "CacheConfig", "CacheError", "CacheFile", "CacheFileError", "CapacityError", "DynamicCache",
    "EncoderDecoder", "EncoderDecoderCache", "EngineCache",
    "FixedStore", "GrowingStore", "HFCacheAdapter", "HQQQuantizedCache", "HybridCache",
    "HybridChunkedCache", "HybridMambaAttentionDynamicCache", "LayerSpec", "MambaCache", "NoCache", "OffloadedCache",
    "OffloadedStaticCache", "QuantizedCache", "QuantizedCacheConfig", "QuantoQuantizedCache", "Recipe", "SinkCache",
    "SlidingWindowCache", "StaticCache", "StepError", "Store", "Timeline", "TokenLog", "UnknownCacheError",
    "UnknownContentError", "UnsupportedLayerError", "apply_window", "branch", "build", "convert", "driven",
    "first_layer", "from_legacy_cache", "inspect", "join_rows", "load", "mask_kinds", "migrate", "names", "read_specs",
    "recipe", "register", "register_codec", "select_rows",
]  # fmt: skip
