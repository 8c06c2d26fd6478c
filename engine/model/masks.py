"""Attention masks and position ids of a run, computed once; each step reads views of them."""

from __future__ import annotations

import copy
from typing import Any, TypeAlias

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask

from caches import EngineCache, UnsupportedLayerError
from caches.hf.joined import JoinedCaches
from caches.protocol import AttentionView, attention_view
from caches.transformers_api import attn_implementation, supports_attention_backend
from engine.model.growing_columns import room_for, widened

MaskKinds: TypeAlias = str | dict[str, str]


class Columns:
    """The mask and the position ids of all columns of a run.

    A column is an index along the sequence axis of the padded batch. mask: [rows, prompt columns], 0 for padding.
    total: columns at the end of the run, at most. positions: [..., prompt columns] of the caller; None counts tokens
    from 0, without padding.

    room: columns that are allocated.
    """

    def __init__(self, mask: torch.Tensor, total: int, positions: torch.Tensor | None = None):
        rows, self.prompt = mask.shape
        self.total, self.device = total, mask.device
        # Without padding no mask is needed: attention kernels apply the causal mask themselves, and faster. With given
        # positions it is kept: transformers takes gaps in positions without a mask for packed sequences.
        self._mask = mask if positions is not None or not bool(mask.all()) else None
        self.left_padding = (
            torch.zeros(rows, dtype=torch.long) if self._mask is None else (mask == 0).int().argmin(dim=1)
        )
        """The number of padding columns at the beginning of each row, [rows]."""
        self.first_full = int(self.left_padding.max())
        """The first column in which no row has padding."""
        self._step_masks: dict[torch.dtype, torch.Tensor] = {}  # [rows, 1, 1, columns], by data type
        self._are_given = positions is not None
        if positions is None:
            self._following = mask.sum(dim=1, keepdim=True)
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        else:
            self._following = positions[..., -1:] + 1  # the position of the first new token, [..., 1]
        self._positions, self.room = positions, self.prompt
        self._widen(room_for(self.prompt, total))

    @property
    def rows(self) -> int:
        return len(self.left_padding)

    @property
    def are_plain(self) -> bool:
        """Whether there is no padding, and the positions count the tokens."""
        return self._mask is None and not self._are_given

    def reserve(self, columns: int) -> None:
        """Allocate at least `columns` columns. Other methods do this as needed. Raises without changing anything."""
        if columns > self.room:
            self._widen(room_for(columns, self.total, self.room))

    def _widen(self, room: int) -> None:
        first, like = self.room - self.prompt, self._positions
        steps = torch.arange(first, room - self.prompt, device=like.device, dtype=like.dtype)
        positions = torch.cat([like, self._following + steps], dim=-1)
        self._mask = None if self._mask is None else widened(self._mask, room, 1)
        self._positions, self._step_masks, self.room = positions, {}, room

    def mask(self, columns: int) -> torch.Tensor | None:
        """The 2D mask of the first columns, [rows, columns]; None without padding."""
        self.reserve(columns)
        return None if self._mask is None else self._mask[:, :columns]

    def step_mask(self, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """The mask of one new token over columns [begin, end): [rows, 1, 1, end - begin], a view.

        dtype: bool (True: visible), or the data type of the scores that it is added to.
        """
        self.reserve(end)
        assert self._mask is not None
        if dtype not in self._step_masks:
            visible = (self._mask != 0)[:, None, None]
            self._step_masks[dtype] = visible if dtype == torch.bool else _additive(visible, dtype)
        return self._step_masks[dtype][..., begin:end]

    def window_mask(
        self, begin: int, end: int, offset: int, length: int, window: int | None, dtype: torch.dtype, copied: int
    ) -> torch.Tensor:
        """The mask of the tokens in columns [begin, end) over `length` columns from `offset` on.

        window: columns that a token attends to, itself included; None for all. copied: key slots in front, a copy of
        the sinks for each token; a token whose window no longer has the row's first tokens sees its own copy instead
        of the oldest columns of the window. Returns [rows or 1, 1, end - begin, copied + length].
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
            behind = tokens - window >= self.left_padding.to(self.device)[:, None, None, None]  # [rows, 1, tokens, 1]
            visible = visible & (~behind | (columns > tokens - window + sinks))
            own = torch.arange(begin, end, device=self.device).repeat_interleave(sinks) == tokens
        if self._mask is not None:
            real = torch.zeros(len(self._mask), length, dtype=torch.bool, device=self.device)
            known = self._mask[:, max(offset, 0) : offset + length] != 0
            real[:, max(-offset, 0) : max(-offset, 0) + known.shape[1]] = known
            # Padding attends to itself: softmax over no column would be NaN.
            visible = (visible & real[:, None, None]) | (columns == tokens)
        if copied:
            visible = torch.cat([behind & own, visible], dim=-1)
        return visible if dtype == torch.bool else _additive(visible, dtype)

    def positions(self, begin: int, end: int) -> torch.Tensor:
        """Position ids [..., end - begin]."""
        self.reserve(end)
        return self._positions[..., begin:end]

    def own_positions(self, columns: int) -> torch.Tensor | None:
        """The caller's position ids [..., rows, columns] of the first columns; None if they count the tokens."""
        self.reserve(columns)
        return self._positions[..., :columns] if self._are_given else None

    def of_rows(self, index: torch.Tensor) -> Columns:
        """A copy with row `index[i]` as row i."""
        other = copy.copy(self)
        other.left_padding = self.left_padding[index.to(self.left_padding.device)]
        other._mask = None if self._mask is None else self._mask[index]
        other._step_masks = {}
        rows_axis = self._positions.ndim - 2  # [rows, columns], or [kinds, rows, columns] for multimodal positions
        other._positions = self._positions.index_select(rows_axis, index)
        other._following = self._following.index_select(rows_axis, index)
        return other


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bool mask as it is added to scores of this data type."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


_MASK_OF_SPAN = {
    "all": create_causal_mask,
    "window": create_sliding_window_causal_mask,
    "chunk": create_chunked_causal_mask,
    "none": lambda config, **arguments: None,  # a new token is never a pad
}


def one_token_mask(model: Any, cache: TransformersCache | None, kinds: MaskKinds, columns: Columns, end: int) -> Any:
    """The mask of an eager step of one token per row, or a dict of them per layer type; views of `columns`.

    This avoids transformers' expansion of the 2D mask in every step, which waits for the device. None if transformers
    has to make the mask: no padding in a cache of its own, models that read the 2D mask, other caches, windows smaller
    than the cache.
    """
    # In most steps there is none; what follows takes microseconds. Joined rows of one length may differ in slots.
    if columns.mask(end) is None and not (isinstance(cache, JoinedCaches) and cache.slots_differ):
        return None
    dtype, view = _mask_dtype(model), attention_view(cache)
    if not view.specs or dtype is None:
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
        if not isinstance(cache, JoinedCaches):
            masks[spec.layer_type] = columns.step_mask(offset, offset + length, dtype)
        else:
            slots = torch.tensor(cache.slots_of_rows(layer))
            visible = (torch.arange(length) >= length - slots[:, None, None, None]).to(columns.device)
            masks[spec.layer_type] = visible if dtype == torch.bool else _additive(visible, dtype)
    return with_parts(masks) if isinstance(kinds, dict) else next(iter(masks.values()))


def takes_step_masks(model: Any, view: AttentionView) -> bool:
    """Whether `one_token_mask` and `masks_of_step` can make the masks of every step, in place of transformers."""
    spans = {spec.attention_span.kind for spec in view.specs if spec.keeps_kv}
    return _mask_dtype(model) is not None and spans <= {"all", "window"}


def check_takes_masks(model: Any, cache: EngineCache) -> None:
    """Raise `UnsupportedLayerError` if `cache` imposes windows and the model does not take 4D masks."""
    if attention_view(cache).imposes_windows and _mask_dtype(model) is None:
        attention = attn_implementation(model.config)
        unmarked = "transformers does not mark the model as one that takes such masks: use another cache"
        remedy = f"{attention!r} takes none: load the model with attn_implementation='sdpa', or use another cache"
        raise UnsupportedLayerError(
            f"cache={cache.name!r} imposes a window on {type(model).__name__} with a 4D attention mask, "
            f"but {remedy if supports_attention_backend(model) else unmarked}"
        )


def masks_of_step(model: Any, view: AttentionView, kinds: MaskKinds, columns: Columns, begin: int, end: int) -> Any:
    """The mask of a step from `begin` to `end`, or a dict of them per layer type: on caches that impose windows, and in
    compiled steps of models whose masks can be made here (`takes_step_masks`)."""
    dtype = _mask_dtype(model)
    assert dtype is not None  # a cache that imposes windows has been checked before the run
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
    """The data type of 4D masks for the model's attention; None if it takes none."""
    attention = attn_implementation(model.config)
    if not supports_attention_backend(model) or attention not in ("sdpa", "eager"):
        return None
    return torch.bool if attention == "sdpa" else model.dtype


def with_parts(masks: dict[str, Any], states: torch.Tensor | None = None) -> dict[str, Any]:
    """`masks` by layer type, with entries for the parts of hybrid layers (attention and state).

    states: the mask for the states, [rows, tokens].
    """
    parts = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
    attentions = {part: masks[hybrid] for hybrid, part in parts.items() if hybrid in masks}
    return masks | attentions | {"linear_attention": states, "conv": states} if attentions else masks


def graph_mask(
    model: Any, cache: TransformersCache, kinds: MaskKinds, mask: torch.Tensor | None, positions: torch.Tensor
) -> Any:
    """The masks of a compiled step: 4D, of fixed shape, one or a dict per layer type.

    Computed outside of the graph from the cache's mask sizes for the open step. mask: 2D, [rows, columns]; positions:
    the step's position ids.
    """
    arguments = {
        # Only the shape, data type and device of the embeddings are used.
        "inputs_embeds": torch.empty((*positions.shape[-2:], 0), dtype=model.dtype, device=positions.device),
        "attention_mask": mask,
        "past_key_values": cache,
        "position_ids": positions,
    }
    if hasattr(model, "create_masks_for_generate"):
        return model.create_masks_for_generate(config=model.config, **arguments)
    # transformers' own create_masks_for_generate fails on chunked attention in 5.17.
    config = model.config.get_text_config(decoder=True)
    if isinstance(kinds, str):
        return _MASK_OF_SPAN[kinds](config, **arguments)
    return with_parts({name: _MASK_OF_SPAN[kind](config, **arguments) for name, kind in kinds.items()})


def of_all_rows(mask: Any, rows: int) -> Any:
    """The mask, or a dict of masks, expanded to `rows` rows and contiguous: the same shape with and without padding."""
    if isinstance(mask, dict):
        return {kind: of_all_rows(one, rows) for kind, one in mask.items()}
    return None if mask is None else contiguous(mask.expand(rows, *mask.shape[1:]))


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: compiled graphs are specialized on strides."""
    return tensor.clone(memory_format=torch.contiguous_format)
