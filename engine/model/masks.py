"""The attention masks of a step, as a model takes them."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask

from caches import EngineCache, UnsupportedLayerError
from caches.hf.joined import JoinedCaches
from caches.platform.transformers_api import attn_implementation, supports_attention_backend
from caches.protocol import AttentionView, attention_view
from engine.model.columns import Columns, additive

MaskKinds: TypeAlias = str | dict[str, str]


_MASK_OF_SPAN = {
    "all": create_causal_mask,
    "window": create_sliding_window_causal_mask,
    "chunk": create_chunked_causal_mask,
    "none": lambda config, **arguments: None,  # a new token is never a pad
}


def one_token_mask(
    model: Any, cache: TransformersCache | None, mask_kinds: MaskKinds, columns: Columns, end: int
) -> Any:
    """The mask of an eager step of one token per row, or a dict of them per layer type; views of `columns`.

    This avoids transformers' expansion of the 2D mask in every step, which waits for the device. None if transformers
    has to make the mask: no padding in a cache of its own, models that read the 2D mask, other caches, windows smaller
    than the cache.
    """
    # In most steps there is none; what follows takes microseconds. Joined rows of one length may differ in slots.
    # `isinstance` takes long: the class is an `AttentionView`, which is a protocol.
    if columns.mask(end) is None and not (type(cache) is JoinedCaches and cache.slots_differ):
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
            slots = torch.tensor(cache.slots_of_rows(layer), device="cpu")
            visible = (torch.arange(length, device="cpu") >= length - slots[:, None, None, None]).to(columns.device)
            masks[spec.layer_type] = visible if dtype == torch.bool else additive(visible, dtype)
    return with_parts(masks) if isinstance(mask_kinds, dict) else next(iter(masks.values()))


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


def masks_of_step(
    model: Any, view: AttentionView, mask_kinds: MaskKinds, columns: Columns, begin: int, end: int
) -> Any:
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
    if isinstance(mask_kinds, str):
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
    attention_types = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
    attentions = {name: masks[hybrid] for hybrid, name in attention_types.items() if hybrid in masks}
    return masks | attentions | {"linear_attention": states, "conv": states} if attentions else masks


def graph_mask(
    model: Any, cache: TransformersCache, mask_kinds: MaskKinds, mask: torch.Tensor | None, positions: torch.Tensor
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
    if isinstance(mask_kinds, str):
        return _MASK_OF_SPAN[mask_kinds](config, **arguments)
    return with_parts({name: _MASK_OF_SPAN[mask_kind](config, **arguments) for name, mask_kind in mask_kinds.items()})


def of_all_rows(mask: Any, rows: int) -> Any:
    """The mask, or a dict of masks, expanded to `rows` rows and contiguous: the same shape with and without padding."""
    if isinstance(mask, dict):
        return {layer_type: of_all_rows(layer_mask, rows) for layer_type, layer_mask in mask.items()}
    return None if mask is None else contiguous(mask.expand(rows, *mask.shape[1:]))


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: compiled graphs are specialized on strides."""
    return tensor.clone(memory_format=torch.contiguous_format)
