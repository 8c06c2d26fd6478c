"""The frequencies of dynamic RoPE: transformers keeps them in the model, by the longest text that was read."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

_NAMES = ("inv_freq", "max_seq_len_cached", "attention_scaling")
_last: WeakKeyDictionary[nn.Module, ref[Frequencies]] = WeakKeyDictionary()  # which run computed with a model last


def dynamic_ropes(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that change their frequencies while they compute."""
    return [module for module in model.modules() if "dynamic" in str(getattr(module, "rope_type", ""))]


class Frequencies:
    """Those of one run: runs that take turns on a model would each go on with the other's. ropes: `dynamic_ropes`."""

    def __init__(self, model: nn.Module, ropes: list[nn.Module]):
        self._model, self._ropes = model, ropes
        self._values: list[dict[str, Any]] | None = None  # while another run computes

    def resume(self) -> None:
        """Before a forward of this run, within the model's turn: the model has what it had after the last one.

        Before the first one it has what it had when it was new.
        """
        if not self._ropes:
            return
        found = _last.get(self._model)
        last = None if found is None else found()
        if last is self:
            return
        if last is not None:
            last._values = [_read(rope) for rope in self._ropes]
        _last.pop(self._model, None)  # until all are written
        for rope, values in zip(self._ropes, self._values or map(_original, self._ropes), strict=True):
            for name, value in values.items():
                setattr(rope, name, value)
        _last[self._model] = ref(self)


def _read(rope: nn.Module) -> dict[str, Any]:
    """Of models with several kinds of layers each kind has its own, named after it."""
    kept = vars(rope) | dict(rope.named_buffers(recurse=False, remove_duplicate=False))
    return {name: value for name, value in kept.items() if name.endswith(_NAMES) and "original" not in name}


def _original(rope: nn.Module) -> dict[str, Any]:
    """What it had before it read any text."""
    found = {}
    for name, value in _read(rope).items():
        if name.endswith("inv_freq"):
            found[name] = getattr(rope, f"{name.removesuffix('inv_freq')}original_inv_freq", value).to(value.device)
        elif name.endswith("max_seq_len_cached"):
            found[name] = getattr(rope, "original_max_seq_len", value)
    return found
