"""The one place that makes attention masks: which mask a step of which shape takes."""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask

from caches import EngineCache, UnsupportedLayerError, mask_kinds, read_specs
from caches.hf.joined import JoinedCaches
from caches.platform.transformers_api import attn_implementation, supports_attention_backend
from caches.protocol import AttentionView, attention_view
from engine.model.columns import Columns, additive

Mask: TypeAlias = torch.Tensor | None
Masks: TypeAlias = Mask | dict[str, Mask]
"""One for all layers, or by layer type."""

_MASK_OF_SPAN = {
    "all": create_causal_mask,
    "window": create_sliding_window_causal_mask,
    "chunk": create_chunked_causal_mask,
    "none": lambda config, **arguments: None,  # a new token is never a pad
}
_ATTENTION_OF_HYBRID = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}


class StepMasks:
    """Those of one model's steps.

    | step | mask |
    |---|---|
    | several tokens, on a cache that imposes windows | 4D, made here |
    | one token of rows with padding or of joined caches, where layers attend to all or to a window | 4D, made here |
    | one token in a graph, on such a cache or such layers | 4D, made here, of fixed shape |
    | one token in a graph otherwise | 4D, made by transformers here, outside of the graph |
    | any other | 2D, from which the model makes its own; None without padding |

    takes_cache: whether the model takes a cache of ours.
    """

    def __init__(self, model: PreTrainedModel, takes_cache: bool):
        self._model, self._takes_cache = model, takes_cache

    @cached_property
    def kinds(self) -> str | dict[str, str]:
        """See `caches.mask_kinds`."""
        return mask_kinds(self._model.config)

    @cached_property
    def _keeps_columns(self) -> bool:
        return not self._takes_cache or any(spec.keeps_kv for spec in read_specs(self._model.config))

    def of_columns(self, columns: Columns, begin: int, end: int) -> Mask:
        """The 2D mask of a step. Models that keep only recurrent states get the columns of the new tokens alone."""
        mask = columns.mask(end)
        if mask is None or self._keeps_columns:
            return mask
        return mask[:, begin:] if end - begin > 1 else None

    def in_place_of_2d(self, cache: object, columns: Columns, begin: int, end: int) -> Masks:
        """What a step takes in place of the 2D mask; None where nothing does.

        For one token these are mostly views of `columns`: transformers' expansion of the 2D mask in every step waits
        for the device.
        """
        if end - begin > 1:
            view = attention_view(cache)
            return self._of_layers(view, columns, begin, end) if view.imposes_windows else None
        # In most steps there is none; what follows takes microseconds. Joined rows of one length may differ in slots.
        # `isinstance` takes long: the class is an `AttentionView`, which is a protocol.
        if not columns.has_mask and not (type(cache) is JoinedCaches and cache.slots_differ):
            return None
        view = attention_view(cache)
        return self._of_layers(view, columns, begin, end) if self.can_make(view) else None

    def of_graph(self, cache: EngineCache, columns: Columns, positions: torch.Tensor, end: int, rows: int) -> Masks:
        """The mask of a compiled step of one token per row. positions: its position ids."""
        view = attention_view(cache)
        if not self._keeps_columns:
            return None  # a new token is never padding
        if view.imposes_windows or self.can_make(view):
            masks = self._of_layers(view, columns, end - 1, end)
        else:
            masks = self._by_transformers(cache, columns.mask(end), positions)
        if isinstance(masks, dict):
            return {layer_type: _of_rows(mask, rows) for layer_type, mask in masks.items()}
        return _of_rows(masks, rows)

    def can_make(self, view: AttentionView) -> bool:
        """Whether the masks of every step over the cache can be made here, in place of transformers."""
        spans = {spec.attention_span.kind for spec in view.specs if spec.keeps_kv}
        return bool(spans) and spans <= {"all", "window"} and _mask_dtype(self._model) is not None

    def _of_layers(self, view: AttentionView, columns: Columns, begin: int, end: int) -> Masks:
        dtype = _mask_dtype(self._model)
        assert dtype is not None  # a cache that imposes windows has been checked before the run
        mask = columns.mask(end) if end - begin > 1 else None
        states = None if mask is None else mask[:, begin:]
        masks = dict[str, Mask]()
        for layer, spec in enumerate(view.specs):
            if spec.keeps_kv and spec.layer_type not in masks:
                masks[spec.layer_type] = _of_layer(view, layer, columns, begin, end, dtype)
        if isinstance(self.kinds, str):
            return next(iter(masks.values()))
        masks |= {spec.layer_type: states for spec in view.specs if spec.keeps_state and not spec.keeps_kv}
        return _with_hybrids(masks, states)

    def _by_transformers(self, cache: EngineCache, mask: Mask, positions: torch.Tensor) -> Masks:
        """From the cache's mask sizes for the open step. mask: 2D."""
        model = self._model
        arguments = {
            # Only the shape, data type and device of the embeddings are used.
            "inputs_embeds": torch.empty((*positions.shape[-2:], 0), dtype=model.dtype, device=positions.device),
            "attention_mask": mask,
            "past_key_values": cache.handle,
            "position_ids": positions,
        }
        if hasattr(model, "create_masks_for_generate"):
            masks: Masks = model.create_masks_for_generate(config=model.config, **arguments)
            return masks
        # transformers' own create_masks_for_generate fails on chunked attention in 5.17.
        config = model.config.get_text_config(decoder=True)
        if isinstance(self.kinds, str):
            return _MASK_OF_SPAN[self.kinds](config, **arguments)
        return _with_hybrids({name: _MASK_OF_SPAN[kind](config, **arguments) for name, kind in self.kinds.items()})


def check_takes_masks(model: PreTrainedModel, cache: EngineCache) -> None:
    """Raise `UnsupportedLayerError` if `cache` imposes windows and the model does not take 4D masks."""
    if attention_view(cache).imposes_windows and _mask_dtype(model) is None:
        attention = attn_implementation(model.config)
        unmarked = "transformers does not mark the model as one that takes such masks: use another cache"
        remedy = f"{attention!r} takes none: load the model with attn_implementation='sdpa', or use another cache"
        raise UnsupportedLayerError(
            f"cache={cache.name!r} imposes a window on {type(model).__name__} with a 4D attention mask, "
            f"but {remedy if supports_attention_backend(model) else unmarked}"
        )


def _mask_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """The data type of 4D masks for the model's attention; None if it takes none."""
    attention = attn_implementation(model.config)
    if not supports_attention_backend(model) or attention not in ("sdpa", "eager"):
        return None
    return torch.bool if attention == "sdpa" else model.dtype


def _of_layer(
    view: AttentionView, layer: int, columns: Columns, begin: int, end: int, dtype: torch.dtype
) -> torch.Tensor:
    """[rows or 1, 1, tokens, slots]: which slots the tokens see in a layer."""
    window = view.imposed_window(layer) or view.specs[layer].attention_span.size
    length, offset = view.get_mask_sizes(end - begin, layer)
    if type(view) is JoinedCaches:
        slots = torch.tensor(view.slots_of_rows(layer), device="cpu").clamp(max=window or length)[:, None, None, None]
        visible = (torch.arange(length, device="cpu") >= length - slots).to(columns.device)
        return visible if dtype == torch.bool else additive(visible, dtype)
    sees_all = end - begin == 1 and offset + length == end and (window is None or length <= window)
    if sees_all and columns.has_mask:
        return columns.step_mask(offset, end, dtype)
    copied = view.extra_slots(layer, end - begin)
    visible = visible_slots(columns, begin, end, offset, length, window, copied)
    return visible if dtype == torch.bool else additive(visible, dtype)


def visible_slots(
    columns: Columns, begin: int, end: int, offset: int, length: int, window: int | None, copied: int
) -> torch.Tensor:
    """Whether the tokens in columns [begin, end) see each of `length` slots, which are the columns from `offset` on.

    window: columns that a token attends to, itself included; None for all. copied: key slots in front, a copy of the
    sinks for each token; a token whose window no longer has the row's first tokens sees its own copy instead of the
    oldest columns of the window. Returns [rows or 1, 1, end - begin, copied + length].
    """
    mask, device = columns.mask(end), columns.device
    tokens = torch.arange(begin, end, device=device)[:, None]
    slots = torch.arange(offset, offset + length, device=device)
    visible = slots <= tokens
    if window is not None:
        visible &= slots > tokens - window
    visible = visible[None, None]
    if copied:
        assert window is not None
        sinks = copied // (end - begin)
        behind = tokens - window >= columns.left_padding.to(device)[:, None, None, None]  # [rows, 1, tokens, 1]
        visible = visible & (~behind | (slots > tokens - window + sinks))
        copies = torch.arange(begin, end, device=device).repeat_interleave(sinks) == tokens
    if mask is not None:
        real = torch.zeros(len(mask), length, dtype=torch.bool, device=device)
        unmasked = mask[:, max(offset, 0) : offset + length] != 0
        real[:, max(-offset, 0) : max(-offset, 0) + unmasked.shape[1]] = unmasked
        # Padding attends to itself: softmax over no column would be NaN.
        visible = (visible & real[:, None, None]) | (slots == tokens)
    return torch.cat([behind & copies, visible], dim=-1) if copied else visible


def _with_hybrids(masks: dict[str, Mask], states: Mask = None) -> dict[str, Mask]:
    """`masks` by layer type, with entries for the parts of hybrid layers (attention and state).

    states: the mask for the states, [rows, tokens].
    """
    attentions = {name: masks[hybrid] for hybrid, name in _ATTENTION_OF_HYBRID.items() if hybrid in masks}
    return masks | attentions | {"linear_attention": states, "conv": states} if attentions else masks


def _of_rows(mask: Mask, rows: int) -> Mask:
    """Expanded to all rows and contiguous: the same shape with and without padding."""
    return None if mask is None else contiguous(mask.expand(rows, *mask.shape[1:]))


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: compiled graphs are specialized on strides."""
    return tensor.clone(memory_format=torch.contiguous_format)
