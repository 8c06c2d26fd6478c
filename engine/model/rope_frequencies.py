"""RoPE whose frequencies depend on the length of the text.

Those of dynamic RoPE are kept per run: transformers stores them in the model, for the longest text so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

_NAMES = ("inv_freq", "max_seq_len_cached", "attention_scaling")
_last: WeakKeyDictionary[nn.Module, ref[Frequencies]] = WeakKeyDictionary()  # the run that used a model last


def dynamic_ropes(model: nn.Module) -> list[nn.Module]:
    """The rotary modules of a model that change their frequencies with the length of the text."""
    return [module for module in model.modules() if "dynamic" in str(getattr(module, "rope_type", ""))]


def plain_tokens(model: nn.Module) -> int | None:
    """Up to how many tokens of a text the rotation of its keys depends on their positions alone; None for any number.

    Keys of a longer text also depend on how long it was when they were computed.
    """
    return min((tokens for module in model.modules() for tokens in _plain_tokens(module)), default=None)


def _plain_tokens(rope: nn.Module) -> Iterator[int]:
    """Those of a rotary module: one for each type of layers whose frequencies it changes. 0 where it does not say."""
    rope_types, config = getattr(rope, "rope_type", None), getattr(rope, "config", None)
    for layer_type, rope_type in rope_types.items() if isinstance(rope_types, dict) else [(None, rope_types)]:
        if "dynamic" in str(rope_type):
            yield getattr(config, "max_position_embeddings", 0)
        elif rope_type == "longrope":
            parameters = getattr(config, "rope_parameters", None) or {}
            yield parameters.get(layer_type, parameters).get("original_max_position_embeddings", 0)


def starts_again(model: PreTrainedModel) -> bool:
    """Whether transformers' `generate` leaves the cache of a model when a text gets longer than `plain_tokens`, and so
    reads all tokens again."""
    tokens = plain_tokens(model)
    if not tokens or not isinstance(model, GenerationMixin):
        return False
    ids = torch.ones(1, tokens + 1, dtype=torch.long, device="cpu")
    past, keys = DynamicCache(), torch.zeros(1, 1, tokens, 1, device="cpu")
    past.update(keys, keys, 0)
    inputs = model.prepare_inputs_for_generation(ids, past_key_values=past, attention_mask=ids, use_cache=True)
    return inputs.get("past_key_values") is None


class Frequencies:
    """The frequencies of one run, since several runs may share a model. ropes: `dynamic_ropes(model)`."""

    def __init__(self, model: nn.Module, ropes: list[nn.Module]):
        self._model, self._ropes = model, ropes
        self._values: list[dict[str, object]] | None = None  # while another run computes

    def resume(self) -> None:
        """Restore the frequencies from after this run's last forward; before its first, the original ones.

        Call it before each forward, with the model's lock held.
        """
        if not self._ropes:
            return
        reference = _last.get(self._model)
        last_run = None if reference is None else reference()
        if last_run is self:
            return
        if last_run is not None:
            last_run._values = [_read(rope) for rope in self._ropes]
        _last.pop(self._model, None)  # no run, while they are written
        for rope, values in zip(self._ropes, self._values or map(_original, self._ropes), strict=True):
            for name, value in values.items():
                setattr(rope, name, value)
        _last[self._model] = ref(self)


def _read(rope: nn.Module) -> dict[str, Any]:
    """The values that change, by attribute. Models with several layer types have a set per type, with a prefix."""
    attributes = vars(rope) | dict(rope.named_buffers(recurse=False, remove_duplicate=False))
    return {name: value for name, value in attributes.items() if name.endswith(_NAMES) and "original" not in name}


def _original(rope: nn.Module) -> dict[str, object]:
    """The values of a new model."""
    values = {}
    for name, value in _read(rope).items():
        if name.endswith("inv_freq"):
            values[name] = getattr(rope, f"{name.removesuffix('inv_freq')}original_inv_freq", value).to(value.device)
        elif name.endswith("max_seq_len_cached"):
            values[name] = getattr(rope, "original_max_seq_len", value)
    return values
