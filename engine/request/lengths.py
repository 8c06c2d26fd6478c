"""`Lengths`: how many columns a run has, and of what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """All in columns, of each row.

    cached: those in the cache that the prompt does not repeat. embedded: those behind them that are embeddings, without
    ids. prompt: all before the first new token, these included. new: tokens that a row gets at most.
    """

    cached: int
    embedded: int
    prompt: int
    new: int

    @property
    def total(self) -> int:
        """Columns at the end of the longest run."""
        return self.prompt + self.new

    @property
    def first_id(self) -> int:
        """The first column whose id was given."""
        return self.cached + self.embedded

    @property
    def ids(self) -> int:
        """Columns with an id at the end of the longest run."""
        return self.total - self.first_id
