"""The recipes: which parts make which backend."""

from __future__ import annotations

from collections.abc import Sequence

from caches.cache import Cache
from caches.errors import UnsupportedLayer
from caches.no_cache import NoCache
from caches.registry import register
from caches.spec import EXOTIC, INDEX, KV, STATE, LayerSpec
from caches.store import FixedStore, GrowingStore
from caches.timeline import Timeline
from configs import ConfigError, DynamicCacheConfig, NoCacheConfig, StaticCacheConfig


@register(DynamicCacheConfig)
def dynamic(specs: Sequence[LayerSpec], options: DynamicCacheConfig) -> Cache:
    """Grows as tokens come: the default."""
    _refuse_all_but("dynamic", specs, {KV, INDEX, STATE, EXOTIC})
    return Cache("dynamic", specs, _growing)


@register(StaticCacheConfig)
def static(specs: Sequence[LayerSpec], options: StaticCacheConfig) -> Cache:
    """Fixed size, tensors that never move: what a compiled decode step needs."""
    _refuse_all_but("static", specs, {KV, INDEX, STATE})
    if options.max_cache_len is None:
        raise ConfigError("a static cache built by hand needs max_cache_len, the tokens it can hold per row")
    return Cache("static", specs, _fixed, fixed=True, max_tokens=options.max_cache_len)


@register(NoCacheConfig, any_layers=True)
def none(specs: Sequence[LayerSpec], options: NoCacheConfig) -> NoCache:
    """Keeps nothing and computes everything again in every step: for models without a cache, and as a reference."""
    return NoCache()


def _growing(spec: LayerSpec, timeline: Timeline) -> GrowingStore:
    return GrowingStore(timeline)


def _fixed(spec: LayerSpec, timeline: Timeline) -> FixedStore:
    return FixedStore(timeline)


def _refuse_all_but(name: str, specs: Sequence[LayerSpec], streams: set[str]) -> None:
    for index, spec in enumerate(specs):
        if spec.streams - streams:
            kept = " and ".join(sorted(spec.streams))
            other = "dynamic" if EXOTIC in spec.streams else "none"
            raise UnsupportedLayer(
                f"cache={name!r} keeps columns of keys and values, but layer {index} ({spec.layer_type}) keeps {kept}. "
                f"Generate with cache={other!r}, or pass transformers' own cache as past_key_values."
            )
