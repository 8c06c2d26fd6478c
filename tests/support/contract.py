"""What every cache owes, without a model: kinds of layers, what a model does in a layer, and what must then be held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import LlamaConfig

import caches
from caches.attention.kv_view import rows_of
from caches.attention.segments import OpenRows
from caches.layers import rope
from caches.layers.layer_spec import INDEX, KV, STATE, AttentionSpan, LayerSpec
from configs import ConfigError, EncoderDecoderCacheConfig

WINDOW, KERNEL, CROSS = 6, 4, 5
SIZE = 256  # tokens that a backend with a size is built for
REFUSALS = (caches.UnsupportedLayerError, ConfigError)

FULL = LayerSpec("full_attention", frozenset({KV}))
UNROTATED = replace(FULL, rotation=lambda: rope.UNROTATED)  # its keys know nothing of their position
SLIDING = LayerSpec("sliding_attention", frozenset({KV}), AttentionSpan("window", WINDOW))
CHUNKED = LayerSpec("chunked_attention", frozenset({KV}), AttentionSpan("chunk", WINDOW + 3))
INDEXED = LayerSpec("indexed_attention", frozenset({KV, INDEX}))
CONV = LayerSpec("conv", frozenset({STATE}))
LINEAR = LayerSpec("linear_attention", frozenset({STATE}))
HYBRID = LayerSpec("hybrid", frozenset({KV, STATE}))
HYBRID_SLIDING = LayerSpec("hybrid_sliding", frozenset({KV, STATE}), AttentionSpan("window", WINDOW))
READS_OTHERS = LayerSpec("full_attention", frozenset())


@dataclass(frozen=True)
class Kind:
    """The layers of a model. cross: it has an encoder. window: one that the cache is asked to impose; sinks: how many
    first tokens it is asked to show where that reaches further."""

    specs: tuple[LayerSpec, ...]
    cross: bool = False
    window: int | None = None
    sinks: int | None = None

    def bound(self, spec: LayerSpec) -> int | None:
        """Columns that survive a step; None for all."""
        return min((size - 1 for size in (spec.attention_span.size, self.window) if size is not None), default=None)

    def sinks_of(self, spec: LayerSpec) -> int:
        """First tokens that stay in the layer."""
        narrow = (
            spec.attention_span.size is not None and self.window is not None and spec.attention_span.size <= self.window
        )
        return 0 if narrow or not spec.keeps_kv else self.sinks or 0

    @property
    def bounds(self) -> list[int | None]:
        """Of the layers that keep columns."""
        return [self.bound(spec) for spec in self.specs if spec.keeps_kv]

    @property
    def has_states(self) -> bool:
        return any(spec.keeps_state for spec in self.specs)

    @property
    def takes_back_in_part(self) -> bool:
        """Whether a step can be taken back in part."""
        return all(spec == CONV for spec in self.specs if spec.keeps_state)


KINDS = {
    "full": Kind((FULL,) * 4),
    "sliding": Kind((SLIDING,) * 4),
    "chunked": Kind((CHUNKED,) * 4),
    "full + sliding": Kind((SLIDING, FULL, CHUNKED, FULL)),
    "indexed": Kind((FULL, INDEXED, FULL, INDEXED)),
    "states": Kind((LINEAR,) * 4),
    "convolutions": Kind((CONV,) * 4),
    "attention, states": Kind((LINEAR, FULL, LINEAR, SLIDING)),
    "convolutions, windows": Kind((CONV, SLIDING, CONV, SLIDING)),
    "attention with states": Kind((HYBRID,) * 4),
    "windows with states": Kind((HYBRID_SLIDING, HYBRID, HYBRID_SLIDING, HYBRID_SLIDING)),
    "shared": Kind((SLIDING, FULL, READS_OTHERS, READS_OTHERS)),
    "imposed window": Kind((FULL,) * 4, window=WINDOW),
    "imposed on a window": Kind((FULL, SLIDING, FULL, SLIDING), window=WINDOW - 2),
    "sinks": Kind((UNROTATED,) * 4, window=WINDOW + 2, sinks=3),
    "sinks, windows": Kind((UNROTATED, SLIDING, UNROTATED, HYBRID_SLIDING), window=WINDOW + 12, sinks=2),
}
KINDS |= {
    f"encoder, {name}": replace(KINDS[name], cross=True)
    for name in ("full", "sliding", "full + sliding", "states", "attention, states")
}


def options_of(backend: str, kind: Kind) -> dict[str, int]:
    """Those that the backend needs, and those that the kind asks for."""
    recipe = caches.recipe(backend)
    size = {"max_cache_len": SIZE} if recipe.has_a_size else {}
    if "residual_length" in recipe.options.option_names():
        size["residual_length"] = 3  # so that few tokens are enough to encode some
    if "rotate" in recipe.options.option_names():
        size["rotate"] = False  # values are compared exactly; what rotation does: test_rotation.py
    asked = {"window_length": kind.window, "num_sink_tokens": kind.sinks}
    return size | {name: value for name, value in asked.items() if value is not None}


def build(backend: str, kind: Kind, **options) -> caches.EngineCache:
    """An empty cache, or the backend's refusal."""
    recipe = caches.recipe(backend)
    chosen = recipe.options.from_dict(options_of(backend, kind) | options)
    is_encoder_decoder = recipe.options is EncoderDecoderCacheConfig
    if is_encoder_decoder and not kind.cross:
        return caches.build(backend, LlamaConfig())  # layers do not tell: the model's configuration does
    if kind.cross and not is_encoder_decoder:
        recipe, chosen = caches.recipe("encoder_decoder"), EncoderDecoderCacheConfig(self_cache=chosen)
    return recipe.make(kind.specs, chosen)


def is_taken(backend: str, kind: Kind) -> bool:
    try:
        return build(backend, kind).handle is not None
    except REFUSALS:
        return False


CELLS = [(backend, kind) for backend in caches.names() for kind in KINDS if is_taken(backend, KINDS[kind])]
each_cell = pytest.mark.parametrize(("backend", "kind"), CELLS)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_backend = pytest.mark.parametrize("backend", caches.names())

# Sizes of steps.
STEPS = [7, 1, 1, 1, 5, 1, 30, 1, 1, *[1] * 16, 3, 2]  # past windows, past the room of their buffers, ragged
EDGES = [4, 1, 1, 1, 5, 14, 1]  # to before, onto and past the edges of windows


# What is stored for a token: numbers that say which layer and which token, exact in float64.

Tokens = Sequence[Sequence[int]]  # of every row
_PRIME = 1_000_003
_OF_KEYS = torch.tensor([[[0.0, 1.0]], [[2.0, 3.0]]], dtype=torch.float64)
_OF_INDEX = torch.tensor([4.0, 5.0], dtype=torch.float64)
_OF_CONV = torch.tensor([[6.0], [7.0]], dtype=torch.float64)


def numbers(tokens: Tokens, layer: int) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.float64).reshape(len(tokens), -1) * 100 + layer * 10


def keys_of(tokens: Tokens, layer: int) -> torch.Tensor:
    """[rows, 2 heads, tokens, 2]; values are the negative of it."""
    return numbers(tokens, layer)[:, None, :, None] + _OF_KEYS


def index_of(tokens: Tokens, layer: int) -> torch.Tensor:
    """[rows, tokens, 2]"""
    return numbers(tokens, layer)[:, :, None] + _OF_INDEX


def conv_of(tokens: Tokens, layer: int, number: int) -> torch.Tensor:
    """[rows, 2 channels, tokens]"""
    return numbers(tokens, layer)[:, None, :] + _OF_CONV + number / 4


def states_of(spec: LayerSpec) -> tuple[int, bool]:
    """How many convolutions a layer has, and whether a recurrent state."""
    return (1, False) if spec == CONV else (2, True) if spec.keeps_state else (0, False)


def after(held: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The recurrent state [rows, 1] after more tokens [rows, tokens]: every one of them counts, and their order."""
    for column in tokens.unbind(-1):
        held = (held * 31 + column[:, None]) % _PRIME
    return held


def recurrent_of(tokens: Tokens, layer: int) -> torch.Tensor:
    """The recurrent state [rows, 1] after all these tokens."""
    states = []
    for row in tokens:
        state = 0
        for token in row:
            state = (state * 31 + token * 100 + layer * 10) % _PRIME
        states.append([state])
    return torch.tensor(states, dtype=torch.float64)


def are_segments_of(
    open_rows: Sequence[OpenRows], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> bool:
    """Whether these are the rows and segments of what attention reads of one or several caches, in the same memory."""
    place = lambda one: (one.data_ptr(), one.shape, one.stride())  # noqa: E731
    for number, read in enumerate((keys, values)):
        found = [(part.shape[0], *map(place, part.sources)) for part in map(rows_of, read)]
        seen = [[segment[number][:, :, segment[2] : segment[3]] for segment in rows.segments] for rows in open_rows]
        if found != [(rows.rows, *map(place, parts)) for rows, parts in zip(open_rows, seen, strict=True)]:
            return False
    return True


def forward_layer(own: caches.Cache, spec: LayerSpec, layer: int, tokens: Tokens) -> dict[str, torch.Tensor]:
    """What a model does in one layer; returns what it was handed, by the names of `Layer.content`.

    With one token it writes states in place, as transformers' models do.
    """
    handed = {}
    if INDEX in spec.components:
        handed["index"] = own.update_indexer(index_of(tokens, layer), layer)[:, None]
    if KV in spec.components:
        slots = own.open_slots([layer])
        handed["keys"], handed["values"] = own.update(keys_of(tokens, layer), -keys_of(tokens, layer), layer)
        if slots is not None:
            [[rows]] = slots
            assert are_segments_of([rows], [handed["keys"]], [handed["values"]])
            written, _, _, end = rows.segments[-1]
            assert torch.equal(written[:, :, end - 1 : end], keys_of(tokens, layer))
    convolutions, recurrent = states_of(spec)
    for number in range(convolutions):
        new, held = conv_of(tokens, layer, number), own.get_conv_state(layer, number)
        if held is None or new.shape[-1] > 1:
            read = own.update_conv_state(new, layer, number, conv_kernel_size=KERNEL)
        else:
            read = torch.cat([held, new], dim=-1)
            held.copy_(read[..., -KERNEL:])
        handed[f"conv {number}"] = read.clone()
    if recurrent:
        held, new = own.get_recurrent_state(layer), numbers(tokens, layer)
        state = after(new.new_zeros(len(tokens), 1) if held is None else held.clone(), new)
        if held is None or new.shape[-1] > 1:
            own.update_recurrent_state(state, layer)
        else:
            held.copy_(state)
    return handed


def columns_of(tokens: Tokens, layer: int, name: str) -> torch.Tensor:
    """What the store of that name holds for these tokens, [rows, heads, tokens, width]."""
    if name == "index":
        return index_of(tokens, layer)[:, None]
    return keys_of(tokens, layer) if name == "keys" else -keys_of(tokens, layer)


def last_read(tokens: Tokens, layer: int, number: int, width: int) -> torch.Tensor:
    """The last columns that a convolution was given, with zeros before the first."""
    read = conv_of([row[-width:] for row in tokens], layer, number)
    return torch.nn.functional.pad(read, (width - read.shape[-1], 0))
