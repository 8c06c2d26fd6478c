"""What each layer of a model keeps in a cache, read from the model's configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from caches.errors import UnsupportedLayerError
from caches.layers.quirks import quirks_of
from caches.layers.rope import RopeRotation, read_rope

KV, INDEX, STATE, UNKNOWN = "kv", "index", "state", "something unknown"
MODEL_SPECIFIC = "something that only transformers' own layer knows"  # the text is part of error messages


@dataclass(frozen=True)
class AttentionSpan:
    """Which tokens a token attends to.

    kind: "all": every token before it; "window": the last `size` tokens, itself included; "chunk": its own chunk of
    `size` tokens; "own": defined by the model's code. size: in tokens; None for "all" and "own".
    """

    kind: str = "all"
    size: int | None = None

    @property
    def past_tokens(self) -> int | None:
        """How many tokens before a token it may attend to; None for all of them.

        A chunk counts like a window of its size: with left padding, chunks begin at different slots in each row.
        """
        return None if self.size is None else self.size - 1


@dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps in a cache.

    components: any of KV, INDEX (keys of a sparse-attention indexer), STATE (conv and recurrent states),
    MODEL_SPECIFIC, or none. UNKNOWN stands for a layer type that is not in `_LAYER_TYPES`: backends refuse it.
    """

    layer_type: str
    components: frozenset[str]
    attention_span: AttentionSpan = AttentionSpan()
    new_layer: Callable[[], Any] | None = field(default=None, compare=False)
    """Makes transformers' own cache layer; only for MODEL_SPECIFIC layers."""
    rotation: Callable[[], RopeRotation] | None = field(default=None, compare=False)
    """Reads how the layer's keys are rotated by their position (RoPE), when it is needed; None for MODEL_SPECIFIC."""

    @property
    def keeps_kv(self) -> bool:
        return bool(self.components & {KV, MODEL_SPECIFIC})

    @property
    def keeps_state(self) -> bool:
        return STATE in self.components


PLAIN = LayerSpec("full_attention", frozenset({KV}))
CROSS = LayerSpec("cross_attention", frozenset({KV}))
"""Cross attention of a decoder layer: keys and values of all encoder tokens, written once."""

# Per layer type of transformers: its components, and the configuration field with its window or chunk size.
_LAYER_TYPES: dict[str, tuple[tuple[str, ...], str | None]] = {
    "full_attention": ((KV,), None),
    "sliding_attention": ((KV,), "sliding_window"),
    "chunked_attention": ((KV,), "attention_chunk_size"),
    "indexed_attention": ((KV, INDEX), None),
    "deepseek_sparse_attention": ((KV, INDEX), None),  # its name in transformers 5.17
    "conv": ((STATE,), None),
    "linear_attention": ((STATE,), None),
    "hybrid": ((KV, STATE), None),
    "hybrid_sliding": ((KV, STATE), "sliding_window"),
    "minimax_m3_sparse": ((MODEL_SPECIFIC,), None),
    "compressed_sparse_attention": ((MODEL_SPECIFIC,), None),
    "heavily_compressed_attention": ((MODEL_SPECIFIC,), None),
    "moe": ((), None),
    "mlp": ((), None),
}


def read_specs(config: PreTrainedConfig) -> tuple[LayerSpec, ...]:
    """One `LayerSpec` per decoder layer. config: the model's `PreTrainedConfig`."""
    config = _decoder(config)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        layers = getattr(config, "num_decoder_layers", None) or getattr(config, "num_hidden_layers", None)
        if layers is None:  # num_hidden_layers of T5 are the encoder's
            raise UnsupportedLayerError(
                f"{type(config).__name__} does not say how many layers there are, so what a cache keeps of each is not "
                "known: use cache='none'"
            )
        layer_types = [_implied_layer_type(config)] * layers
    shares_kv = _layers_without_own_kv(config, len(layer_types))
    return tuple(
        LayerSpec(layer_type, frozenset()) if shared else _read_spec(config, index, layer_type)
        for index, (layer_type, shared) in enumerate(zip(layer_types, shares_kv, strict=True))
    )


def mask_kinds(config: PreTrainedConfig) -> str | dict[str, str]:
    """The kinds of attention masks the model takes: one `AttentionSpan.kind`, or a dict of them by layer type.

    The kind of a layer that keeps only a state is "none".
    """
    specs = read_specs(config)
    by_type = {spec.layer_type: "none" for spec in specs if spec.keeps_state}
    # Layers with keys of their own come last and win: a layer that shares another's keys has no span in its spec.
    ordered = sorted(specs, key=lambda spec: spec.keeps_kv)
    by_type |= {spec.layer_type: spec.attention_span.kind for spec in ordered if spec.keeps_kv or not spec.keeps_state}
    if getattr(_decoder(config), "layer_types", None) is None:
        return next(iter(by_type.values()))
    return by_type


def _decoder(config: PreTrainedConfig) -> Any:
    """The decoder's part of a configuration; it may be nested in the text part of a multimodal one."""
    return config.get_text_config(decoder=True).get_text_config(decoder=True)


def _implied_layer_type(config: PreTrainedConfig) -> str:
    if getattr(config, "sliding_window", None) is not None:
        return "sliding_attention"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "chunked_attention"
    return "full_attention"


def _layers_without_own_kv(config: PreTrainedConfig, layers: int) -> list[bool]:
    """Which layers read the keys and values of an earlier layer (gemma3n, gemma4)."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return [mode == "reuse" for mode in modes]
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    return [layer >= layers - shared for layer in range(layers)]


def _read_spec(config: PreTrainedConfig, index: int, layer_type: str) -> LayerSpec:
    components, size_field = _LAYER_TYPES.get(layer_type, ((UNKNOWN,), None))
    if INDEX in components and quirks_of(config).index_has_positions:
        components = (MODEL_SPECIFIC,)
    present = frozenset(components)
    if MODEL_SPECIFIC in present:
        return LayerSpec(layer_type, present, AttentionSpan("own"), partial(_transformers_layer, config, index))
    span = AttentionSpan()
    if size_field is not None:
        span = AttentionSpan("chunk" if size_field == "attention_chunk_size" else "window", getattr(config, size_field))
    return LayerSpec(layer_type, present, span, rotation=partial(read_rope, config, index, layer_type))


def _transformers_layer(config: PreTrainedConfig, index: int) -> object:
    """The cache layer that transformers itself makes for layer `index`."""
    return DynamicCache(config=config).layers[index]
