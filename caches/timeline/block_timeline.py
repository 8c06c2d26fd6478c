"""The clock and columns of a group of layers whose older columns are encoded in blocks.

Columns count from the front of what is there, encoded or not:

    |  evicted  |  encoded, held  |  residual  |  pending  |
    0         start            encoded        end

A step decides when it begins how many columns it will encode: those before the residual, in whole blocks. A block is
never encoded again. When tokens are taken back in the middle of a block, it stays as it was, cut off, and the next
block follows it: `runs` says which columns are in which blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from caches.timeline.retention import Retention
from caches.timeline.timeline import Placement, Timeline


@dataclass(frozen=True)
class BlockRun:
    """Blocks one after the other, whole ones but for the last: the first `columns` columns from `column` on."""

    column: int
    block: int
    columns: int


class BlockTimeline(Timeline):
    """block: columns that are encoded together. residual: recent columns that stay in full.

    encoded: columns in blocks. encoding: those that the open step adds to them.
    """

    growth: ClassVar[float] = 1.125  # room for tokens to come would be what a codec saves

    def __init__(self, retention: Retention, max_rows: int | None, *, block: int, residual: int):
        super().__init__(retention, None, max_rows)
        self._limit = None  # a step is encoded whole before some of it is forgotten
        self.block, self.residual_room = block, max(residual, block - 1)
        self._residual = residual
        self.encoded = self.encoding = 0
        self.runs: list[BlockRun] = []

    @property
    def residual(self) -> int:
        """Committed columns that are not encoded."""
        return self.end - self.encoded

    @property
    def is_in_full(self) -> bool:
        return self.encoded == 0

    @property
    def blocks(self) -> int:
        """Blocks there are, cut off or not."""
        return self.runs[-1].block + -(-self.runs[-1].columns // self.block) if self.runs else 0

    @property
    def evicted(self) -> tuple[int, int]:
        """Columns at the front that are not attended to, and the blocks they are in, as far as those are whole."""
        columns = blocks = 0
        for run in self.runs:
            if self.start < run.column + run.columns:
                whole = max(0, self.start - run.column) // self.block
                return run.column + whole * self.block, run.block + whole
            columns, blocks = run.column + run.columns, run.block + -(-run.columns // self.block)
        return columns, blocks

    def place(self, tokens: int) -> Placement:
        bound, needed, (columns, _) = self.retention.bound, self.end + tokens, self.evicted
        # Moving a window to the front costs a copy of it, so it is done once in about as many tokens.
        compact = bound is not None and needed > self.room and columns >= max(self.block, bound // 2)
        return Placement(self._grown(needed - columns if compact else needed), compact)

    def room_for(self, tokens: int) -> int:
        bound = self.retention.bound
        return super().room_for(tokens if bound is None else min(tokens, bound + bound // 2 + 2 * self.block))

    def begin(self, tokens: int, placement: Placement, graph: bool) -> None:
        super().begin(tokens, placement, graph)
        self.encoding = self._to_encode(self.residual + tokens)

    def compact(self) -> None:
        self._forget_front(*self.evicted)

    def _to_encode(self, columns: int) -> int:
        """How many of the columns that are not encoded have to be: whole blocks, so that the residual stays short."""
        over = max(0, columns - self._residual)
        return min(-(-over // self.block), columns // self.block) * self.block

    def _forget_front(self, columns: int, blocks: int) -> None:
        runs = []
        for run in self.runs:
            left = min(run.columns, run.column + run.columns - columns)
            if left > 0:
                runs.append(BlockRun(max(0, run.column - columns), max(0, run.block - blocks), left))
        self.runs = runs
        self.start, self.end, self.encoded = self.start - columns, self.end - columns, self.encoded - columns

    def commit(self, rejected: int = 0) -> None:
        if self.encoding:
            last = self.runs[-1] if self.runs else None
            if last is not None and last.columns % self.block == 0:
                self.runs[-1] = BlockRun(last.column, last.block, last.columns + self.encoding)
            else:
                self.runs.append(BlockRun(self.encoded, self.blocks, self.encoding))
            self.encoded += self.encoding
        super().commit(rejected)
        self._cut()

    def roll_back(self, tokens: int) -> None:
        super().roll_back(tokens)
        self._cut()

    def _cut(self) -> None:
        """Blocks end where the columns do."""
        if self.encoded <= self.end:
            return
        self.encoded = self.end
        runs = [BlockRun(run.column, run.block, min(run.columns, self.end - run.column)) for run in self.runs]
        self.runs = [run for run in runs if run.columns > 0]

    def close(self) -> None:
        super().close()
        self.encoding = 0

    def reset(self) -> None:
        super().reset()
        self.encoded, self.runs = 0, []

    def adopt(self, seen: int, held: int | None, rows: int) -> None:
        super().adopt(seen, held, rows)
        self.encoded = self._to_encode(self.end)
        self.runs = [BlockRun(0, 0, self.encoded)] if self.encoded else []

    @property
    def layout(self) -> tuple[Any, ...]:
        return self.total_tokens, self.start, self.end, *self.runs

    def adopt_like(self, other: Timeline, rows: int) -> None:
        assert isinstance(other, BlockTimeline)
        self.reset()
        self.total_tokens, self.start, self.end = other.total_tokens, other.start, other.end
        self.encoded, self.runs, self.room = other.encoded, list(other.runs), other.room
        self.bind_batch_size(rows)
