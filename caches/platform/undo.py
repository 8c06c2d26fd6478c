"""Undoing what a failed block has begun."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class on_failure:
    """A block after which `undo` is called where it ends with an error, Ctrl-C among them. The error goes on."""

    def __init__(self, undo: Callable[[], object]):
        self._undo = undo

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_class: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._undo()
