"""`Pauses`: places in a prompt where reading pauses, so that others can go on from there."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from caches import EngineCache


@dataclass(frozen=True)
class Pause:
    """columns: those that the cache holds there. then: called with it; it has a log of them, and no step is open."""

    columns: int
    then: Callable[[EngineCache], None]


FindPauses: TypeAlias = Callable[[EngineCache], Sequence[Pause]]
"""The pauses in reading a prompt, by the cache that a call begins with."""


class Pauses:
    """pauses: of a run, in the order of their columns. cached_columns: of the cache, before the run's own."""

    def __init__(self, pauses: Iterable[Pause], cached_columns: int):
        self._left, self._before = deque(pauses), cached_columns

    def __bool__(self) -> bool:
        return bool(self._left)

    def next_after(self, fed: int) -> int:
        """How many columns of its own the run has fed at the next pause; more than any run feeds if there is none.

        fed: those fed by now. Earlier pauses are left out.
        """
        while self._left and self._left[0].columns < self._before + fed:
            self._left.popleft()
        return self._left[0].columns - self._before if self._left else sys.maxsize

    def pop(self) -> Pause:
        """The next one, which comes no more."""
        return self._left.popleft()
