"""A cache that captures the first layer's keys and values, and then ends the forward."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache


class Reached(Exception):
    """Ends the forward: the first layer's keys and values are captured, or the model uses the cache in another way."""


class FirstLayer(DynamicCache):
    """Captures the keys and values of layer 0.

    total_tokens: the length that the cache reports to the model. ends: whether the forward ends at layer 0.
    found: keys and values [rows, kv_heads, columns, head_dim]; None before.
    """

    def __init__(self, total_tokens: int, ends: bool = True):
        super().__init__()
        self.found: tuple[torch.Tensor, torch.Tensor] | None = None
        self._total_tokens, self._ends = total_tokens, ends

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
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
        return self._total_tokens

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._total_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, self._total_tokens

    def _ends_at_a_state(self, *args: object, **kwargs: object) -> object:
        raise Reached

    get_conv_state = get_recurrent_state = has_previous_state = _ends_at_a_state
    update_conv_state = update_recurrent_state = _ends_at_a_state


class Probe:
    """The cache for a probing forward, `handle`.

    total_tokens: the length that it reports. pair: for an encoder-decoder model. cross: capture the cross attention's
    keys and values instead.
    """

    def __init__(self, total_tokens: int, pair: bool, cross: bool):
        self._found = self_attention = FirstLayer(total_tokens, ends=not cross)
        self.handle: DynamicCache | EncoderDecoderCache = self_attention
        if pair:
            cross_attention = FirstLayer(0)
            self.handle = EncoderDecoderCache(self_attention, cross_attention)
            self._found = cross_attention if cross else self_attention

    @property
    def found(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values [rows, kv_heads, columns, head_dim]; None if the first layer did not write any."""
        return self._found.found
