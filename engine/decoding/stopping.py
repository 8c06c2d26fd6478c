"""When a row ends, and when the run does.

`Stopping`: end-of-sequence ids, stop strings, the caller's criteria, time and length, decided on the host.
`Cancellation`: another thread or Ctrl-C, checked before every forward.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Protocol

import torch
from transformers import MaxTimeCriteria, StoppingCriteriaList

from engine.errors import UserInterrupt
from engine.output.detokenizer import RowText
from engine.parallel.ranks import OneProcess
from engine.request.generation_helpers import replaces
from engine.request.request import Request
from engine.request.time_limit import of_all_ranks

_SET, _PRESSED = 1, 2


class Stopping:
    """`reasons[row]` is None while the row runs, then the first of these that ended it.

    "eos": an end-of-sequence id; "stop_string": the row's text; "criteria": those of the caller; "time": `max_time`
    since `begin`, on one of the ranks; "length": `max_columns` of the request.
    """

    def __init__(self, request: Request, ranks: OneProcess):
        self.reasons: list[str | None] = [None] * len(request.prompt.ids)
        self._last_column = request.lengths.ids
        self._eos_ids, self._belongs = frozenset(request.eos_ids), request.belongs
        self._time = StoppingCriteriaList()
        self._max_time_s = None if replaces(request.criteria, MaxTimeCriteria) else request.config.max_time
        self._ranks = ranks
        criteria = type(request.criteria)(of_all_ranks(criterion, ranks) for criterion in request.criteria)
        self._criteria = (("criteria", criteria), ("time", self._time))

    def begin(self) -> None:
        """The first operation comes now: time is counted from here on."""
        if self._max_time_s is not None:
            self._time.append(of_all_ranks(MaxTimeCriteria(self._max_time_s), self._ranks))

    @property
    def done(self) -> bool:
        return None not in self.reasons

    @property
    def running(self) -> list[bool]:
        """Which rows have not ended."""
        return [reason is None for reason in self.reasons]

    def ends(self, tokens: Sequence[int], ids: Callable[[], torch.Tensor]) -> list[bool]:
        """Which tokens, the last of ids [rows, columns], are end tokens, and no text that a form goes on with."""
        are_ends = [token in self._eos_ids for token in tokens]
        if self._belongs is None or not any(are_ends):
            return are_ends
        return [is_end and not is_text for is_end, is_text in zip(are_ends, self._belongs(ids()).tolist(), strict=True)]

    def is_end(self, ids: torch.Tensor, prompt: int) -> bool:
        """Whether the last of ids [columns], a text that goes on from this prompt, is an end token: see `ends`."""
        is_end = int(ids[-1]) in self._eos_ids
        return is_end and not (self._belongs is not None and bool(self._belongs(ids[None], prompt)))

    def check(
        self,
        columns: int,
        ends: Sequence[bool],
        texts: Sequence[RowText] | None,
        read_by_criteria: Callable[[], tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]],
    ) -> None:
        """Check the last of `columns` columns. ends: see `ends`. read_by_criteria: the ids and scores so far."""
        for row, is_end in enumerate(ends):
            if self.reasons[row] is None:
                self.reasons[row] = _own_reason(is_end, None if texts is None else texts[row])
        # These may raise: the reasons of rows that ended by themselves are set before.
        verdicts = [(reason, criteria(*read_by_criteria()).tolist()) for reason, criteria in self._criteria if criteria]
        if columns >= self._last_column:
            verdicts.append(("length", [True] * len(self.reasons)))
        for reason, verdict in verdicts:
            for row, ends in enumerate(verdict):
                if ends and self.reasons[row] is None:
                    self.reasons[row] = reason

    def why(self, ids: torch.Tensor, is_end: bool, text: RowText | None) -> str:
        """The reason that a text ended with `ids` [columns], where the strategy found its end. is_end: see `is_end`."""
        reason = _own_reason(is_end, text)
        if reason is not None or len(ids) >= self._last_column:
            return reason or "length"
        # Criteria of the caller may keep a state of all rows: they are not asked about one.
        return "time" if self._time and bool(self._time(ids[None], None).all()) else "criteria"

    def select_rows(self, index: torch.Tensor) -> None:
        self.reasons = [self.reasons[row] for row in index.tolist()]


def _own_reason(is_end: bool, text: RowText | None) -> str | None:
    if is_end:
        return "eos"
    return "stop_string" if text is not None and text.stopped else None


class StopAsked(Exception):
    """The event is set."""


class Event(Protocol):
    """What `cancellation` takes, as `threading.Event`."""

    def is_set(self) -> bool: ...


class Cancellation:
    """ranks: those that stop together."""

    _notes = False  # whether one of them notes Ctrl-C now; signals are the main thread's, so there is one at a time

    def __init__(self, event: Event | None, ranks: OneProcess):
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

    def _press(self, number: int, frame: FrameType | None) -> None:
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
