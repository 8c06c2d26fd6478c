"""A cache that ends the forward it is given to: with what the model's first layer hands over to be kept."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache


class Reached(Exception):
    """The first layer has handed over its keys and values, or something else came before them."""


class FirstLayer(DynamicCache):
    """Says that it has seen `total_tokens` tokens. found: keys and values of the first layer; None before.

    ends: whether the forward ends there.
    """

    def __init__(self, seen: int, ends: bool = True):
        super().__init__()
        self.found: tuple[torch.Tensor, torch.Tensor] | None = None
        self._seen, self._ends = seen, ends

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx != 0:
            raise Reached
        self.found = key_states, value_states
        if self._ends:
            raise Reached
        return self.found

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        return indexer_key_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._seen

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, self._seen

    def _ends_in_a_state(self, *args: Any, **kwargs: Any) -> Any:
        raise Reached

    get_conv_state = get_recurrent_state = has_previous_state = _ends_in_a_state
    update_conv_state = update_recurrent_state = _ends_in_a_state


class Probe:
    """What a forward is given as its cache. pair: for an encoder-decoder model. cross: wait for the encoder's keys."""

    def __init__(self, seen: int, pair: bool = False, cross: bool = False):
        self._found = own = FirstLayer(seen, ends=not cross)
        self.handle: DynamicCache | EncoderDecoderCache = own
        if pair:
            other = FirstLayer(0)
            self.handle = EncoderDecoderCache(own, other)
            self._found = other if cross else own

    @property
    def found(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values [rows, kv_heads, columns, head_dim]; None where the first layer has handed over none."""
        return self._found.found
