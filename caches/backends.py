"""The recipes: which parts make which backend, and which layers each refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from caches.core.cache_layout import MOVES, CacheLayout, needed_by_attention
from caches.core.sink_hook import SinkHook
from caches.errors import UnsupportedLayerError
from caches.hf.cache import Cache
from caches.hf.encoder_decoder import EncoderDecoder
from caches.hf.no_cache import NoCache
from caches.layers.layer_spec import CROSS, INDEX, KV, MODEL_SPECIFIC, STATE, LayerSpec
from caches.memory.buffers import Buffer, DeviceBuffer, DiskBuffer, HostBuffer
from caches.memory.expected_device import ExpectedDevice
from caches.quantization.codec import Codec, new_codec
from caches.registry import recipe, register
from caches.stores.dense import FixedStore, GrowingStore
from caches.stores.offloaded import FixedOffloadedStore, OffloadedStore
from caches.stores.quantized import QuantizedStore
from caches.stores.slot import Slot, StoreFactory
from caches.stores.store import Store
from caches.timeline.block_timeline import BlockTimeline
from caches.timeline.retention import KeepRecent, KeepSinks, Retention
from caches.timeline.timeline import Timeline
from configs import (
    CacheConfig,
    ConfigError,
    DynamicCacheConfig,
    EncoderDecoderCacheConfig,
    HybridCacheConfig,
    MambaCacheConfig,
    NoCacheConfig,
    OffloadedCacheConfig,
    OffloadedQuantizedCacheConfig,
    OffloadedStaticCacheConfig,
    PlacedCacheConfig,
    QuantizedCacheConfig,
    QuantizedSinkCacheConfig,
    SinkCacheConfig,
    SlidingWindowCacheConfig,
    StaticCacheConfig,
)

Layers = Sequence[LayerSpec] | None
_FETCHED = "a graph needs static addresses, and here keys and values are fetched layer by layer"
_IN_WORDS = {KV: "keys and values", INDEX: "an index", STATE: "states"}


@register(DynamicCacheConfig)
def dynamic(specs: Layers, options: DynamicCacheConfig) -> Cache:
    """Grows as tokens come: the default."""
    _refuse_all_but(options.name, specs, {KV, INDEX, STATE, MODEL_SPECIFIC})
    return _cache(specs, options, _growing)


@register(StaticCacheConfig)
def static(specs: Layers, options: StaticCacheConfig) -> Cache:
    """Fixed size, tensors that never move: what a compiled decode step needs."""
    return _fixed_size(specs, options)


@register(HybridCacheConfig)
def hybrid(specs: Layers, options: HybridCacheConfig) -> Cache:
    """`static` for models of which some layers look back at a window only."""
    sizes = {spec.attention_span.size is None for spec in _known(specs, options) if spec.keeps_kv}
    if False not in sizes:
        extent, backend = ("everything", "static") if sizes else ("nothing: they keep no keys", "mamba")
        raise UnsupportedLayerError(
            f"cache='hybrid' is for models of which some layers look back at a window; here all look at {extent}. Use "
            f"cache={backend!r}"
        )
    return _fixed_size(specs, options)


@register(SlidingWindowCacheConfig)
def sliding_window(specs: Layers, options: SlidingWindowCacheConfig) -> Cache:
    """Only the last tokens, in constant memory: the model's own window, or one imposed on its full attention."""
    specs = _known(specs, options)
    _refuse_all_but(options.name, specs, {KV, STATE})
    window = options.window_length
    _refuse_without_keys(options.name, specs)
    for index, spec in enumerate(specs):
        if window is None and spec.keeps_kv and spec.attention_span.size is None:
            raise UnsupportedLayerError(
                f"cache='sliding_window' keeps the model's own window, but layer {index} ({spec.layer_type}) looks at "
                "everything. Give a window_length to impose one, or use cache='static' to keep everything"
            )
        if window is not None and spec.attention_span.kind == "chunk":
            raise UnsupportedLayerError(
                f"window_length={window} cannot be imposed on layer {index} ({spec.layer_type}), which looks at chunks"
            )
    return _cache(specs, options, _fixed, max_tokens=options.max_cache_len, retention=partial(_within, window))


@register(OffloadedCacheConfig)
def offloaded(specs: Layers, options: OffloadedCacheConfig) -> Cache:
    """`dynamic` in host memory or on disk: the device only has the layers at work."""
    _refuse_all_but(options.name, specs, {KV, INDEX, STATE, MODEL_SPECIFIC})
    return _cache(specs, options, partial(_offloaded, options, False, _is_read_later(specs)), compile_blocker=_FETCHED)


@register(OffloadedStaticCacheConfig)
def offloaded_static(specs: Layers, options: OffloadedStaticCacheConfig) -> Cache:
    """`offloaded` with a fixed size."""
    make_store = partial(_offloaded, options, True, _is_read_later(specs))
    return _fixed_size(specs, options, make_store, compile_blocker=_FETCHED)


@register(SinkCacheConfig)
def sink(specs: Layers, options: SinkCacheConfig) -> Cache:
    """The first tokens and the last: text without end, in constant memory."""
    return _cache(specs, options, _fixed, **_sinks(specs, options))


@register(QuantizedSinkCacheConfig)
def quantized_sink(specs: Layers, options: QuantizedSinkCacheConfig) -> Cache:
    """`sink` whose window is `quantized`: the first tokens and the most recent ones stay in full."""
    cache = _cache(specs, options, **_sinks(specs, options), **_blocks(specs, options))
    _check_quantizes(cache, options)
    return cache


def _sinks(specs: Layers, options: SinkCacheConfig) -> dict[str, Any]:
    """Fields of the layout of a cache with sinks. Raises `UnsupportedLayerError` for layers that cannot have them."""
    name, window = options.name, options.window_length
    if specs is not None:
        _refuse_without_keys(name, specs)
    if window is None:
        raise UnsupportedLayerError(
            f"cache={name!r} keeps a row's first tokens and a window of the last ones, and no window was given: "
            "give window_length, or use cache='static' to keep everything"
        )
    check = partial(_check_sinks, name, window)
    if specs is not None:
        check(specs)
    return {
        "retention": partial(_with_sinks, window, options.num_sink_tokens),
        "make_hook": partial(SinkHook, window, check),
    }


@register(MambaCacheConfig)
def mamba(specs: Layers, options: MambaCacheConfig) -> Cache:
    """The states of a model without attention, in tensors that never move."""
    _refuse_all_but(options.name, _known(specs, options), {STATE})
    return _cache(specs, options, _fixed)


@register(QuantizedCacheConfig)
def quantized(specs: Layers, options: QuantizedCacheConfig) -> Cache:
    """Older keys and values in few bits, recent ones in full: for long contexts in little memory."""
    _refuse_all_but(options.name, specs, {KV, INDEX, STATE, MODEL_SPECIFIC})
    cache = _cache(specs, options, **_blocks(specs, options))
    _check_quantizes(cache, options)
    return cache


def _blocks(specs: Layers, options: QuantizedCacheConfig) -> dict[str, Any]:
    """Fields of the layout of a cache that quantizes in blocks."""
    codecs: dict[str, Codec] = {name: new_codec(options, name) for name in ("keys", "values")}
    block = max(codec.block for codec in codecs.values())
    return {
        "make_store": partial(_quantized, options, codecs, _is_read_later(specs)),
        "make_timeline": partial(_block_timeline, block if block > 1 else options.block, options.residual_length),
    }


def _check_quantizes(cache: Cache, options: QuantizedCacheConfig) -> None:
    """Raise `UnsupportedLayerError` where nothing would be encoded."""
    if not cache.stack.finds_layers and not cache.is_quantized:
        windows = [
            spec.attention_span.size for spec in cache.specs if spec.keeps_kv and spec.attention_span.size is not None
        ]
        reason = (
            f"windows of {max(windows)} tokens are no longer than what stays in full" if windows else "it has no keys"
        )
        raise UnsupportedLayerError(
            f"cache={options.name!r} would encode nothing of this model: {reason}. Use cache='dynamic'"
            + (f", or a residual_length below {options.residual_length}" if windows else "")
        )


@register(OffloadedQuantizedCacheConfig)
def offloaded_quantized(specs: Layers, options: OffloadedQuantizedCacheConfig) -> Cache:
    """`quantized` in host memory or on disk: what is fetched for a layer is its codes."""
    return quantized(specs, options)


@register(EncoderDecoderCacheConfig)
def encoder_decoder(specs: Layers, options: EncoderDecoderCacheConfig) -> EncoderDecoder:
    """Two caches of any kind for an encoder-decoder model: the decoder's tokens, and the encoder's."""
    cache = _part(specs, options.self_cache)
    rows = getattr(options.self_cache, "max_batch_size", None)
    cross = _part([CROSS] * len(cache.specs), options.cross_cache or _default_cross(cache, options.self_cache, rows))
    return EncoderDecoder(cache, cross)


@register(NoCacheConfig, any_layers=True)
def none(specs: Layers, options: NoCacheConfig) -> NoCache:
    """Keeps nothing and computes everything again in every step: for models without a cache, and as a reference."""
    return NoCache(options.name)


def _part(specs: Layers, choice: str | CacheConfig) -> Cache:
    name, options = (choice, {}) if isinstance(choice, str) else (choice.name, choice.to_dict())
    chosen = recipe(name)
    cache = chosen.make(specs, chosen.options.from_dict(options))
    if not isinstance(cache, Cache):
        raise UnsupportedLayerError(
            f"a part of an encoder-decoder cache keeps keys and values, and {name!r} does not: choose another for it"
        )
    return cache


def _default_cross(self_cache: Cache, options: str | CacheConfig, rows: int | None) -> CacheConfig:
    """The backend for the encoder's tokens next to `self_cache`, where none was chosen."""
    if isinstance(options, str):
        options = recipe(options).options()
    residency, folder = (getattr(options, name, None) for name in ("residency", "folder"))
    if residency not in (None, "device"):
        config_class = OffloadedStaticCacheConfig if self_cache.fixed else OffloadedCacheConfig
        return config_class(max_batch_size=rows, residency=residency, folder=folder)
    return StaticCacheConfig(max_batch_size=rows) if self_cache.fixed else DynamicCacheConfig()


def _growing(slot: Slot) -> GrowingStore:
    return GrowingStore(slot.timeline)


def _fixed(slot: Slot) -> FixedStore:
    return FixedStore(slot.timeline)


def _quantized(options: QuantizedCacheConfig, codecs: dict[str, Codec], is_read_later: bool, slot: Slot) -> Store:
    if slot.name not in codecs or not isinstance(slot.timeline, BlockTimeline):
        return _growing(slot)
    return QuantizedStore(slot, codecs[slot.name], _buffers(options, slot), is_read_later)


def _block_timeline(
    block: int, residual: int, retention: Retention, max_tokens: int | None, max_rows: int | None, *, all_room: bool
) -> Timeline:
    """Of a window that is no longer than the residual nothing would ever be encoded."""
    if retention.bound is not None and retention.bound <= max(residual, block):
        return Timeline(retention, max_tokens, max_rows, all_room)
    return BlockTimeline(retention, max_rows, block=block, residual=residual)


def _offloaded(options: OffloadedCacheConfig, is_fixed: bool, is_read_later: bool, slot: Slot) -> Store:
    if options.offload_only_non_sliding and slot.spec.attention_span.size is not None:
        return _fixed(slot) if is_fixed else _growing(slot)
    store_class = FixedOffloadedStore if is_fixed else OffloadedStore
    return store_class(slot, _buffers(options, slot)(), is_read_later)


def _buffers(options: OffloadedCacheConfig | QuantizedCacheConfig, slot: Slot) -> Callable[[], Buffer]:
    """What makes the buffers of a store: those on disk share the cache's file."""
    if options.residency == "disk":
        return partial(DiskBuffer, slot.scratch.disk_file_in(options.folder))
    return HostBuffer if options.residency == "host" else DeviceBuffer


def _is_read_later(specs: Layers) -> bool:
    """Whether later layers may read what a layer was handed, because they keep nothing themselves."""
    return specs is None or any(not spec.components for spec in specs)


def _cache(specs: Layers, options: PlacedCacheConfig, make_store: StoreFactory, **fields: Any) -> Cache:
    """fields: further ones of the `CacheLayout`. Raises `ConfigError` for a folder that is not there."""
    folder = getattr(options, "folder", None)
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"folder={folder!r} is no folder on this machine: make it first, or leave it out")
    expected, is_fixed = ExpectedDevice(options), make_store is _fixed
    layout = CacheLayout(
        options.name,
        specs,
        make_store,
        options,
        max_rows=options.max_batch_size,
        expected=expected if expected.is_given else None,
        **({"preallocated": is_fixed} | fields),
    )
    return Cache(layout)


def _fixed_size(
    specs: Layers,
    options: StaticCacheConfig | OffloadedStaticCacheConfig,
    make_store: StoreFactory = _fixed,
    compile_blocker: str | None = MOVES,
) -> Cache:
    _refuse_all_but(options.name, specs, {KV, INDEX, STATE})
    if options.max_cache_len is None and any(spec != CROSS for spec in _known(specs, options)):
        raise ConfigError(f"a {options.name} cache built by hand needs max_cache_len, the tokens it can hold per row")
    return _cache(
        specs, options, make_store, preallocated=True, compile_blocker=compile_blocker, max_tokens=options.max_cache_len
    )


def _within(window: int | None, spec: LayerSpec) -> Retention:
    """What the layer's attention span needs, but never more than a token's window."""
    if window is None or (spec.attention_span.size is not None and spec.attention_span.size <= window):
        return needed_by_attention(spec)
    return KeepRecent(window - 1)


def _with_sinks(window: int, sinks: int, spec: LayerSpec) -> Retention:
    """What the layer's attention span needs, or a window that begins with sinks where the span is wider."""
    if spec.attention_span.size is not None and spec.attention_span.size <= window:
        return needed_by_attention(spec)
    return KeepSinks(window - 1, sinks)


def _check_sinks(name: str, window: int, specs: Sequence[LayerSpec]) -> None:
    """Refuse layers of which the first tokens cannot be shown along with a window."""
    _refuse_all_but(name, specs, {KV, STATE})
    sizes = [spec.attention_span.size for spec in specs if spec.keeps_kv]
    if not sizes:
        raise UnsupportedLayerError(
            f"cache={name!r} with window_length={window} shows a row's first keys and values, and no layer of this "
            "model keeps any: use cache='mamba' or cache='dynamic'"
        )
    if all(size is not None and size <= window for size in sizes):
        raise UnsupportedLayerError(
            f"cache={name!r} with window_length={window} would never show its first tokens: no layer looks back "
            f"further than its own window of {max(size or 0 for size in sizes)}. Use cache='sliding_window' without "
            "options"
        )
    for index, spec in enumerate(specs):
        if not spec.keeps_kv:
            continue
        if spec.attention_span.kind == "chunk":
            raise UnsupportedLayerError(
                f"window_length={window} cannot be imposed on layer {index} ({spec.layer_type}), which looks at chunks"
            )
        if spec.rotation is None and (spec.attention_span.size is None or spec.attention_span.size > window):
            raise UnsupportedLayerError(
                f"cache={name!r} has to rotate the keys of layer {index} ({spec.layer_type}), and their RoPE "
                "parameters are not known: build it with the model's configuration, or use cache='sliding_window' with "
                "a window_length"
            )


def _refuse_without_keys(name: str, specs: Sequence[LayerSpec]) -> None:
    if not any(spec.keeps_kv for spec in specs):
        raise UnsupportedLayerError(f"cache={name!r} keeps keys and values, but the model has none: cache='mamba'")


def _known(specs: Layers, options: CacheConfig) -> Sequence[LayerSpec]:
    if specs is None:
        raise UnsupportedLayerError(
            f"a {options.name} cache has to know the layers it is for: build it with the model's configuration"
        )
    return specs


def _refuse_all_but(name: str, specs: Layers, components: set[str]) -> None:
    for index, spec in enumerate(specs or ()):
        if spec.components - components:
            data = " and ".join(
                _IN_WORDS.get(component, component) for component in sorted(spec.components - components)
            )
            backend = "none" if spec.components - {KV, INDEX, STATE, MODEL_SPECIFIC} else "dynamic"
            raise UnsupportedLayerError(
                f"layer {index} ({spec.layer_type}) keeps {data}, which cache={name!r} has no place for. Generate with "
                f"cache={backend!r}, or pass transformers' own cache as past_key_values."
            )
