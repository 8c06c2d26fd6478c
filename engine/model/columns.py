"""`Columns`: the mask and the position ids of a run, computed once; each step reads views of them."""

from __future__ import annotations

import copy

import torch

from caches.platform.torch_api import always_writable

_LEAST = 256  # spare columns behind the prompt at first


class Columns:
    """The mask and the position ids of all columns of a run.

    A column is an index along the sequence axis of the padded batch. mask: [rows, prompt columns], 0 for padding.
    total: columns at the end of the run, at most. positions: [..., prompt columns] of the caller; None counts tokens
    from 0, without padding.

    room: columns that are allocated.
    """

    def __init__(self, mask: torch.Tensor, total: int, positions: torch.Tensor | None = None):
        rows, self.prompt = mask.shape
        self.total, self.device = total, mask.device
        # Without padding no mask is needed: attention kernels apply the causal mask themselves, and faster. With given
        # positions it is kept: transformers takes gaps in positions without a mask for packed sequences.
        self._mask = mask if positions is not None or not bool(mask.all()) else None
        self.left_padding = (
            torch.zeros(rows, dtype=torch.long, device="cpu") if self._mask is None else (mask == 0).int().argmin(dim=1)
        )
        """The number of padding columns at the beginning of each row, [rows]."""
        self.first_full = int(self.left_padding.max())
        """The first column in which no row has padding."""
        self._step_masks: dict[torch.dtype, torch.Tensor] = {}  # [rows, 1, 1, columns], by data type
        self.are_given = positions is not None
        """Whether the positions are the caller's."""
        if positions is None:
            self._following = mask.sum(dim=1, keepdim=True)
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        else:
            self._following = positions[..., -1:] + 1  # the position of the first new token, [..., 1]
        self._positions, self.room = positions, self.prompt
        self._widen(room_for(self.prompt, total))

    @property
    def rows(self) -> int:
        return len(self.left_padding)

    @property
    def has_mask(self) -> bool:
        """Whether there is padding, or the positions are the caller's."""
        return self._mask is not None

    @property
    def are_plain(self) -> bool:
        """Whether there is no padding, and the positions count the tokens."""
        return self._mask is None and not self.are_given

    def reserve(self, columns: int) -> None:
        """Allocate at least `columns` columns. Other methods do this as needed. Raises without changing anything."""
        if columns > self.room:
            self._widen(room_for(columns, self.total, self.room))

    def _widen(self, room: int) -> None:
        offset, like = self.room - self.prompt, self._positions
        steps = torch.arange(offset, room - self.prompt, device=like.device, dtype=like.dtype)
        positions = torch.cat([like, self._following + steps], dim=-1)
        self._mask = None if self._mask is None else widened(self._mask, room, 1)
        self._positions, self._step_masks, self.room = positions, {}, room

    def mask(self, columns: int) -> torch.Tensor | None:
        """The 2D mask of the first columns, [rows, columns]; None without padding."""
        self.reserve(columns)
        return None if self._mask is None else self._mask[:, :columns]

    def step_mask(self, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """The mask of one new token over columns [begin, end): [rows, 1, 1, end - begin], a view.

        dtype: bool (True: visible), or the data type of the scores that it is added to.
        """
        self.reserve(end)
        assert self._mask is not None
        if dtype not in self._step_masks:
            visible = (self._mask != 0)[:, None, None]
            self._step_masks[dtype] = visible if dtype == torch.bool else additive(visible, dtype)
        return self._step_masks[dtype][..., begin:end]

    def positions(self, begin: int, end: int) -> torch.Tensor:
        """Position ids [..., end - begin]."""
        self.reserve(end)
        return self._positions[..., begin:end]

    def own_positions(self, columns: int) -> torch.Tensor | None:
        """The caller's position ids [..., rows, columns] of the first columns; None if they count the tokens."""
        self.reserve(columns)
        return self._positions[..., :columns] if self.are_given else None

    def of_rows(self, index: torch.Tensor) -> Columns:
        """A copy with row `index[i]` as row i."""
        selected = copy.copy(self)
        selected.left_padding = self.left_padding[index.to(self.left_padding.device)]
        selected._mask = None if self._mask is None else self._mask[index]
        selected._step_masks = {}
        rows_axis = self._positions.ndim - 2  # [rows, columns], or [kinds, rows, columns] for multimodal positions
        selected._positions = self._positions.index_select(rows_axis, index)
        selected._following = self._following.index_select(rows_axis, index)
        return selected


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bool mask as it is added to scores of this data type."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


def room_for(columns: int, max_columns: int, allocated: int = 0) -> int:
    """The columns to allocate so that `columns` fit: 1.5 times the `allocated` ones, and at most `max_columns`.

    allocated: 0 for a new tensor with a prompt of `columns`.
    """
    if allocated == 0:
        return min(max_columns, columns + _LEAST)
    return allocated if columns <= allocated else min(max_columns, max(columns, allocated + allocated // 2))


def widened(tensor: torch.Tensor, columns: int, fill: int | torch.Tensor = 0) -> torch.Tensor:
    """`tensor` [..., n] with `columns` columns; new ones are `fill`, a number or a tensor [...]."""
    first_new = tensor.shape[-1]
    with always_writable():
        wide = tensor.new_empty((*tensor.shape[:-1], columns))
    wide[..., :first_new] = tensor
    wide[..., first_new:] = fill if isinstance(fill, int) else fill[..., None]
    return wide
