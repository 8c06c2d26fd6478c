"""What a batch has done, and what it does now."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counts:
    """What was done. row_steps: rows of all steps. slots_read: slots of keys and values that these read, per layer that
    keeps all tokens. alone_steps: steps of requests that could not be joined, and why. parked: how often.
    """

    steps: int = 0
    row_steps: int = 0
    slots_read: int = 0
    alone_steps: int = 0
    pieces: int = 0
    parked: int = 0
    why_alone: set[str] = field(default_factory=set)

    def add_step(self, rows: int, slots: int) -> None:
        """A step of so many rows, which reads so many slots."""
        self.steps += 1
        self.row_steps += rows
        self.slots_read += slots


@dataclass(frozen=True)
class BatchState:
    """What a batch does now: requests that wait, run, and were parked; rows of those that run; bytes of their caches by
    place, as `Cache.bytes_by_place`.
    """

    waiting: int = 0
    running: int = 0
    parked: int = 0
    rows: int = 0
    cache_bytes: dict[str, int] = field(default_factory=dict)
