"""How room is made for one stream of one layer: a tensor [rows, heads, columns, head_dim].

A `Timeline` says where columns go; a store knows neither what they mean nor why some are forgotten. `GrowingStore`
gets a larger buffer when it has to, `FixedStore` never changes its address. Both write in place and hand out views: no
step copies the history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch

from caches.errors import StepError
from caches.memory.buffers import Buffer
from caches.timeline.timeline import Timeline


class Store(Protocol):
    """One stream of one layer."""

    @property
    def timeline(self) -> Timeline:
        """Which slots are in use."""

    @property
    def fixed(self) -> bool:
        """Whether its tensors never move."""

    @property
    def is_quantized(self) -> bool:
        """Whether they hold fewer bits than come in."""

    @property
    def storage_format(self) -> object:
        """How: what one store has written down can be held by another that says the same. None: in full."""

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Inside the forward: add `new` [rows, heads, pending, head_dim]; returns what attention reads."""

    def add(self, new: torch.Tensor) -> None:
        """`append` where the result is not read."""

    def read(self) -> torch.Tensor | None:
        """Inside a forward that adds nothing here: what attention reads of the columns held; None where there are none.

        Where they live elsewhere it lasts until the next store reads.
        """

    def reserve(self, room: int) -> None:
        """Before a step: have room for `room` columns; what is there keeps its place."""

    def compact(self) -> None:
        """Before a step: move the held columns to the front. Must not fail."""

    def commit(self, rejected: int) -> None:
        """After a step, before the timeline settles: its last `rejected` columns are rejected."""

    def abort(self) -> None:
        """After a failed step, before the timeline closes: forget the pending columns."""

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes a copy of row `index[i]`. When this raises, nothing has changed."""

    def reset(self) -> None:
        """Forget everything."""

    def release(self) -> None:
        """Forget everything and keep no memory, also where a reset keeps it."""

    def committed(self) -> torch.Tensor | None:
        """The columns held, [rows, heads, held, head_dim]; None before the first step."""

    def load_dense(self, columns: torch.Tensor) -> None:
        """Hold exactly these columns [rows, heads, held, head_dim]. The timeline has been told of them."""

    def state_dict(self) -> dict[str, Any]:
        """The columns held as they are written down, rows first: for a store of the same kind."""

    def load_state_dict(self, written: dict[str, Any]) -> None:
        """Hold exactly this. The timeline has been told of it."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything it keeps."""

    def offloaded_buffers(self) -> Iterator[Buffer]:
        """Where what of it is that does not live where layers compute."""


def check_alike(heads_and_width: tuple[int, int], dtype: torch.dtype, new: torch.Tensor) -> None:
    """Raise `StepError` unless `new` [rows, heads, columns, width] can follow what a store holds."""
    heads, width = heads_and_width
    if (new.shape[1], new.shape[3]) != (heads, width) or new.dtype != dtype:
        raise StepError(
            f"the layer holds {heads} heads of {width} numbers in {dtype}, but the step has {new.shape[1]} heads of "
            f"{new.shape[3]} in {new.dtype}: a cache belongs to one model"
        )


def chosen_rows(written: Any, index: torch.Tensor) -> Any:
    """What was written down, tensors and dicts of them, of these rows."""
    if isinstance(written, dict):
        return {name: chosen_rows(part, index) for name, part in written.items()}
    return written.index_select(0, index.to(written.device)) if _has_rows(written) else written


def joined_rows(written: Sequence[Any]) -> Any:
    """What was written down of several caches, which hold the same tokens, as that of one: the rows of all of them."""
    first = written[0]
    if isinstance(first, dict):
        return {name: joined_rows([one[name] for one in written]) for name in first}
    return torch.cat(list(written)) if _has_rows(first) else first


def _has_rows(value: Any) -> bool:
    # `torch.tensor([])` stands for nothing yet. What has rows but no columns, [rows, 0, width], follows its rows.
    return isinstance(value, torch.Tensor) and (value.ndim > 1 or (value.ndim == 1 and value.numel() > 0))


class GrowingStore:
    """Room is made as columns come (geometrically: the timeline decides) and written in place."""

    fixed: ClassVar[bool] = False
    is_quantized: ClassVar[bool] = False
    storage_format: ClassVar[None] = None

    def __init__(self, timeline: Timeline):
        self.timeline = timeline
        self.buffer: torch.Tensor | None = None
        self.overflow: torch.Tensor | None = None

    def append(self, new: torch.Tensor) -> torch.Tensor:
        self.timeline.bind_batch_size(new.shape[0])
        if self.buffer is None or self._is_too_small(self.buffer):
            self.buffer = self._allocate(new, self.timeline.room)
        buffer = self._used(self.buffer)
        check_alike((buffer.shape[1], buffer.shape[3]), buffer.dtype, new)
        if self.timeline.overflow:
            self.overflow = torch.cat([buffer[:, :, self.timeline.start : self.timeline.end], new], dim=-2)
            return self.overflow
        self._write(buffer, new)
        return self._visible(buffer)

    def add(self, new: torch.Tensor) -> None:
        self.append(new)

    def read(self) -> torch.Tensor | None:
        return self.committed()

    def _allocate(self, like: torch.Tensor, columns: int) -> torch.Tensor:
        with torch.inference_mode(False):  # else this cache could not be continued outside of inference mode
            return like.new_empty((*like.shape[:-2], columns, like.shape[-1]))

    def _is_too_small(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer from before a reset has no room for the rows that there can be."""
        return False

    def _used(self, buffer: torch.Tensor) -> torch.Tensor:
        """The rows of the buffer that are in use."""
        return buffer

    def _write(self, buffer: torch.Tensor, new: torch.Tensor) -> None:
        end = self.timeline.end
        buffer[:, :, end : end + new.shape[-2]] = new

    def _visible(self, buffer: torch.Tensor) -> torch.Tensor:
        timeline = self.timeline
        return buffer[:, :, timeline.start : timeline.end + timeline.pending]

    def reserve(self, room: int) -> None:
        if self.buffer is None or self.buffer.shape[-2] >= room:
            return
        larger = self._allocate(self.buffer, room)
        larger[:, :, : self.timeline.end] = self.buffer[:, :, : self.timeline.end]
        self.buffer = larger

    def compact(self) -> None:
        if self.buffer is None:
            return
        start, end = self.timeline.start, self.timeline.end
        # In segments no longer than the distance they move: source and target never overlap, nothing is allocated.
        for begin in range(start, end, start or 1):
            segment = self.buffer[:, :, begin : min(begin + start, end)]
            self.buffer[:, :, begin - start : begin - start + segment.shape[-2]] = segment

    def commit(self, rejected: int) -> None:
        if self.overflow is None or self.buffer is None:
            return
        committed, surviving = self.overflow.shape[-2] - rejected, self.timeline.surviving(rejected)
        self._used(self.buffer)[:, :, :surviving] = self.overflow[:, :, committed - surviving : committed]
        self.overflow = None

    def abort(self) -> None:
        self.overflow = None

    def select_rows(self, index: torch.Tensor) -> None:
        if self.buffer is None:
            return
        index, buffer, end = index.to(self.buffer.device), self.buffer, self.timeline.end
        with torch.inference_mode(False):
            if buffer.requires_grad:  # such a tensor cannot be written where we want it
                self.buffer = buffer.index_select(0, index)
                return
            chosen = buffer.new_empty((len(index), *buffer.shape[1:]))
            torch.index_select(buffer[:, :, :end], 0, index, out=chosen[:, :, :end])
            self.buffer = chosen

    def reset(self) -> None:
        self.release()

    def release(self) -> None:
        self.buffer = self.overflow = None

    def committed(self) -> torch.Tensor | None:
        timeline = self.timeline
        if self.buffer is None or timeline.rows is None:
            return None
        return self._used(self.buffer)[:, :, timeline.start : timeline.end]

    def load_dense(self, columns: torch.Tensor) -> None:
        self.buffer = self._allocate(columns, self.timeline.room)
        self._used(self.buffer)[:, :, : columns.shape[-2]] = columns

    def state_dict(self) -> dict[str, torch.Tensor]:
        columns = self.committed()
        return {} if columns is None else {"columns": columns}

    def load_state_dict(self, written: dict[str, torch.Tensor]) -> None:
        self.load_dense(written["columns"])

    def tensors(self) -> Iterator[torch.Tensor]:
        if self.buffer is not None:
            yield self.buffer

    def offloaded_buffers(self) -> Iterator[Buffer]:
        return iter(())


class FixedStore(GrowingStore):
    """Room is made once. The buffer keeps its address whatever happens, as compiled graphs and CUDA graphs need it.

    It starts as zeros: a compiled step reads masked columns too, and a masked NaN would still be a NaN. It may have
    room for more rows than are used.
    """

    fixed: ClassVar[bool] = True

    def _allocate(self, like: torch.Tensor, columns: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return like.new_zeros((self.timeline.max_rows or like.shape[0], like.shape[1], columns, like.shape[-1]))

    def _is_too_small(self, buffer: torch.Tensor) -> bool:
        return len(buffer) < (self.timeline.max_rows or 0)

    def _used(self, buffer: torch.Tensor) -> torch.Tensor:
        rows = self.timeline.rows
        return buffer if buffer.shape[0] == rows else buffer[:rows]

    def _write(self, buffer: torch.Tensor, new: torch.Tensor) -> None:
        buffer.index_copy_(2, self.timeline.write_index(buffer.device), new)

    def _visible(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if self.timeline.graph else super()._visible(buffer)

    def committed(self) -> torch.Tensor | None:
        # Models that look for themselves get the same columns in every compiled step.
        return self._used(self.buffer) if self.timeline.graph and self.buffer is not None else super().committed()

    def abort(self) -> None:
        super().abort()
        if self.buffer is not None:
            timeline = self.timeline
            self.buffer[:, :, timeline.end : timeline.end + timeline.pending] = 0

    def select_rows(self, index: torch.Tensor) -> None:
        if self.buffer is not None:
            chosen = self._used(self.buffer)[:, :, : self.timeline.end].index_select(0, index.to(self.buffer.device))
            self.buffer[: len(index), :, : self.timeline.end] = chosen

    def reset(self) -> None:
        self.overflow = None
        if self.buffer is not None:
            self.buffer.zero_()
