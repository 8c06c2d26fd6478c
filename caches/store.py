"""How room is made for one stream of one layer: a tensor [rows, heads, columns, head_dim].

A `Timeline` says where columns go; a store knows neither what they mean nor why some are forgotten. `GrowingStore`
gets a larger buffer when it has to, `FixedStore` never changes its address. Both write in place and hand out views: no
step copies the history.
"""

from __future__ import annotations

import torch

from caches.timeline import Timeline


class GrowingStore:
    """Room is made as columns come (geometrically: the timeline decides) and written in place."""

    def __init__(self, timeline: Timeline):
        self.timeline = timeline
        self.buffer: torch.Tensor | None = None
        self.overflow: torch.Tensor | None = None

    # Inside the model's forward.

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Add `new` [rows, heads, pending, head_dim]; returns what attention reads: held and new columns."""
        if self.buffer is None:
            self.buffer = self._allocate(new, self.timeline.room)
        if self.timeline.overflow:
            self.overflow = torch.cat([self.committed(), new], dim=-2)
            return self.overflow
        self._write(self.buffer, new)
        return self._visible(self.buffer)

    def _allocate(self, like: torch.Tensor, columns: int) -> torch.Tensor:
        return like.new_empty((*like.shape[:-2], columns, like.shape[-1]))

    def _write(self, buffer: torch.Tensor, new: torch.Tensor) -> None:
        end = self.timeline.end
        buffer[:, :, end : end + new.shape[-2]] = new

    def _visible(self, buffer: torch.Tensor) -> torch.Tensor:
        timeline = self.timeline
        return buffer[:, :, timeline.start : timeline.end + timeline.pending]

    # Between two steps.

    def reserve(self, columns: int) -> None:
        """Have room for `columns`; what is there keeps its place. Does nothing when there is room or no buffer yet."""
        if self.buffer is None or self.buffer.shape[-2] >= columns:
            return
        larger = self._allocate(self.buffer, columns)
        larger[:, :, : self.timeline.end] = self.buffer[:, :, : self.timeline.end]
        self.buffer = larger

    def compact(self) -> None:
        """Move the held columns to the front. Allocates nothing, so it cannot fail."""
        if self.buffer is None:
            return
        start, end = self.timeline.start, self.timeline.end
        # In pieces no longer than the distance they move: source and target never overlap.
        for begin in range(start, end, start or 1):
            piece = self.buffer[:, :, begin : min(begin + start, end)]
            self.buffer[:, :, begin - start : begin - start + piece.shape[-2]] = piece

    def settle_overflow(self, committed: int, surviving: int) -> None:
        """Keep the last `surviving` columns of the first `committed` ones that the step's concatenation has."""
        if self.buffer is not None and self.overflow is not None:
            self.buffer[:, :, :surviving] = self.overflow[:, :, committed - surviving : committed]
        self.overflow = None

    def abort(self) -> None:
        """Forget the pending columns."""
        self.overflow = None

    def rows(self, index: torch.Tensor) -> None:
        """Row i becomes a copy of row `index[i]`; the number of rows may change."""
        if self.buffer is not None:
            self.buffer = self.buffer.index_select(0, index.to(self.buffer.device))

    def reset(self) -> None:
        self.buffer = self.overflow = None

    def committed(self) -> torch.Tensor:
        """A view of the columns held, [rows, heads, held, head_dim]."""
        assert self.buffer is not None
        return self.buffer[:, :, self.timeline.start : self.timeline.end]

    @property
    def bytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.nbytes


class FixedStore(GrowingStore):
    """Room is made once. The buffer keeps its address whatever happens, as compiled graphs and CUDA graphs need it.

    It starts as zeros: a compiled step reads masked columns too, and a masked NaN would still be a NaN.
    """

    def _allocate(self, like: torch.Tensor, columns: int) -> torch.Tensor:
        return like.new_zeros((*like.shape[:-2], columns, like.shape[-1]))

    def _write(self, buffer: torch.Tensor, new: torch.Tensor) -> None:
        buffer.index_copy_(2, self.timeline.write_index(buffer.device), new)

    def _visible(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if self.timeline.graph else super()._visible(buffer)

    def abort(self) -> None:
        super().abort()
        if self.buffer is not None:
            timeline = self.timeline
            self.buffer[:, :, timeline.end : timeline.end + timeline.pending] = 0

    def rows(self, index: torch.Tensor) -> None:
        """As in `GrowingStore`, but the number of rows stays: a buffer that keeps its address keeps its shape."""
        if self.buffer is None:
            return
        end = self.timeline.end
        self.buffer[:, :, :end] = self.buffer[:, :, :end].index_select(0, index.to(self.buffer.device))

    def reset(self) -> None:
        self.overflow = None
        if self.buffer is not None:
            self.buffer.zero_()
