"""One lock per model: threads take turns, a forward at a time."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

_turns: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_guard = threading.Lock()


def turn_of(model: Any) -> Any:
    """The lock of a model, a `threading.RLock`: held while it computes or what it keeps changes.

    It is for `with` alone. Python code that takes or releases it would keep it where Ctrl-C comes in between. It is not
    held while a consumer has a piece, a streamer is told or a lock of another model is taken.
    """
    with _guard:
        if model not in _turns:
            _turns[model] = threading.RLock()
        return _turns[model]
