"""Stopping a run from another thread or with Ctrl-C; checked before every forward."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.errors import UserInterrupt


class StopAsked(Exception):
    """The event is set."""


class Cancellation:
    """event: None, or what has `is_set()` as a `threading.Event` has."""

    _notes = False  # whether one of them notes Ctrl-C now; signals are the main thread's, so there is one at a time

    def __init__(self, event: Any = None):
        self._event, self._is_pressed = event, False

    def check(self) -> None:
        """Raise `StopAsked` or `UserInterrupt` when the run shall stop."""
        self.check_keys()
        if self._event is not None and self._event.is_set():
            raise StopAsked

    def check_keys(self) -> None:
        if self._is_pressed:
            self._is_pressed = False
            raise UserInterrupt("generation was stopped with Ctrl-C; what was generated is in `partial`")

    @contextmanager
    def noting_keys(self) -> Iterator[None]:
        """Only note the first Ctrl-C; the second one raises. A handler of the user's own stays in charge."""
        if not self._is_free():
            yield
            return
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
        if Cancellation._notes or threading.current_thread() is not threading.main_thread():
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
