"""The attention mask and the position ids of a run: made once for all its columns, each step reads a view."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from caches import mask_kinds


class Columns:
    """What is known of every column from the start: whether it is a pad, and its position.

    mask: [rows, prompt columns], 0 where a pad is. total: columns when the run ends.
    positions: [..., prompt columns] given by the caller; None counts the tokens that are not pads, from 0.
    """

    def __init__(self, mask: torch.Tensor, total: int, positions: torch.Tensor | None = None):
        rows, prompt = mask.shape
        self.total, self.device = total, mask.device
        full = torch.cat([mask, mask.new_ones(rows, total - prompt)], dim=1)
        # Without pads there is nothing to mask but the future, and attention kernels do that faster by themselves. But
        # positions with gaps and no mask would be taken for several texts packed into one row.
        self._mask = full if positions is not None or not bool(mask.all()) else None
        if positions is None:
            positions = (full.cumsum(dim=1) - 1).clamp(min=0)
        else:
            steps = torch.arange(1, total - prompt + 1, device=positions.device, dtype=positions.dtype)
            positions = torch.cat([positions, positions[..., -1:] + steps], dim=-1)
        self._positions = positions

    def mask(self, columns: int) -> torch.Tensor | None:
        """2D mask [rows, columns] of the first columns; None when there are no pads."""
        return None if self._mask is None else self._mask[:, :columns]

    def positions(self, begin: int, end: int) -> torch.Tensor:
        """Position ids [..., end - begin]."""
        return self._positions[..., begin:end]

    def rows(self, index: torch.Tensor) -> None:
        if self._mask is not None:
            self._mask = self._mask[index]
        rows_axis = self._positions.ndim - 2  # [rows, columns], or [kinds, rows, columns] for multimodal positions
        self._positions = self._positions.index_select(rows_axis, index)


_MASK_OF_REACH = {
    "all": create_causal_mask,
    "window": create_sliding_window_causal_mask,
    "chunk": create_chunked_causal_mask,
}


def graph_mask(model: Any, cache: TransformersCache, mask: torch.Tensor | None, positions: torch.Tensor) -> Any:
    """What a compiled step gets instead of a 2D mask: 4D masks of fixed shape, one or a dict per layer type.

    Made outside the graph with the sizes the cache announces for the open step.
    """
    arguments = {
        # Only the shape, type and device of the embeddings matter.
        "inputs_embeds": torch.empty((*positions.shape[-2:], 0), dtype=model.dtype, device=positions.device),
        "attention_mask": mask,
        "past_key_values": cache,
        "position_ids": positions,
    }
    if hasattr(model, "create_masks_for_generate"):
        made = model.create_masks_for_generate(config=model.config, **arguments)
        return {kind: contiguous(one) for kind, one in made.items()} if isinstance(made, dict) else contiguous(made)
    # Not transformers' function of that name: in 5.17 it fails on chunked attention.
    config, kinds = model.config.get_text_config(decoder=True), mask_kinds(model.config)
    if isinstance(kinds, str):
        return contiguous(_MASK_OF_REACH[kinds](config, **arguments))
    return {name: contiguous(_MASK_OF_REACH[kind](config, **arguments)) for name, kind in kinds.items()}


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with strides of its own, not those of the tensor it is a view of: graphs are compiled for strides."""
    return tensor.clone(memory_format=torch.contiguous_format)
