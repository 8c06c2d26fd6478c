"""Which columns survive when a step is settled. Index arithmetic only: where the bytes live is not known here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Retention(Protocol):
    """A rule for what to keep of the columns a group of layers holds, oldest first."""

    @property
    def bound(self) -> int | None:
        """The most columns that ever survive a step; None when all do."""

    def surviving(self, held: int) -> int:
        """How many of `kept_tokens` columns survive: the most recent ones."""


@dataclass(frozen=True)
class KeepAll:
    """Nothing is ever forgotten (full attention)."""

    bound: None = None

    def surviving(self, held: int) -> int:
        return held


@dataclass(frozen=True)
class KeepRecent:
    """Only the `columns` most recent ones survive (sliding-window and chunked attention: size - 1)."""

    columns: int

    @property
    def bound(self) -> int:
        return self.columns

    def surviving(self, held: int) -> int:
        return min(held, self.columns)


@dataclass(frozen=True)
class KeepSinks(KeepRecent):
    """As many columns as `KeepRecent`, of which the first `sinks` make place for a row's first tokens.

    They do so once a row has more tokens than that; a store writes them there.
    """

    sinks: int
