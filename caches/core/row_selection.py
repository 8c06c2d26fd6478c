"""Choosing rows: every part of a cache does it as a whole or not at all, so a failure can only come between two parts.

What has been chosen by then stays, and `finish` goes on with the others.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from caches.core.layer_stack import Steps
from caches.errors import StepError
from caches.protocol import TokenLog


@dataclass(eq=False)
class Choice:
    """Rows that are being chosen: those of `index`, or every row `times` times, or all as they are, but `apart`.

    unasked: it only saves time, and may come later. left: the parts that still have the rows of before, and which of
    those they need; None until that was looked up. is_told: clocks and log know of the new rows.
    """

    index: torch.Tensor | None = None
    times: int | None = None
    apart: bool = False
    unasked: bool = False
    left: list[tuple[Any, torch.Tensor]] | None = None
    is_told: bool = False


def repeated(rows: int, times: int) -> torch.Tensor:
    """The index of `rows` that `fork` stands for."""
    check_times(times)
    return torch.arange(max(0, rows)).repeat_interleave(times)


def check_times(times: int) -> None:
    if times < 1:
        raise StepError(f"fork({times}): of every row there has to be one at least")


def is_every_row(index: torch.Tensor, rows: int) -> bool:
    """Whether `index` is known to leave all rows where they are. On an accelerator it is not looked at."""
    return len(index) == rows and index.device.type == "cpu" and index.tolist() == list(range(rows))


class Choosing(Steps):
    """See `Steps`."""

    _choice: Choice | None = None

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes a copy of row `index[i]`. See `unfinished` for what is there when memory is out."""
        self.start_rows(index)
        self.finish()

    def start_rows(self, index: torch.Tensor) -> None:
        """`rows` up to its first change; `finish` does the rest."""
        self._between_steps()
        self.check_rows(index)
        if self.batch_size != -1:
            self._choice = Choice(None if is_every_row(index, self.batch_size) else index)

    def check_rows(self, index: torch.Tensor) -> None:
        """Raise `StepError` unless `select_rows(index)` can be done."""
        rows = self.batch_size
        if rows == -1:
            return
        # On an accelerator, looking at the index would wait for the device.
        known = index.tolist() if index.device.type == "cpu" else [0] * len(index)
        if not known or min(known) < 0 or max(known) >= rows:
            raise StepError(f"rows({index.tolist()}), but the cache holds rows 0 to {rows - 1}")
        self._check_room(len(index))

    def _check_room(self, rows: int) -> None:
        if self.max_rows is not None and rows > self.max_rows:
            raise StepError(
                f"a cache with room for {self.max_rows} rows cannot hold {rows}: build it with a larger "
                "max_batch_size, or use cache='dynamic'"
            )

    @property
    def unfinished(self) -> bool:
        """Whether choosing rows has begun and failed: `finish` goes on with it, `reset` forgets it."""
        return self._choice is not None and not self._choice.unasked

    def finish(self) -> None:
        """Go on choosing rows where that failed. When it fails again, this can be called again."""
        choice, left = self._choice, self.still_to_choose()
        if choice is None:
            return
        while left:
            part, index = left[-1]
            part.select_rows(index)
            left.pop()
        if not choice.is_told:
            self._tell()
            choice.is_told = True
        self._tidy()
        self._choice = None

    @property
    def is_choosing(self) -> bool:
        """Whether `finish` has anything to do, asked for or not."""
        return self._choice is not None

    def still_to_choose(self) -> list[tuple[Any, torch.Tensor]]:
        """The parts that have the rows of before, and which of those they need."""
        if self._choice is None:
            return []
        if self._choice.left is None:
            self._choice.left = self._to_choose(self._choice)
        return self._choice.left

    @property
    def rows_to_come(self) -> int:
        """Rows there are once `finish` has come to its end."""
        index = self._index_to_come
        return self.batch_size if index is None else len(index)

    @property
    def log_to_come(self) -> TokenLog | None:
        log, index = self.log, self._index_to_come
        return log if log is None or index is None else log.select_rows(index)

    @property
    def _index_to_come(self) -> torch.Tensor | None:
        return None if self._choice is None or self._choice.is_told else self._choice.index

    @abstractmethod
    def _to_choose(self, choice: Choice) -> list[tuple[Any, torch.Tensor]]:
        """What it takes: see `Choice.left`. Changes nothing that is visible, and may be asked again."""

    def _tell(self) -> None:
        rows, log = self.rows_to_come, self.log_to_come
        for timeline in self._timelines:
            timeline.after_rows(rows)
        self.log = log

    @abstractmethod
    def _tidy(self) -> None:
        """Rows were chosen. When this raises it is done again."""

    def check_whole(self) -> None:
        """Raise `StepError` while rows are only half chosen."""
        if self.unfinished:
            raise StepError(
                "the last choice of rows failed half-way, so some layers still have the rows of before: finish() goes "
                "on where it stopped, reset() empties the cache"
            )
        self.finish()

    def _between_steps(self) -> None:
        super()._between_steps()
        self.check_whole()

    def reserve(self, tokens: int) -> None:
        self.check_whole()
        super().reserve(tokens)
