"""Which tokens a cache keeps when a step is committed: all, a window, or a window and sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Retention(Protocol):
    """How many of the most recent tokens a group of layers keeps."""

    @property
    def bound(self) -> int | None:
        """The most tokens that are ever kept after a step; None if there is no limit."""

    def surviving(self, tokens: int) -> int:
        """How many of the last `tokens` tokens are kept: the most recent ones."""


@dataclass(frozen=True)
class KeepAll:
    """Every token is kept (full attention)."""

    bound: None = None

    def surviving(self, tokens: int) -> int:
        return tokens


@dataclass(frozen=True)
class KeepRecent:
    """The `size` most recent tokens are kept (sliding-window and chunked attention: window - 1)."""

    size: int

    @property
    def bound(self) -> int:
        return self.size

    def surviving(self, tokens: int) -> int:
        return min(tokens, self.size)


@dataclass(frozen=True)
class KeepSinks(KeepRecent):
    """`size` slots are kept; once a row has more tokens, the first `sinks` slots hold the row's first tokens.

    The store writes them there: for the timeline this is a window.
    """

    sinks: int
