"""A store whose older columns are encoded: the most recent ones stay in full, and every column is encoded once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch

from caches.attention.segmented_tensor import SegmentedTensor
from caches.attention.segments import DenseSegment, Segment
from caches.memory.buffers import Buffer
from caches.quantization.codec import Codec, Parts
from caches.stores.dense import check_alike
from caches.stores.slot import Slot
from caches.timeline.block_timeline import BlockRun, BlockTimeline

_PIECE = 4096  # columns that are decoded at a time, so that scratch does not grow with the context


class _Part:
    """One part of a store's blocks, which `Prefetcher` fetches where it does not live on the device."""

    def __init__(self, store: QuantizedStore, name: str, buffer: Buffer):
        self.name, self.buffer = f"{store.name} {name}", buffer
        # Not the store itself, which owns it: their memory would wait for a garbage collection.
        self._timeline, self._scratch, self._codec, self._part = store.timeline, store.scratch, store.codec, name

    def wanted(self) -> tuple[int, int, int]:
        """What its next step reads: see `Reader`."""
        timeline = self._timeline
        begin, end = _span(timeline, self._codec, self._part, *timeline.evicted)
        return begin, end, max(end, timeline.room // (timeline.block if self._codec.per_block(self._part) else 1))

    def read(self, begin: int, end: int) -> torch.Tensor:
        if self.buffer.tier == "device" or begin == end:
            return self.buffer.read(begin, end)
        room = self.wanted()[2]
        return self._scratch.prefetcher.take(self, begin, end, room - begin)[:, :, : end - begin]

    def has_changed(self) -> None:
        """In other ways than behind its end."""
        self._scratch.prefetcher.discard(self)


def _span(timeline: BlockTimeline, codec: Codec, name: str, begin: int, block: int) -> tuple[int, int]:
    return (block, timeline.blocks) if codec.per_block(name) else (begin, timeline.encoded)


class QuantizedStore:
    """See `Store`. The parts of the codec are kept in buffers of their own, wherever `new_buffer` puts them.

    lasting: what attention was handed stays as it is when later layers have theirs: layers that keep no keys read it.
    """

    fixed: ClassVar[bool] = False
    is_quantized: ClassVar[bool] = True

    def __init__(
        self,
        slot: Slot,
        codec: Codec,
        new_buffer: Callable[[], Buffer],
        lasting: bool,
    ):
        assert isinstance(slot.timeline, BlockTimeline)
        self.name, self.timeline, self.scratch, self.codec = slot.name, slot.timeline, slot.scratch, codec
        self._new_buffer, self._lasting = new_buffer, lasting
        self.parts: dict[str, _Part] = {}
        self.residual: torch.Tensor | None = None
        self._tail: torch.Tensor | None = None  # of a step that is_quantized: what stays in full of it
        self._known: tuple[tuple[int, ...], list[Segment]] | None = None  # see `_encoded`

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": None}  # a copy has buffers of its own

    @property
    def storage_format(self) -> tuple[Codec, int]:
        return self.codec, self.timeline.block

    def append(self, new: torch.Tensor) -> torch.Tensor:
        return self._read(self._add(new), self._lasting)

    def add(self, new: torch.Tensor) -> None:
        self._add(new)

    def read(self) -> torch.Tensor | None:
        if self.residual is None:
            return None
        return self._read(self.residual[:, :, : self.timeline.residual], self._lasting)

    def _add(self, new: torch.Tensor) -> torch.Tensor:
        """Returns the columns that were not encoded before the step."""
        timeline = self.timeline
        timeline.bind_batch_size(new.shape[0])
        if self.residual is None:
            self.residual = _empty(new, timeline.residual_room)
        check_alike((self.residual.shape[1], self.residual.shape[3]), self.residual.dtype, new)
        kept, encoding = timeline.residual, timeline.encoding
        if encoding == 0:
            self.residual[:, :, kept : kept + new.shape[2]] = new
            exact = self.residual[:, :, : kept + new.shape[2]]
        else:
            exact = torch.cat([self.residual[:, :, :kept], new], dim=2) if kept else new
            self._encode(exact[:, :, :encoding], timeline.encoded, timeline.blocks)
            self._tail = exact[:, :, encoding:].clone()
        return exact

    def _encode(self, columns: torch.Tensor, column: int, block: int) -> None:
        """Write whole blocks behind those there are. Nobody sees them before the timeline has settled."""
        self._known = None
        for name, part in self.codec.encode(columns).items():
            begin, room = (block, 0) if self.codec.per_block(name) else (column, self.timeline.room)
            room = max(room, begin + part.shape[2])
            if name not in self.parts or self.parts[name].buffer.shape is None:
                self._open(name, part, room)
            self.parts[name].buffer.reserve(room, keep=begin)
            self.parts[name].buffer.write(begin, part)

    def _open(self, name: str, like: torch.Tensor, room: int) -> None:
        if name not in self.parts:
            self.parts[name] = _Part(self, name, self._new_buffer())
        self.parts[name].buffer.open(like, room)

    def _read(self, exact: torch.Tensor, lasting: bool) -> torch.Tensor:
        """The columns held in full: what is encoded, decoded, then `exact`."""
        timeline = self.timeline
        begin, block = timeline.evicted
        if begin >= timeline.encoded:
            return exact[:, :, max(0, timeline.start - timeline.encoded) :]
        encoded = self._encoded(begin, block, exact)
        columns = timeline.encoded - timeline.start + exact.shape[2]
        base = (exact.shape[0], exact.shape[1], columns, exact.shape[3])
        view = SegmentedTensor(lambda: chain(encoded(), (DenseSegment(exact),)), base, exact, attend=self.codec.attend)
        return view.materialize() if lasting else view

    def _encoded(self, begin: int, block: int, like: torch.Tensor) -> Callable[[], Iterable[Segment]]:
        """The encoded columns. Segments that decode nothing are the same in every step until more is encoded."""
        timeline = self.timeline
        key = (timeline.start, timeline.encoded, len(timeline.runs))
        if self._known is not None and self._known[0] == key:
            return self._known[1].__iter__
        parts = {name: part.read(*self.span(name, begin, block)) for name, part in self.parts.items()}
        # Where they are now: the timeline moves on before the view that was handed out is read again.
        segments = self._segments_of(list(timeline.runs), begin, block, timeline.start, parts, like)
        if self.codec.attend is None or begin < timeline.start or any(self.offloaded_buffers()):
            return segments
        self._known = key, list(segments())
        return self._known[1].__iter__

    def _segments_of(
        self, runs: list[BlockRun], begin: int, block: int, start: int, parts: Parts, like: torch.Tensor
    ) -> Callable[[], Iterator[Segment]]:
        """Decodes the columns from `start` on, segment by segment. `parts` begin with the columns and blocks given."""
        size, scratch = self.timeline.block, self.scratch
        longest = min(-(-_PIECE // size) * size, -(-self.timeline.room // size) * size)
        (rows, heads, _, width), dtype, device = like.shape, like.dtype, like.device

        def place(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
            # Not as the buffers are: matrix products want the columns of a head together.
            out = scratch.scratch("decoded", (rows, heads, longest, width), dtype, device)
            codes = scratch.scratch("codes", (rows * heads * longest * -(-width // 8) * 8,), torch.uint8, device)
            return out[:, :, :columns], codes

        def segments() -> Iterator[Segment]:
            for run in runs:
                skipped = max(0, begin - run.column)
                while skipped < run.columns:  # from block to block
                    first, first_block = run.column + skipped, run.block + skipped // size - block
                    columns = min(size if first < start else longest, run.columns - skipped)
                    ranges = {
                        True: (first_block, first_block + -(-columns // size)),
                        False: (first - begin, first - begin + columns),
                    }
                    chosen = {name: _between(part, *ranges[self.codec.per_block(name)]) for name, part in parts.items()}
                    segment = self.codec.decode(chosen, partial(place, columns))
                    # A window begins inside of a block, of which the rest does no harm.
                    yield (
                        DenseSegment(segment.materialize()[:, :, start - first :].clone()) if first < start else segment
                    )
                    skipped += columns

        return segments

    def _open_parts(self) -> list[tuple[str, _Part]]:
        return [(name, part) for name, part in self.parts.items() if part.buffer.shape is not None]

    def span(self, name: str, begin: int, block: int) -> tuple[int, int]:
        """Of a part: where the columns from `begin` on are, which are in the blocks from `block` on."""
        return _span(self.timeline, self.codec, name, begin, block)

    def reserve(self, room: int) -> None:
        self._known = None
        for name, part in self._open_parts():
            if not self.codec.per_block(name):
                part.buffer.reserve(room, keep=self.timeline.encoded)

    def compact(self) -> None:
        self._known = None
        columns, blocks = self.timeline.evicted
        for name, part in self._open_parts():
            part.buffer.shift(*self.span(name, columns, blocks))
            part.has_changed()

    def commit(self, rejected: int) -> None:
        if self._tail is not None and self.residual is not None:
            kept = max(0, self._tail.shape[2] - rejected)
            self.residual[:, :, :kept] = self._tail[:, :, :kept]
        self._tail = None

    def abort(self) -> None:
        self._tail = None

    def select_rows(self, index: torch.Tensor) -> None:
        self._known = None
        changes = [part.buffer.choosing(index, self.span(name, 0, 0)[1]) for name, part in self._open_parts()]
        if self.residual is not None:
            with torch.inference_mode(False):
                self.residual = self.residual.index_select(0, index.to(self.residual.device))
        for change in changes:
            change()
        for _, part in self._open_parts():
            part.has_changed()

    def reset(self) -> None:
        self.release()

    def release(self) -> None:
        self._known = None
        for part in self.parts.values():
            part.buffer.clear()
            part.has_changed()
        self.residual = self._tail = None

    def committed(self) -> torch.Tensor | None:
        if self.residual is None or self.timeline.rows is None:
            return None
        return self._read(self.residual[:, :, : self.timeline.residual], lasting=True)

    def load_dense(self, columns: torch.Tensor) -> None:
        self.reset()
        encoded = self.timeline.encoded
        self.residual = _empty(columns, self.timeline.residual_room)
        self.residual[:, :, : columns.shape[2] - encoded] = columns[:, :, encoded:]
        if encoded:
            self._encode(columns[:, :, :encoded], 0, 0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        if self.residual is None:
            return {}
        ends = {name: self.span(name, 0, 0)[1] for name in self.parts}
        parts = {name: part.buffer.read(0, ends[name]) for name, part in self.parts.items() if ends[name]}
        return parts | {"residual": self.residual}

    def load_state_dict(self, written: dict[str, torch.Tensor]) -> None:
        self.reset()
        residual = written["residual"]
        # Another store may have kept more in full than this one does: it stays so until the next step.
        self.residual = _empty(residual, max(self.timeline.residual_room, self.timeline.residual))
        self.residual[:, :, : self.timeline.residual] = residual[:, :, : self.timeline.residual]
        for name, part in written.items():
            if name != "residual":
                self._open(name, part, part.shape[2])
                self.parts[name].buffer.write(0, part)

    def tensors(self) -> Iterator[torch.Tensor]:
        for part in self.parts.values():
            yield from part.buffer.tensors()
        if self.residual is not None:
            yield self.residual

    def offloaded_buffers(self) -> Iterator[Buffer]:
        yield from (part.buffer for part in self.parts.values() if part.buffer.tier != "device")


def _between(part: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return part if end - begin == part.shape[2] else part[:, :, begin:end]


def _empty(like: torch.Tensor, columns: int) -> torch.Tensor:
    with torch.inference_mode(False):  # else this cache could not be continued outside of inference mode
        return like.new_empty((*like.shape[:2], columns, like.shape[3]))
