"""Rows that were one: the columns from before they were forked are there once for all of them.

    |  trunk: committed before the fork, of each prompt  |  tail: committed since, of each row  |  pending  |

Row i is one of `siblings` consecutive rows that share the trunk of prompt i // siblings. A trunk is the stores and the
timeline as they were, which stand still; a tail is others of the same recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, groupby
from math import gcd
from typing import Any

import torch

from caches.attention.segmented_tensor import Pieced, pieces_of
from caches.attention.segments import Apart, Piece
from caches.errors import StepError
from caches.memory.buffers import Buffer
from caches.stores.dense import Store, check_alike
from caches.timeline.timeline import Placement, Timeline


class ForkedTimeline(Timeline):
    """The clock of both together.

    prompts: those that the rows to come have, where `rows` was asked for others than there are; else None.
    was_read_whole: a view of it was needed whole since the step began.
    """

    def __init__(self, trunk: Timeline, tail: Timeline):
        super().__init__(trunk.retention, trunk.max_tokens, trunk.max_rows)
        self.trunk, self.tail = trunk, tail
        self.siblings = self._siblings_to_come = 1
        self.prompts: torch.Tensor | None = None
        self.was_read_whole = False
        self._join()

    def _join(self) -> None:
        self.seen = self.end = self.trunk.seen + self.tail.seen
        self.rows = self.tail.rows = None if self.trunk.rows is None else self.trunk.rows * self.siblings

    def note_whole(self) -> None:
        self.was_read_whole = True

    @property
    def would_be_cheaper_apart(self) -> bool:
        return self.was_read_whole and self.siblings > 1

    def place(self, tokens: int) -> Placement:
        super().place(tokens)  # whether there is room for all
        placement = self.tail.place(tokens)
        return replace(placement, room=self._of_tail(placement.room))

    def room_for(self, tokens: int) -> int:
        return self._of_tail(self.tail.room_for(max(0, tokens - self.trunk.seen)))

    def _of_tail(self, room: int) -> int:
        return room if self.max_tokens is None else min(room, self.max_tokens - self.trunk.seen)

    def take_room(self, room: int) -> None:
        super().take_room(room)
        self.tail.take_room(room)

    def begin(self, tokens: int, placement: Placement, graph: bool) -> None:
        super().begin(tokens, placement, graph)
        self.tail.begin(tokens, placement, graph)
        self.was_read_whole = False

    def settle(self, drop: int = 0) -> None:
        self.tail.settle(drop)
        super().settle(drop)

    def close(self) -> None:
        super().close()
        self.tail.close()

    def forget(self, tokens: int) -> None:
        of_tail = min(tokens, self.tail.seen)
        self.tail.forget(of_tail)
        self.trunk.forget(tokens - of_tail)
        super().forget(tokens)

    def before_rows(self, index: torch.Tensor) -> None:
        """Siblings are as many rows as all prompts have next to each other, so that few trunks are copied."""
        if index.device.type != "cpu":  # looking at it would wait for the device: every row gets a trunk of its own
            self.prompts, self._siblings_to_come = index.div(self.siblings, rounding_mode="floor"), 1
            return
        prompts = [row // self.siblings for row in index.tolist()]
        self._siblings_to_come = gcd(*(len(list(run)) for _, run in groupby(prompts)))
        prompts = prompts[:: self._siblings_to_come]
        stay = prompts == list(range(self.trunk.rows or 0))
        self.prompts = None if stay else torch.tensor(prompts, device=index.device)

    def before_unfork(self) -> None:
        """Every row is about to get a trunk of its own."""
        self.prompts, self._siblings_to_come = torch.arange(self.rows or 0) // self.siblings, 1

    def after_rows(self, rows: int) -> None:
        self.siblings, self.prompts = self._siblings_to_come, None
        self.trunk.after_rows(rows // self.siblings)
        self.tail.after_rows(rows)
        super().after_rows(rows)

    @property
    def layout(self) -> tuple[object, ...]:
        return *self.trunk.layout, *self.tail.layout

    def adopt_like(self, other: Timeline, rows: int) -> None:
        """See `Timeline`. `other` has one row to a prompt."""
        assert isinstance(other, ForkedTimeline)
        self.trunk.adopt_like(other.trunk, rows)
        self.tail.adopt_like(other.tail, rows)
        self.adopt_parts(siblings=1)

    def adopt_parts(self, siblings: int) -> None:
        """Be where trunk and tail are, which have been told. Raises `CapacityError`."""
        self.siblings = self._siblings_to_come = siblings
        self._join()
        self.room = self._of_tail(self.tail.room)
        super().place(0)  # whether there is room for all

    def rows_to_come(self, rows: int) -> tuple[int, int]:
        """Of the trunk, and those that share each of them, once `rows` have been chosen."""
        return rows // self._siblings_to_come, self._siblings_to_come


class ForkedStore:
    """One stream of one layer, its trunk in one store and its tail in another. See `Store`."""

    def __init__(self, trunk: Store, tail: Store, timeline: ForkedTimeline):
        self.trunk, self.tail, self.timeline = trunk, tail, timeline

    @property
    def fixed(self) -> bool:
        return self.trunk.fixed

    @property
    def encodes(self) -> bool:
        return self.trunk.encodes

    @property
    def writing(self) -> object:
        return self.trunk.writing

    @property
    def leaves(self) -> tuple[Store, Store]:
        return self.trunk, self.tail

    def append(self, new: torch.Tensor) -> torch.Tensor:
        trunk = self.trunk.read()
        if trunk is None:
            raise StepError("a layer that had no part in the steps before its rows were forked cannot have one after")
        check_alike((trunk.shape[1], trunk.shape[3]), trunk.dtype, new)
        return self._view(trunk, self.tail.append(new))

    def add(self, new: torch.Tensor) -> None:
        self.tail.add(new)

    def read(self) -> torch.Tensor | None:
        trunk = self.trunk.read()
        return None if trunk is None else self._view(trunk, self.tail.read())

    def committed(self) -> torch.Tensor | None:
        trunk = self.trunk.committed()
        return None if trunk is None else self._view(trunk, self.tail.committed())

    def _view(self, trunk: torch.Tensor, tail: torch.Tensor | None) -> Pieced:
        # As it is now: rows may change before the view that was handed out is read again.
        siblings = self.timeline.siblings
        prompts, heads, columns, width = trunk.shape

        def pieces() -> Iterator[Piece]:
            yield from pieces_of(trunk)
            own = () if tail is None else pieces_of(tail)
            yield from (Apart(piece, siblings) for piece in own) if siblings > 1 else own

        columns += 0 if tail is None else tail.shape[2]
        shape = (prompts * siblings, heads, columns, width)
        return Pieced(pieces, shape, trunk, self.timeline.note_whole, siblings=siblings)

    def merge(self) -> None:
        """Add the tail to the trunk, of which a step is open that is as long. One row to a prompt."""
        columns = self.tail.committed()
        if columns is not None:
            self.trunk.add(columns)

    def reserve(self, room: int) -> None:
        self.tail.reserve(room)

    def compact(self) -> None:
        self.tail.compact()

    def settle(self, drop: int) -> None:
        self.tail.settle(drop)

    def abort(self) -> None:
        self.tail.abort()

    def rows(self, index: torch.Tensor) -> None:
        raise StepError("trunk and tail have other rows: choose them in each of the `leaves`")

    def reset(self) -> None:
        for part in self.leaves:
            part.reset()

    def release(self) -> None:
        for part in self.leaves:
            part.release()

    def load(self, columns: torch.Tensor) -> None:
        raise StepError("rows that share a trunk cannot be given other columns: reset the cache")

    def written(self) -> dict[str, Any]:
        return {"trunk": self.trunk.written(), "tail": self.tail.written()}

    def load_written(self, written: dict[str, Any]) -> None:
        for name, part in (("trunk", self.trunk), ("tail", self.tail)):
            if written[name]:
                part.load_written(written[name])

    def tensors(self) -> Iterator[torch.Tensor]:
        return chain(self.trunk.tensors(), self.tail.tensors())

    def away(self) -> Iterator[Buffer]:
        return chain(self.trunk.away(), self.tail.away())
