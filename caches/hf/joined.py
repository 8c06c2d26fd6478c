"""Several caches that a model takes for the cache of one batch: a step of one token per row for all of them.

Each cache keeps its rows, its length and its kind. To the model the rows are aligned right: what a shorter cache lacks
is padding on the left. Attention that goes through transformers' function "sdpa" reads the caches as they are; models
that compute it otherwise get padded copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache as TransformersCache

from caches.attention.kernels import most_slots
from caches.attention.kv_view import KeyValueView, rows_of
from caches.attention.segments import OpenRows
from caches.errors import StepError
from caches.hf.cache import Cache
from caches.layers.layer_spec import INDEX, MODEL_SPECIFIC, LayerSpec
from caches.platform.undo import on_failure
from caches.protocol import AttentionView
from caches.stores.recurrent_state import CONV, RECURRENT


class JoinedCaches(TransformersCache, AttentionView):
    """parts: caches of one model, each with one token at least. For one step: `begin`, the forward, `write_states`.

    The steps of the parts stay open: each is committed or aborted by itself.
    """

    name, max_rows, max_tokens, log = "joined", None, None, None
    why_not_compiled = "its rows are those of several caches"
    is_compileable = unfinished = False

    def __init__(self, caches: Sequence[Cache]):
        self.parts = caches
        # Copies that the model may change in place, by kind, layer and number, and the states that they are of.
        self._states: dict[tuple[str, int, int], tuple[list[torch.Tensor], torch.Tensor]] = {}
        self.sizes = [cache.batch_size for cache in caches]
        self.layers = caches[0].layers

    @property
    def handle(self) -> TransformersCache:
        return self

    @property
    def view(self) -> AttentionView:
        return self

    @property
    def specs(self) -> Sequence[LayerSpec]:
        return self.parts[0].specs

    @property
    def batch_size(self) -> int:
        return sum(self.sizes)

    @property
    def total_tokens(self) -> int:
        """Of the longest cache."""
        return max(cache.total_tokens for cache in self.parts)

    def begin(self, tokens: int, graph: bool = False) -> None:
        """Open a step of every part. When one cannot, no step is open."""
        with on_failure(self.abort):
            for cache in self.parts:
                cache.begin(tokens, graph)

    def commit(self, rejected: int = 0) -> None:
        raise StepError("the parts of joined caches are committed one by one")

    def abort(self) -> None:
        for cache in self.parts:
            cache.abort()

    def write_states(self) -> None:
        """After the forward: the parts take over what the model has put into their states in place."""
        for states, joined in self._states.values():
            for state, rows in zip(states, joined.split(self.sizes), strict=True):
                state.copy_(rows)

    # What models call.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = zip(self.parts, key_states.split(self.sizes), value_states.split(self.sizes), strict=True)
        pairs = [cache.update(keys, values, layer_idx) for cache, keys, values in inputs]
        keys, values = ([rows_of(tensor) for tensor in tensors] for tensors in zip(*pairs, strict=True))
        is_visible = self.are_visible(layer_idx, most_slots(keys))
        return (
            KeyValueView(keys, key_states, is_visible=is_visible),
            KeyValueView(values, value_states, is_visible=is_visible),
        )

    def open_slots(self, layers: Sequence[int]) -> list[Sequence[OpenRows]] | None:
        """See `Cache.open_slots`."""
        by_cache = list[list[Sequence[OpenRows]]]()
        for cache in self.parts:
            rows = cache.open_slots(layers)
            if rows is None:
                return None
            by_cache.append(rows)
        return [[rows for [rows] in of_layer] for of_layer in zip(*by_cache, strict=True)]

    def are_visible(self, layer_idx: int, slots: int) -> bool:
        """Whether a new token attends to all of at most so many slots."""
        span = self.specs[layer_idx].attention_span
        return span.kind == "all" or (span.kind == "window" and slots <= (span.size or slots))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        self._states.pop((CONV, layer_idx, state_idx), None)
        inputs = zip(self.parts, conv_states.split(self.sizes), strict=True)
        return torch.cat(
            [cache.update_conv_state(rows, layer_idx, state_idx, conv_kernel_size) for cache, rows in inputs]
        )

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        self._states.pop((RECURRENT, layer_idx, state_idx), None)
        for cache, rows in zip(self.parts, recurrent_states.split(self.sizes), strict=True):
            cache.update_recurrent_state(rows, layer_idx, state_idx, **kwargs)
        return recurrent_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        states = [cache.get_conv_state(layer_idx, state_idx) for cache in self.parts]
        return self._joined_state((CONV, layer_idx, state_idx), states)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        states = [cache.get_recurrent_state(layer_idx, state_idx) for cache in self.parts]
        return self._joined_state((RECURRENT, layer_idx, state_idx), states)

    def _joined_state(self, key: tuple[str, int, int], states: list[torch.Tensor | None]) -> torch.Tensor | None:
        if key in self._states:
            return self._states[key][1]
        filled = [state for state in states if state is not None]
        if len(filled) < len(states):
            return None
        joined = torch.cat(filled)
        self._states[key] = filled, joined
        return joined

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return all(cache.has_previous_state(layer_idx, state_idx) for cache in self.parts)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.total_tokens

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.total_tokens

    def slots_of_rows(self, layer_idx: int) -> list[int]:
        """How many slots attention over one new token reads for each row: the last ones."""
        slots = [cache.get_mask_sizes(1, layer_idx)[0] for cache in self.parts]
        return [count for count, rows in zip(slots, self.sizes, strict=True) for _ in range(rows)]

    @property
    def slots_differ(self) -> bool:
        """Whether some rows have fewer slots than others in a layer."""
        return any(len(set(self.slots_of_rows(layer))) > 1 for layer, spec in enumerate(self.specs) if spec.keeps_kv)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        slots = max(cache.get_mask_sizes(query_length, layer_idx)[0] for cache in self.parts)
        return slots, self.total_tokens + query_length - slots


def why_not_joined(cache: object) -> str | None:
    """Why the cache cannot be a part of `JoinedCaches`; None where it can."""
    if not isinstance(cache, Cache):
        return f"a {getattr(cache, 'name', type(cache).__name__)} cache has its rows for itself"
    if any(MODEL_SPECIFIC in spec.components for spec in cache.specs):
        return "it has layers of one model family, whose content only transformers' own layer knows"
    if any(INDEX in spec.components for spec in cache.specs):
        return "its layers choose by an index what they attend to"
    return None
