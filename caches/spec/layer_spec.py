"""What each layer of a model has to keep, read from the model's configuration. The only reader of `layer_types`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers.cache_utils import DynamicCache

from caches.spec.rope import RopeRotation, read_rope

KV, INDEX, STATE, UNKNOWN = "kv", "index", "state", "something unknown"
MODEL_SPECIFIC = "something that only transformers' own layer knows"


@dataclass(frozen=True)
class AttentionSpan:
    """How far back a token looks: everywhere ("all"), `size` tokens ("window"), to the start of its chunk ("chunk"), or
    in a way that only the model and its layer know ("own")."""

    kind: str = "all"
    size: int | None = None

    @property
    def columns(self) -> int | None:
        """Columns before a token that it may still need; None for all of them.

        The same for a window and for a chunk: where chunks begin differs from row to row with left padding.
        """
        return None if self.size is None else self.size - 1


@dataclass(frozen=True)
class LayerSpec:
    """One layer as data. `components` is what it keeps: "kv", "index", "state", several of them, or nothing.

    A layer type that is not in the table below keeps "something unknown": a backend has to refuse it.
    """

    layer_type: str
    components: frozenset[str]
    attention_span: AttentionSpan = AttentionSpan()
    new_layer: Callable[[], Any] | None = field(default=None, compare=False)
    """Makes transformers' own layer, for an exotic kind."""
    rotation: Callable[[], RopeRotation] | None = field(default=None, compare=False)
    """How its keys turn with their position: read where it is needed. None where that cannot be known."""

    @property
    def keeps_kv(self) -> bool:
        return bool(self.components & {KV, MODEL_SPECIFIC})

    @property
    def keeps_state(self) -> bool:
        return STATE in self.components


PLAIN = LayerSpec("full_attention", frozenset({KV}))
CROSS = LayerSpec("cross_attention", frozenset({KV}))
"""What a decoder layer keeps of the encoder: as many columns as that has read, written once."""

# transformers' layer types: the streams they keep, and the configuration field that limits their reach.
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


_INDEX_WITH_POSITIONS = {"qwen4_exp_text"}  # they keep the positions of all tokens beside the index


def read_specs(config: Any) -> tuple[LayerSpec, ...]:
    """One `LayerSpec` per layer of the decoder that `config` (a `PreTrainedConfig`) describes."""
    config = _decoder(config)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        layers = getattr(config, "num_decoder_layers", None) or config.num_hidden_layers  # T5's are the encoder's
        layer_types = [_implied_layer_type(config)] * layers
    reads_others = _layers_without_own_kv(config, len(layer_types))
    return tuple(
        LayerSpec(layer_type, frozenset()) if shared else _read_spec(config, index, layer_type)
        for index, (layer_type, shared) in enumerate(zip(layer_types, reads_others, strict=True))
    )


def mask_kinds(config: Any) -> str | dict[str, str]:
    """Which masks the model takes: one, of this kind of reach, or a dict of kinds by its layer types.

    The kind of a layer that only keeps a state is "none".
    """
    specs = read_specs(config)
    kinds = {spec.layer_type: "none" for spec in specs if spec.keeps_state}
    # Last those that say it: a layer that reads another's keys has no reach of its own.
    last = sorted(specs, key=lambda spec: spec.keeps_kv)
    kinds |= {spec.layer_type: spec.attention_span.kind for spec in last if spec.keeps_kv or not spec.keeps_state}
    if getattr(_decoder(config), "layer_types", None) is None:
        return next(iter(kinds.values()))
    return kinds


def _decoder(config: Any) -> Any:
    """The configuration of the decoder, which may be in one of a text model that has an encoder too."""
    return config.get_text_config(decoder=True).get_text_config(decoder=True)


def _implied_layer_type(config: Any) -> str:
    if getattr(config, "sliding_window", None) is not None:
        return "sliding_attention"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "chunked_attention"
    return "full_attention"


def _layers_without_own_kv(config: Any, layers: int) -> list[bool]:
    """Which layers read the keys and values of an earlier layer (gemma3n, gemma4)."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return [mode == "reuse" for mode in modes]
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    return [layer >= layers - shared for layer in range(layers)]


def _read_spec(config: Any, index: int, layer_type: str) -> LayerSpec:
    streams, size_field = _LAYER_TYPES.get(layer_type, ((UNKNOWN,), None))
    if INDEX in streams and config.model_type in _INDEX_WITH_POSITIONS:
        streams = (MODEL_SPECIFIC,)
    if MODEL_SPECIFIC in streams:
        return LayerSpec(layer_type, frozenset(streams), AttentionSpan("own"), partial(_own_layer, config, index))
    reach = AttentionSpan()
    if size_field is not None:
        reach = AttentionSpan(
            "chunk" if size_field == "attention_chunk_size" else "window", getattr(config, size_field)
        )
    return LayerSpec(layer_type, frozenset(streams), reach, rotation=partial(read_rope, config, index, layer_type))


def _own_layer(config: Any, index: int) -> Any:
    """transformers' own layer of that kind."""
    return DynamicCache(config=config).layers[index]
