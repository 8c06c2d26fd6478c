"""The attention mask and the position ids of a run: written once, each step reads a view."""

from __future__ import annotations

import copy
from typing import Any, TypeAlias

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from caches import EngineCache, UnsupportedLayerError
from caches.protocol import AttentionView, attention_view
from engine.model.growing_columns import room_for, widened

MaskKinds: TypeAlias = str | dict[str, str]


class Columns:
    """What is known of every column from the start: whether it is a pad, and its position.

    mask: [rows, prompt columns], 0 where a pad is. total: columns when the run ends.
    positions: [..., prompt columns] given by the caller; None counts the tokens that are not pads, from 0.
    """

    def __init__(self, mask: torch.Tensor, total: int, positions: torch.Tensor | None = None):
        rows, self.prompt = mask.shape
        self.total, self.device = total, mask.device
        # Without pads there is nothing to mask but the future, and attention kernels do that faster by themselves. But
        # positions with gaps and no mask would be taken for several texts packed into one row.
        self._mask = mask if positions is not None or not bool(mask.all()) else None
        self.pads = torch.zeros(rows, dtype=torch.long) if self._mask is None else (mask == 0).int().argmin(dim=1)
        """How many pads each row begins with, [rows]."""
        self.first_full = int(self.pads.max())
        """The first column in which no row has a pad any more."""
        self._step_masks: dict[torch.dtype, torch.Tensor] = {}  # as attention takes them: [rows, 1, 1, columns]
        self._are_told = positions is not None
        if positions is None:
            self._following = mask.sum(dim=1, keepdim=True)
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        else:
            self._following = positions[..., -1:] + 1  # the position of the first new token, [..., 1]
        self._positions = positions
        self._widen(room_for(self.prompt, total))

    @property
    def room(self) -> int:
        """Columns that there is memory for."""
        return self._positions.shape[-1]

    def reserve(self, columns: int) -> None:
        """Have room for `columns`, as whatever asks for more makes too. When this raises, nothing has changed."""
        if columns > self.room:
            self._widen(room_for(columns, self.total, self.room))

    def _widen(self, room: int) -> None:
        first, like = self.room - self.prompt, self._positions
        steps = torch.arange(first, room - self.prompt, device=like.device, dtype=like.dtype)
        positions = torch.cat([like, self._following + steps], dim=-1)
        self._mask = None if self._mask is None else widened(self._mask, room, 1)
        self._positions, self._step_masks = positions, {}

    def mask(self, columns: int) -> torch.Tensor | None:
        """2D mask [rows, columns] of the first columns; None when there are no pads."""
        self.reserve(columns)
        return None if self._mask is None else self._mask[:, :columns]

    def step_mask(self, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """What one token may look at, of the columns from `begin` to `end`: [rows, 1, 1, end - begin], a view.

        dtype: bool, or the type of scores that it is added to.
        """
        self.reserve(end)
        assert self._mask is not None
        if dtype not in self._step_masks:
            visible = (self._mask != 0)[:, None, None]
            self._step_masks[dtype] = visible if dtype == torch.bool else _additive(visible, dtype)
        return self._step_masks[dtype][..., begin:end]

    def window_mask(
        self, begin: int, end: int, offset: int, length: int, window: int | None, dtype: torch.dtype, copied: int = 0
    ) -> torch.Tensor:
        """What the tokens from `begin` to `end` may look at, of `length` columns from `offset` on.

        window: how many, the token included; None for all. copied: columns before those with as many copies for each
        token; a token that can no longer see all of its row looks at its own, in place of the last ones in the window.
        Returns [rows or 1, 1, end - begin, copied + length].
        """
        self.reserve(end)
        tokens = torch.arange(begin, end, device=self.device)[:, None]
        columns = torch.arange(offset, offset + length, device=self.device)
        visible = columns <= tokens
        if window is not None:
            visible &= columns > tokens - window
        visible = visible[None, None]
        if copied:
            assert window is not None
            sinks = copied // (end - begin)
            behind = (tokens - window >= self.pads.to(self.device)[:, None, None])[:, None]  # [rows, 1, tokens, 1]
            visible = visible & (~behind | (columns > tokens - window + sinks))
            own = torch.arange(begin, end, device=self.device).repeat_interleave(sinks) == tokens
        if self._mask is not None:
            real = torch.zeros(len(self._mask), length, dtype=torch.bool, device=self.device)
            known = self._mask[:, max(offset, 0) : offset + length] != 0
            real[:, max(-offset, 0) : max(-offset, 0) + known.shape[1]] = known
            # A pad sees itself: a row of scores without any column would be NaN.
            visible = (visible & real[:, None, None]) | (columns == tokens)
        if copied:
            visible = torch.cat([behind & own, visible], dim=-1)
        return visible if dtype == torch.bool else _additive(visible, dtype)

    def positions(self, begin: int, end: int) -> torch.Tensor:
        """Position ids [..., end - begin]."""
        self.reserve(end)
        return self._positions[..., begin:end]

    def own_positions(self, columns: int) -> torch.Tensor | None:
        """Position ids [..., rows, columns] of the first columns, where they are not simply a count of the tokens."""
        self.reserve(columns)
        return self._positions[..., :columns] if self._are_told else None

    def of_rows(self, index: torch.Tensor) -> Columns:
        """The same of these rows."""
        other = copy.copy(self)
        other.pads = self.pads[index.to(self.pads.device)]
        other._mask = None if self._mask is None else self._mask[index]
        other._step_masks = {}
        rows_axis = self._positions.ndim - 2  # [rows, columns], or [kinds, rows, columns] for multimodal positions
        other._positions = self._positions.index_select(rows_axis, index)
        other._following = self._following.index_select(rows_axis, index)
        return other


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as it is added to scores of this type."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


_MASK_OF_REACH = {
    "all": create_causal_mask,
    "window": create_sliding_window_causal_mask,
    "chunk": create_chunked_causal_mask,
    "none": lambda config, **arguments: None,  # a new token is never a pad
}


def one_token_mask(model: Any, cache: TransformersCache | None, kinds: MaskKinds, columns: Columns, end: int) -> Any:
    """The mask of an eager step of one token per row, or a dict of them per layer type, made of views.

    transformers would expand the 2D mask anew in every step, and wait for the device to learn whether it has pads. None
    where that is its business: models that read the 2D mask themselves, caches of its own, masks with more than pads.
    """
    dtype = _mask_dtype(model)
    view = attention_view(cache)
    if not view.specs or columns.mask(end) is None or dtype is None:
        return None
    masks: dict[str, torch.Tensor | None] = {}
    for layer, spec in enumerate(view.specs):
        if spec.keeps_state and not spec.keeps_kv:
            masks[spec.layer_type] = None  # a new token is never a pad
        if spec.layer_type in masks or not spec.keeps_kv:
            continue
        length, offset = view.get_mask_sizes(1, layer)
        if spec.attention_span.kind not in ("all", "window") or length > (spec.attention_span.size or length):
            return None
        masks[spec.layer_type] = columns.step_mask(offset, offset + length, dtype)
    return with_parts(masks) if isinstance(kinds, dict) else next(iter(masks.values()))


def check_takes_masks(model: Any, cache: EngineCache) -> None:
    """Raise `UnsupportedLayerError` where the windows that `cache` imposes cannot be told to the model."""
    if attention_view(cache).imposes_windows and _mask_dtype(model) is None:
        attention = model.config._attn_implementation
        own = "transformers does not mark the model as one that takes masks: use another cache"
        remedy = f"{attention!r} takes none: load the model with attn_implementation='sdpa', or use another cache"
        raise UnsupportedLayerError(
            f"cache={cache.name!r} imposes a window on {type(model).__name__}, by a mask of ours for its attention, "
            f"but {remedy if model._supports_attention_backend else own}"
        )


def imposed_mask(model: Any, view: AttentionView, kinds: MaskKinds, columns: Columns, begin: int, end: int) -> Any:
    """The mask of a step from `begin` to `end` on a cache that imposes windows, or a dict of them per layer type."""
    dtype = _mask_dtype(model)
    assert dtype is not None  # checked before the run
    mask = columns.mask(end)
    states = None if end - begin == 1 or mask is None else mask[:, begin:]
    masks: dict[str, torch.Tensor | None] = {}
    for layer, spec in enumerate(view.specs):
        if spec.layer_type in masks or not spec.keeps_kv:
            continue
        window = view.imposed_window(layer) or spec.attention_span.size
        length, offset = view.get_mask_sizes(end - begin, layer)
        copied = view.extra_slots(layer, end - begin)
        masks[spec.layer_type] = columns.window_mask(begin, end, offset, length, window, dtype, copied)
    if isinstance(kinds, str):
        return next(iter(masks.values()))
    masks |= {spec.layer_type: states for spec in view.specs if spec.keeps_state and not spec.keeps_kv}
    return with_parts(masks, states)


def _mask_dtype(model: Any) -> torch.dtype | None:
    """The type of the masks that the model's attention takes as they are; None where it takes none."""
    attention = model.config._attn_implementation
    if not model._supports_attention_backend or attention not in ("sdpa", "eager"):
        return None
    return torch.bool if attention == "sdpa" else model.dtype


def with_parts(masks: dict[str, Any], states: torch.Tensor | None = None) -> dict[str, Any]:
    """`masks` by layer type, and by the names that models have for the parts of a layer with attention and a state.

    states: the mask of the states.
    """
    parts = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
    attentions = {part: masks[whole] for whole, part in parts.items() if whole in masks}
    return masks | attentions | {"linear_attention": states, "conv": states} if attentions else masks


def graph_mask(
    model: Any, cache: TransformersCache, kinds: MaskKinds, mask: torch.Tensor | None, positions: torch.Tensor
) -> Any:
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
        return model.create_masks_for_generate(config=model.config, **arguments)
    # Not transformers' function of that name: in 5.17 it fails on chunked attention.
    config = model.config.get_text_config(decoder=True)
    if isinstance(kinds, str):
        return _MASK_OF_REACH[kinds](config, **arguments)
    return with_parts({name: _MASK_OF_REACH[kind](config, **arguments) for name, kind in kinds.items()})


def of_all_rows(mask: Any, rows: int) -> Any:
    """The mask, or a dict of them, with a row of its own for each row and contiguous, whether there are pads or not."""
    if isinstance(mask, dict):
        return {kind: of_all_rows(one, rows) for kind, one in mask.items()}
    return None if mask is None else contiguous(mask.expand(rows, *mask.shape[1:]))


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with strides of its own, not those of the tensor it is a view of: graphs are compiled for strides."""
    return tensor.clone(memory_format=torch.contiguous_format)
