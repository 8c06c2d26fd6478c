"""The timeline of a group of layers whose older tokens are quantized in blocks.

Slots count from the front, quantized or not:

    |  evicted  |  quantized, kept  |  residual  |  pending  |
    0         start              encoded        end

When a step begins, it decides how many tokens it will quantize: those before the residual, in whole blocks. A block is
quantized once. After a rollback into the middle of a block, the block stays as it is, cut off, and the next block
follows it: `runs` maps slots to blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from caches.timeline.retention import Retention
from caches.timeline.timeline import Placement, Timeline

_COUNTS = ("total_tokens", "start", "end", "encoded", "room")


@dataclass(frozen=True)
class BlockRun:
    """Consecutive blocks from number `block` on, of `slots` slots from `first_slot` on. The last may be cut off."""

    first_slot: int
    block: int
    slots: int


class BlockTimeline(Timeline):
    """block: tokens that are quantized together. residual: the most recent tokens, which stay in full precision.

    encoded: slots in blocks. encoding: slots that the open step adds to them.
    """

    growth: ClassVar[float] = 1.125  # small: spare room would use up the memory that quantization saves

    def __init__(self, retention: Retention, max_rows: int | None, *, block: int, residual: int):
        super().__init__(retention, None, max_rows)
        self._limit = None  # a step is quantized completely before any of it is evicted
        self.block, self.residual_room = block, max(residual, block - 1)
        self._residual = residual
        self.encoded = self.encoding = 0
        self.runs: list[BlockRun] = []

    @property
    def residual(self) -> int:
        """Committed tokens that are not quantized."""
        return self.end - self.encoded

    @property
    def is_in_full(self) -> bool:
        return self.encoded == 0

    @property
    def blocks(self) -> int:
        """The number of blocks, those that are cut off included."""
        return self.runs[-1].block + -(-self.runs[-1].slots // self.block) if self.runs else 0

    @property
    def evicted(self) -> tuple[int, int]:
        """(slots, blocks) at the front of which no token is kept; whole blocks only."""
        slots = blocks = 0
        for run in self.runs:
            if self.start < run.first_slot + run.slots:
                evicted = max(0, self.start - run.first_slot) // self.block
                return run.first_slot + evicted * self.block, run.block + evicted
            slots, blocks = run.first_slot + run.slots, run.block + -(-run.slots // self.block)
        return slots, blocks

    def place(self, tokens: int) -> Placement:
        bound, needed, (slots, _) = self.retention.bound, self.end + tokens, self.evicted
        # Compaction copies the window, so it happens once per about half a window of tokens.
        compact = bound is not None and needed > self.room and slots >= max(self.block, bound // 2)
        return Placement(self._grown(needed - slots if compact else needed), compact)

    def room_for(self, tokens: int) -> int:
        bound = self.retention.bound
        return super().room_for(tokens if bound is None else min(tokens, bound + bound // 2 + 2 * self.block))

    def begin(self, tokens: int, placement: Placement, graph: bool) -> None:
        super().begin(tokens, placement, graph)
        self.encoding = self._to_encode(self.residual + tokens)

    def compact(self) -> None:
        self._evict_front(*self.evicted)

    def _to_encode(self, tokens: int) -> int:
        """How many of `tokens` unquantized tokens a step quantizes: whole blocks, enough for a short residual."""
        over = max(0, tokens - self._residual)
        return min(-(-over // self.block), tokens // self.block) * self.block

    def _evict_front(self, slots: int, blocks: int) -> None:
        runs = []
        for run in self.runs:
            remaining = min(run.slots, run.first_slot + run.slots - slots)
            if remaining > 0:
                runs.append(BlockRun(max(0, run.first_slot - slots), max(0, run.block - blocks), remaining))
        self.runs = runs
        self.start, self.end, self.encoded = self.start - slots, self.end - slots, self.encoded - slots

    def commit(self, rejected: int = 0) -> None:
        if self.encoding:
            run = self.runs[-1] if self.runs else None
            if run is not None and run.slots % self.block == 0:
                self.runs[-1] = BlockRun(run.first_slot, run.block, run.slots + self.encoding)
            else:
                self.runs.append(BlockRun(self.encoded, self.blocks, self.encoding))
            self.encoded += self.encoding
        super().commit(rejected)
        self._cut()

    def roll_back(self, tokens: int) -> None:
        super().roll_back(tokens)
        self._cut()

    def _cut(self) -> None:
        """After tokens were rejected or rolled back: cut off blocks behind `end`."""
        if self.encoded <= self.end:
            return
        self.encoded = self.end
        runs = [BlockRun(run.first_slot, run.block, min(run.slots, self.end - run.first_slot)) for run in self.runs]
        self.runs = [run for run in runs if run.slots > 0]

    def close(self) -> None:
        super().close()
        self.encoding = 0

    def reset(self) -> None:
        super().reset()
        self.encoded, self.runs = 0, []

    def adopt(self, total_tokens: int, kept_tokens: int | None, rows: int) -> None:
        super().adopt(total_tokens, kept_tokens, rows)
        self.encoded = self._to_encode(self.end)
        self.runs = [BlockRun(0, 0, self.encoded)] if self.encoded else []

    @property
    def layout(self) -> tuple[object, ...]:
        return self.total_tokens, self.start, self.end, *self.runs

    def state_dict(self) -> dict[str, object]:
        runs = [[run.first_slot, run.block, run.slots] for run in self.runs]
        return {name: getattr(self, name) for name in _COUNTS} | {"runs": runs}

    def load_state_dict(self, state: dict[str, Any], rows: int) -> None:
        self.reset()
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.runs = [BlockRun(*run) for run in state["runs"]]
        self.bind_batch_size(rows)
