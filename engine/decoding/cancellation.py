"""Stopping a run from another thread or with Ctrl-C; checked before every forward."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from engine.errors import UserInterrupt
from engine.parallel.ranks import OneProcess

_SET, _PRESSED = 1, 2


class StopAsked(Exception):
    """The event is set."""


class Cancellation:
    """event: None, or what has `is_set()` as a `threading.Event` has. ranks: those that stop together."""

    _notes = False  # whether one of them notes Ctrl-C now; signals are the main thread's, so there is one at a time

    def __init__(self, event: Any, ranks: OneProcess):
        self._event, self._ranks, self._is_pressed = event, ranks, False

    def check(self) -> None:
        """Raise `StopAsked` or `UserInterrupt` when the run shall stop, here or on another rank."""
        is_set = self._event is not None and self._event.is_set()
        cause = self._ranks.most(_PRESSED if self._is_pressed else _SET if is_set else 0)
        if cause == _PRESSED:
            self._is_pressed = True
            self.check_keys()
        if cause == _SET:
            raise StopAsked

    def check_keys(self) -> None:
        if self._is_pressed:
            self._is_pressed = False
            raise UserInterrupt("generation was stopped with Ctrl-C; what was generated is in `partial`")

    def noting_keys(self) -> AbstractContextManager[None]:
        """Only note the first Ctrl-C; the second one raises. A handler of the user's own stays in charge."""
        return nullcontext() if Cancellation._notes or not self._is_free() else self._noting_keys()

    @contextmanager
    def _noting_keys(self) -> Iterator[None]:
        try:
            Cancellation._notes = True
            signal.signal(signal.SIGINT, self._press)
            yield
        finally:
            Cancellation._notes = False  # first: a second Ctrl-C may raise in the next lines
            if signal.getsignal(signal.SIGINT) == self._press:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    @staticmethod
    def _is_free() -> bool:
        """Whether nothing else handles Ctrl-C. `getsignal`, which takes microseconds, comes last."""
        if threading.current_thread() is not threading.main_thread():
            return False
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def _press(self, number: int, frame: Any) -> None:
        if self._is_pressed:
            self._is_pressed = False
            signal.signal(signal.SIGINT, signal.default_int_handler)  # here: what raises now may leave no other place
            signal.default_int_handler(number, frame)
        self._is_pressed = True

    def pass_on(self) -> None:
        """Raise SIGINT again if one was noted and no forward has checked for it."""
        if self._is_pressed:
            self._is_pressed = False
            signal.raise_signal(signal.SIGINT)
