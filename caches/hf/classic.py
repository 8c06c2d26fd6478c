"""The classic names of transformers' caches: thin constructors over the recipes, with the arguments they had.

config: the model's. The options are those of the backend's configuration; besides, `batch_size` stands for
`max_batch_size`, and torch's data types and devices and device numbers are taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from caches.core.row_copies import join_rows
from caches.errors import StepError, UnsupportedLayerError
from caches.hf.cache import Cache
from caches.hf.encoder_decoder import EncoderDecoder
from caches.layers.layer_spec import CROSS, read_specs
from caches.registry import build, recipe
from configs import ConfigError, QuantizedCacheConfig


def from_legacy_cache(
    past_key_values: Sequence[Sequence[torch.Tensor]], config: PreTrainedConfig | None = None
) -> Cache | EncoderDecoder:
    """A dynamic cache that holds tuples of keys and values [rows, kv_heads, tokens, head_dim], one per layer.

    Four tensors per layer, the last two of the cross-attention, make one for an encoder-decoder model. config: the
    model's; without it every layer is taken for one of full attention. Raises `StepError` for what does not fit.
    """
    widths = {len(layer) for layer in past_key_values}
    if widths == {4}:
        self_cache = from_legacy_cache([layer[:2] for layer in past_key_values], config)
        cross = from_legacy_cache([layer[2:] for layer in past_key_values])
        return EncoderDecoderCache(self_cache, cross)
    if widths != {2}:
        raise StepError(f"a layer of a legacy cache has 2 or 4 tensors, but these have {sorted(widths)}")
    dynamic = recipe("dynamic")
    cache = dynamic.build(None if config is None else read_specs(config), dynamic.options())
    assert isinstance(cache, Cache)
    if not cache.stack.finds_layers and len(cache.layers) != len(past_key_values):
        raise StepError(f"the model has {len(cache.layers)} layers, but the legacy cache {len(past_key_values)}")
    missing = [index for index, layer in enumerate(past_key_values) if any(tensor is None for tensor in layer)]
    if len(missing) == len(past_key_values):
        return cache  # of a cache before its first step
    if missing:
        raise StepError(
            f"{len(missing)} of {len(past_key_values)} layers have None in place of keys or values, layer {missing[0]} "
            "first: give the tensors of every layer, or None in all for an empty cache"
        )
    cache.load_keys_and_values(past_key_values)
    return cache


class DynamicCache:
    """Grows as tokens come. Without a `config` its layers appear as they are used, all of full attention."""

    def __new__(cls, config: PreTrainedConfig | None = None, *, offloading: bool = False, **options: Any) -> Any:
        return _build("offloaded" if offloading else "dynamic", config, options)

    from_legacy_cache = staticmethod(from_legacy_cache)
    from_batch_splits = staticmethod(join_rows)


class StaticCache:
    """Fixed size, tensors that never move."""

    def __new__(cls, config: PreTrainedConfig, *, offloading: bool = False, **options: Any) -> Any:
        return _build("offloaded_static" if offloading else "static", config, options)


class OffloadedCache:
    """`DynamicCache` of which the device only has the layers at work."""

    def __new__(cls, config: PreTrainedConfig | None = None, **options: Any) -> Any:
        return DynamicCache(config, offloading=True, **options)


class OffloadedStaticCache:
    """`StaticCache` of which the device only has the layers at work. offload_device: the host's."""

    def __new__(cls, config: PreTrainedConfig, *, offload_device: object = "cpu", **options: Any) -> Any:
        if str(offload_device) != "cpu":
            raise ConfigError(
                f"offload_device={str(offload_device)!r}, but layers can wait in host memory ('cpu') only, or in a "
                "file: leave it out, or give residency='disk'"
            )
        return StaticCache(config, offloading=True, **options)


class QuantizedCache:
    """Older keys and values in few bits. Without a `config` its layers appear as they are used."""

    def __new__(cls, backend: str, config: PreTrainedConfig | None = None, **options: Any) -> Any:
        return _build("quantized", config, options | {"backend": backend})


class QuantoQuantizedCache:
    """`QuantizedCache` with quanto. cache_config: its options, instead of `options`."""

    backend = "quanto"

    def __new__(
        cls, cache_config: QuantizedCacheConfig | None = None, config: PreTrainedConfig | None = None, **options: Any
    ) -> Any:
        if cache_config is not None:
            options = {**cache_config.to_dict(use_diff=True), **options}
            options.pop("name")
        if options.setdefault("backend", cls.backend) != cls.backend:
            raise ConfigError(
                f"{cls.__name__} writes with {cls.backend}, but its configuration says backend={options['backend']!r}: "
                "use QuantizedCache, which takes every backend"
            )
        return QuantizedCache(config=config, **options)


class HQQQuantizedCache(QuantoQuantizedCache):
    """`QuantizedCache` with hqq. cache_config: its options, instead of `options`."""

    backend = "hqq"


class HybridCache:
    """`StaticCache` for models of which some layers look back at a window only."""

    def __new__(cls, config: PreTrainedConfig, **options: Any) -> Any:
        return _build("hybrid", config, options)


class HybridChunkedCache(HybridCache):
    """`HybridCache`, by the name it had for models of which some layers look back to the start of a chunk only."""


class SlidingWindowCache:
    """Only the last tokens: the model's own window, or one imposed with `window_length`."""

    def __new__(cls, config: PreTrainedConfig, **options: Any) -> Any:
        return _build("sliding_window", config, options)


class SinkCache:
    """The first tokens and the last: text without end, in constant memory.

    pads: how many padding tokens each row begins with; the engine sets them itself. Without a `config` only the engine
    can use it for more tokens than the window has: it knows the model.
    """

    def __new__(
        cls,
        window_length: int,
        num_sink_tokens: int = 4,
        config: PreTrainedConfig | None = None,
        pads: Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        cache = _build("sink", config, options | {"window_length": window_length, "num_sink_tokens": num_sink_tokens})
        cache.set_padding(pads)
        return cache


class MambaCache:
    """The states of a model without attention."""

    def __new__(cls, config: PreTrainedConfig, **options: Any) -> Any:
        return _build("mamba", config, options)


class HybridMambaAttentionDynamicCache:
    """`DynamicCache` for models with attention and states."""

    def __new__(cls, config: PreTrainedConfig, **options: Any) -> Any:
        specs = read_specs(config)
        if not (any(spec.keeps_state for spec in specs) and any(spec.keeps_kv for spec in specs)):
            layers = ", ".join(dict.fromkeys(spec.layer_type for spec in specs))
            raise UnsupportedLayerError(
                f"HybridMambaAttentionDynamicCache is for models with attention and states, but this one has {layers}: "
                "use DynamicCache, which takes every kind"
            )
        return _build("dynamic", config, options)


class EncoderDecoderCache:
    """Two caches of ours as one: of the decoder's own tokens, and of the encoder's.

    A cache that was built for an encoder-decoder model is a pair already: here it stands for the one of the decoder's
    tokens, or, as the second, for an equal one of the encoder's.
    """

    def __new__(
        cls, self_attention_cache: Cache | EncoderDecoder, cross_attention_cache: Cache | EncoderDecoder
    ) -> Any:
        for cache in (self_attention_cache, cross_attention_cache):
            if not isinstance(cache, (Cache, EncoderDecoder)):
                raise UnsupportedLayerError(
                    f"the parts of an EncoderDecoderCache of ours are caches of ours, not a {type(cache).__name__}: "
                    "pass transformers' own EncoderDecoderCache as it is"
                )
        return EncoderDecoder(self_attention_cache.parts[0], _of_encoder(cross_attention_cache))

    from_legacy_cache = staticmethod(from_legacy_cache)


def _of_encoder(cache: Cache | EncoderDecoder) -> Cache:
    """The part of a pair that keeps the encoder's tokens. One that is empty attends to all of them, as they need."""
    if cache.total_tokens > 0:
        return cache.parts[-1]
    self_cache = cache.parts[0]
    if self_cache.specs:
        self_cache.stack.bind_layers([CROSS] * len(self_cache.specs))
        self_cache.implicit.require_all()
    return self_cache


def _build(name: str, config: PreTrainedConfig | None, options: dict[str, Any]) -> Any:
    if config is None:
        return recipe(name).make(None, recipe(name).options.from_dict(_spelled(options)))
    return build(name, config, **_spelled(options))


def _spelled(options: dict[str, Any]) -> dict[str, Any]:
    """Options as our configurations spell them."""
    options = {name: value for name, value in options.items() if value is not None}
    if "batch_size" in options:
        rows = options.pop("batch_size")
        if options.setdefault("max_batch_size", rows) != rows:
            raise ConfigError(f"batch_size={rows} and max_batch_size={options['max_batch_size']}: say one of them")
    if "device" in options:
        options["device"] = _device(options["device"])
    if "layer_device_map" in options:
        options["layer_device_map"] = {layer: _device(device) for layer, device in options["layer_device_map"].items()}
    return options


def _device(device: object) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(device)
