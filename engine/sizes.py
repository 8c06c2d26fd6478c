"""How many bytes a cache takes for a model, found out without its weights: by a forward on torch's meta device."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

import caches
from engine.errors import InputError
from engine.loading import auto_class

_FEW = 128  # more than what is kept of a short step to take it back


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of this configuration without any weights. Raises `InputError` when transformers knows none."""
    # Kernels of which torch knows the shapes alone, and attention that looks into no mask.
    simple = {"experts_implementation": "batched_mm", "attn_implementation": "eager"}
    dtype = config.dtype or torch.float32
    try:
        with torch.device("meta"):
            return auto_class(config).from_config(config, dtype=dtype, **simple).eval()
    except ValueError as error:
        raise InputError(
            f"a {type(config).__name__} describes no model that generates text: {str(error).splitlines()[0]}"
        ) from error


def cache_bytes(model: PreTrainedModel, name: str, tokens: int, rows: int = 1, **options: Any) -> int:
    """Bytes of the backend `name` once it holds `tokens` tokens per row, in the model's data type.

    With an encoder the source has as many. model: a `skeleton`. Raises `caches.CacheError` where it is refused.
    """
    if caches.recipe(name).has_a_size:
        options.setdefault("max_cache_len", tokens)
    cache = caches.build(name, model.config, **options)
    if cache.handle is None:
        return 0
    cache.reserve(tokens)
    # Where room is made at once, few tokens tell as much as all of them: recurrences are slow even without numbers.
    # Not where a codec encodes what is older than that, or a model's own layer decides.
    makes_room = (
        isinstance(cache, caches.Cache)
        and not cache.encodes
        and not any(spec.reach.kind == "own" for spec in cache.specs)
    )
    fed = min(tokens, _FEW) if makes_room else tokens
    takes = inspect.signature(model.forward).parameters
    inputs = {"cache_params" if "cache_params" in takes else "past_key_values": cache.handle}
    if model.main_input_name != "input_ids":
        raise InputError(
            f"{type(model).__name__} reads {model.main_input_name}: what it keeps of them is not known here"
        )
    # The last token by itself: what a cache only needs to read what it holds is there then too.
    for count in (fed - 1, 1) if fed > 1 else (1,):
        ids = torch.zeros(rows, count, dtype=torch.long, device="meta")
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        cache.begin(count)
        with torch.no_grad():
            model(ids, **inputs, use_cache=True)
        cache.settle()
    return cache.bytes
