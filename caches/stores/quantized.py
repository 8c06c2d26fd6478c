"""A store that quantizes older tokens in blocks, each once; the most recent tokens stay in full precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch

from caches.attention.kv_view import KeyValueView
from caches.attention.segments import CacheRows, DenseSegment, Segment
from caches.memory.buffers import Buffer
from caches.platform.torch_api import always_writable
from caches.quantization.codec import Codec, Parts
from caches.stores.slot import Slot
from caches.stores.store import check_alike
from caches.timeline.block_timeline import BlockRun, BlockTimeline

_SEGMENT = 4096  # slots that are decoded at a time: scratch does not grow with the context


class _Part:
    """One of the codec's parts ("codes", "scale", "offset") for all blocks of a store; a `PrefetchReader`."""

    def __init__(self, store: QuantizedStore, name: str, buffer: Buffer):
        self.name, self.buffer = f"{store.name} {name}", buffer
        # No reference to the store: a cycle would keep their memory until a garbage collection.
        self._timeline, self._scratch, self._codec, self._part = store.timeline, store.scratch, store.codec, name

    def wanted(self) -> tuple[int, int, int]:
        """See `PrefetchReader`."""
        timeline = self._timeline
        begin, end = _span(timeline, self._codec, self._part, *timeline.evicted)
        return begin, end, max(end, _room(timeline, self._codec, self._part, timeline.room))

    def read(self, begin: int, end: int) -> torch.Tensor:
        if self.buffer.tier == "device" or begin == end:
            return self.buffer.read(begin, end)
        room = self.wanted()[2]
        return self._scratch.prefetcher.take(self, begin, end, room - begin)[:, :, : end - begin]

    def has_changed(self) -> None:
        """The content was changed other than by appending."""
        self._scratch.prefetcher.discard(self)


def _span(timeline: BlockTimeline, codec: Codec, name: str, begin: int, block: int) -> tuple[int, int]:
    return (block, timeline.blocks) if codec.per_block(name) else (begin, timeline.encoded)


def _room(timeline: BlockTimeline, codec: Codec, name: str, slots: int) -> int:
    """Of a part's buffer, where the timeline has room for so many slots."""
    return slots // timeline.block if codec.per_block(name) else slots


class QuantizedStore:
    """A `Store` with a buffer per part of the codec and a tensor for the residual.

    new_buffer: makes the buffers, in any tier of memory. lasting: results stay valid when later layers read: needed if
    layers share the keys of an earlier one.
    """

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
        self._next_residual: torch.Tensor | None = None  # the residual after a step that quantizes
        self._segments: tuple[tuple[int, ...], list[Segment]] | None = None  # key and segments, see `_decoded`

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_segments": None}  # a copy has buffers of its own

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

    def _add(self, added: torch.Tensor) -> torch.Tensor:
        """Add `added`; returns the unquantized tokens: the residual before the step, then `added`."""
        timeline = self.timeline
        timeline.bind_batch_size(added.shape[0])
        if self.residual is None:
            self.residual = _empty(added, timeline.residual_room)
        check_alike((self.residual.shape[1], self.residual.shape[3]), self.residual.dtype, added)
        residual_tokens, encoding = timeline.residual, timeline.encoding
        if encoding == 0:
            self.residual[:, :, residual_tokens : residual_tokens + added.shape[2]] = added
            exact = self.residual[:, :, : residual_tokens + added.shape[2]]
        else:
            exact = torch.cat([self.residual[:, :, :residual_tokens], added], dim=2) if residual_tokens else added
            self._encode(exact[:, :, :encoding], timeline.encoded, timeline.blocks)
            self._next_residual = exact[:, :, encoding:].clone()
        return exact

    def _encode(self, dense: torch.Tensor, slot: int, block: int) -> None:
        """Append whole blocks, from `slot` and `block` on. They are read once the timeline has committed them."""
        self._segments = None
        if self.timeline.evicted[0] >= self.timeline.encoded:  # nothing is read: see `OffloadedStore._write`
            for reader in self.parts.values():
                reader.has_changed()
        for name, tensor in self.codec.encode(dense).items():
            begin = block if self.codec.per_block(name) else slot
            room = max(_room(self.timeline, self.codec, name, self.timeline.room), begin + tensor.shape[2])
            if name not in self.parts or self.parts[name].buffer.shape is None:
                self._open(name, tensor, room)
            self.parts[name].buffer.reserve(room, keep=begin)
            self.parts[name].buffer.write(begin, tensor)

    def _open(self, name: str, like: torch.Tensor, room: int) -> None:
        if name not in self.parts:
            self.parts[name] = _Part(self, name, self._new_buffer())
        self.parts[name].buffer.open(like, room)

    def _read(self, exact: torch.Tensor, lasting: bool) -> torch.Tensor:
        """The kept tokens: the blocks, decoded, then `exact`."""
        timeline = self.timeline
        begin, block = timeline.evicted
        if begin >= timeline.encoded:
            return exact[:, :, max(0, timeline.start - timeline.encoded) :]
        in_codes = self.codec.has_kernel(exact)
        decoded = self._decoded(begin, block, exact, in_codes)
        slots = timeline.encoded - timeline.start + exact.shape[2]
        shape = (exact.shape[0], exact.shape[1], slots, exact.shape[3])
        segments = lambda: chain(decoded(), (DenseSegment(exact),))  # noqa: E731
        view = KeyValueView([CacheRows(shape, make_segments=segments, in_codes=in_codes)], exact)
        return view.materialize() if lasting else view

    def _decoded(self, begin: int, block: int, like: torch.Tensor, in_codes: bool) -> Callable[[], Iterable[Segment]]:
        """Makes segments of the blocks. If kernels read the codes, segments are reused until the blocks change."""
        timeline = self.timeline
        key = (timeline.start, timeline.encoded, len(timeline.runs))
        if self._segments is not None and self._segments[0] == key:
            return self._segments[1].__iter__
        coded = {name: reader.read(*self.span(name, begin, block)) for name, reader in self.parts.items()}
        # Fixed now: the timeline may change before the returned function is called.
        segments = self._segments_of(list(timeline.runs), begin, block, timeline.start, coded, like, in_codes)
        if not in_codes or begin < timeline.start or any(self.offloaded_buffers()):
            return segments
        self._segments = key, list(segments())
        return self._segments[1].__iter__

    def _segments_of(
        self,
        runs: list[BlockRun],
        begin: int,
        block: int,
        start: int,
        coded: Parts,
        like: torch.Tensor,
        in_codes: bool,
    ) -> Callable[[], Iterator[Segment]]:
        """Decodes slots from `start` on, segment by segment. begin, block: the first slot and block in `coded`."""
        size, scratch = self.timeline.block, self.scratch
        longest = min(-(-_SEGMENT // size) * size, -(-self.timeline.room // size) * size)
        (rows, heads, _, width), dtype, device = like.shape, like.dtype, like.device

        def new_scratch(slots: int) -> tuple[torch.Tensor, torch.Tensor]:
            # Heads outermost, unlike in buffers: matrix products need the slots of a head to be contiguous.
            out = scratch.scratch("decoded", (rows, heads, longest, width), dtype, device)
            codes = scratch.scratch("codes", (rows * heads * longest * -(-width // 8) * 8,), torch.uint8, device)
            return out[:, :, :slots], codes

        def segments() -> Iterator[Segment]:
            for run in runs:
                skipped = max(0, begin - run.first_slot)
                while skipped < run.slots:  # a multiple of the block
                    slot, first_block = run.first_slot + skipped, run.block + skipped // size - block
                    slots = min(size if slot < start else longest, run.slots - skipped)
                    ranges = {
                        True: (first_block, first_block + -(-slots // size)),
                        False: (slot - begin, slot - begin + slots),
                    }
                    chosen = {name: _between(data, *ranges[self.codec.per_block(name)]) for name, data in coded.items()}
                    segment = self.codec.decode(chosen, partial(new_scratch, slots), in_codes)
                    # If the window begins inside a block, the slots before it are cut off.
                    yield (
                        DenseSegment(segment.materialize()[:, :, start - slot :].clone()) if slot < start else segment
                    )
                    skipped += slots

        return segments

    def _open_parts(self) -> list[tuple[str, _Part]]:
        return [(name, reader) for name, reader in self.parts.items() if reader.buffer.shape is not None]

    def span(self, name: str, begin: int, block: int) -> tuple[int, int]:
        """(begin, end) in a part's buffer of the slots from `begin` on, which are in blocks from `block` on."""
        return _span(self.timeline, self.codec, name, begin, block)

    def reserve(self, room: int) -> None:
        self._segments = None
        for name, reader in self._open_parts():
            slots = _room(self.timeline, self.codec, name, room)
            reader.buffer.reserve(slots, keep=self.span(name, 0, 0)[1])

    def compact(self) -> None:
        self._segments = None
        slots, blocks = self.timeline.evicted
        for name, reader in self._open_parts():
            reader.buffer.shift(*self.span(name, slots, blocks))
            reader.has_changed()

    def commit(self, rejected: int) -> None:
        if self._next_residual is not None and self.residual is not None:
            residual_tokens = max(0, self._next_residual.shape[2] - rejected)
            self.residual[:, :, :residual_tokens] = self._next_residual[:, :, :residual_tokens]
        self._next_residual = None

    def abort(self) -> None:
        self._next_residual = None

    def select_rows(self, index: torch.Tensor) -> None:
        self._segments = None
        readers = self._open_parts()
        changes = [reader.buffer.prepare_select_rows(index, self.span(name, 0, 0)[1]) for name, reader in readers]
        if self.residual is not None:
            with always_writable():
                self.residual = self.residual.index_select(0, index.to(self.residual.device))
        for change in changes:
            change()
        for _, reader in self._open_parts():
            reader.has_changed()

    def reset(self) -> None:
        self.release()

    def release(self) -> None:
        self._segments = None
        for reader in self.parts.values():
            reader.buffer.clear()
            reader.has_changed()
        self.residual = self._next_residual = None

    def committed(self) -> torch.Tensor | None:
        if self.residual is None or self.timeline.rows is None:
            return None
        return self._read(self.residual[:, :, : self.timeline.residual], lasting=True)

    def load_dense(self, dense: torch.Tensor) -> None:
        self.reset()
        encoded = self.timeline.encoded
        self.residual = _empty(dense, self.timeline.residual_room)
        self.residual[:, :, : dense.shape[2] - encoded] = dense[:, :, encoded:]
        if encoded:
            self._encode(dense[:, :, :encoded], 0, 0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        if self.residual is None:
            return {}
        ends = {name: self.span(name, 0, 0)[1] for name in self.parts}
        coded = {name: reader.buffer.read(0, ends[name]) for name, reader in self.parts.items() if ends[name]}
        return coded | {"residual": self.residual[:, :, : self.timeline.residual]}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.reset()
        residual = state["residual"]
        # The other store's residual may be longer than this store's: the next step quantizes the difference.
        self.residual = _empty(residual, max(self.timeline.residual_room, self.timeline.residual))
        self.residual[:, :, : self.timeline.residual] = residual[:, :, : self.timeline.residual]
        for name, tensor in state.items():
            if name != "residual":
                self._open(name, tensor, tensor.shape[2])
                self.parts[name].buffer.write(0, tensor)

    def tensors(self) -> Iterator[torch.Tensor]:
        for reader in self.parts.values():
            yield from reader.buffer.tensors()
        yield from (tensor for tensor in (self.residual, self._next_residual) if tensor is not None)

    def offloaded_buffers(self) -> Iterator[Buffer]:
        yield from (reader.buffer for reader in self.parts.values() if reader.buffer.tier != "device")


def _between(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return tensor if end - begin == tensor.shape[2] else tensor[:, :, begin:end]


def _empty(like: torch.Tensor, slots: int) -> torch.Tensor:
    with always_writable():  # or the cache could not be used outside of inference mode later
        return like.new_empty((*like.shape[:2], slots, like.shape[3]))
