"""Sequences of token ids, found by what they begin with.

They are kept in lexicographic order: of all of them, a neighbour of the place where a sequence belongs has the longest
beginning in common with it. So a search takes a number of comparisons that is logarithmic in the number of sequences.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar


class HasIds(Protocol):
    @property
    def ids(self) -> tuple[int, ...]: ...


T = TypeVar("T", bound=HasIds)


def _ids(entry: HasIds) -> tuple[int, ...]:
    return entry.ids


class TokenIndex(Generic[T]):
    """Entries by their `ids`, of which none are empty and no two are equal."""

    def __init__(self) -> None:
        self._entries: list[T] = []

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: T) -> None:
        self._entries.insert(bisect_left(self._entries, entry.ids, key=_ids), entry)

    def remove(self, entry: T) -> None:
        at = bisect_left(self._entries, entry.ids, key=_ids)
        assert self._entries[at] is entry
        del self._entries[at]

    def nearest(self, ids: tuple[int, ...]) -> tuple[T | None, int]:
        """The entry that has the longest beginning in common with `ids`, and how many tokens that are."""
        at = bisect_left(self._entries, ids, key=_ids)
        near = [(common(entry.ids, ids), entry) for entry in self._entries[max(0, at - 1) : at + 1]]
        tokens, entry = max(near, key=lambda candidate: candidate[0], default=(0, None))
        return (entry, tokens) if tokens else (None, 0)

    def beginnings(self, ids: tuple[int, ...]) -> Iterator[T]:
        """The entries that `ids` begins with, the longest first."""
        at = bisect_right(self._entries, ids, key=_ids)
        while at:
            entry = self._entries[at - 1]
            tokens = common(entry.ids, ids)
            if tokens == len(entry.ids):
                yield entry
                tokens -= 1
            ids = ids[:tokens]
            at = bisect_right(self._entries, ids, key=_ids)


def common(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """How many tokens both begin with."""
    low, high = 0, min(len(ids), len(other_ids))
    while low < high:  # equality of slices is fast: comparisons token by token are not
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ids[low:middle] == other_ids[low:middle] else (low, middle - 1)
    return low
