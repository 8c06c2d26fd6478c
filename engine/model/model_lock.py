"""One lock per model, so that one thread at a time runs a forward."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from caches.layers.read_by import ReadBy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_turns: WeakKeyDictionary[object, object] = WeakKeyDictionary()
_guard = threading.Lock()


def turn_of(model: PreTrainedModel) -> Any:
    """The model's lock, a `threading.RLock`: hold it during forwards and while the model's own state changes.

    Use it only in `with`: other code could leave it locked after Ctrl-C. It is never held while a consumer has a chunk,
    a streamer is called, or another model's lock is acquired.
    """
    with _guard:
        if model not in _turns:
            _turns[model] = threading.RLock()
        return _turns[model]


def reader_now(model: PreTrainedModel) -> ReadBy:
    """The model as it is now, in its turn: a trial of another thread changes its windows while it lasts."""
    with turn_of(model):
        return ReadBy.of(model)
