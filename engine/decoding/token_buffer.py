"""`Tokens`: the token ids of a run, on the model's device and on the host, which finds ended rows.

On an accelerator the host reads one step late, so that the device never waits, and discards what came after the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from caches import TokenLog
from caches.platform.device_state import ASYNCHRONOUS, reads_late
from caches.platform.torch_api import always_writable
from engine.model.columns import room_for, widened

Sent: TypeAlias = "tuple[torch.Tensor, torch.Event | None]"
"""A tensor that is copied to the host, and the event of its arrival."""


class Tokens:
    """ids, mask: [rows, columns], the prompt first; mask is 0 at padding. columns: the most there can be."""

    def __init__(self, prompt: torch.Tensor, mask: torch.Tensor, columns: int, pad_id: int):
        self.prompt = prompt.shape[1]
        self.written = self.read = self.prompt
        self._pad_id, self._most = pad_id, columns
        room = room_for(self.prompt, columns)
        self._ids, self._mask = widened(prompt, room, pad_id), widened(mask.to(prompt.dtype), room, 1)
        self._ended: torch.Tensor | None = None  # bool [rows] once a row has ended
        self.late = reads_late(prompt.device)
        self._copies: list[Sent] = []  # copies of the unread columns to the host

    @property
    def ids(self) -> torch.Tensor:
        """All columns written, [rows, written]."""
        return self._ids[:, : self.written]

    @property
    def unread(self) -> int:
        return self.written - self.read

    def has_room(self, columns: int) -> bool:
        """Whether `reserve` has nothing to do."""
        return self.written + columns <= self._ids.shape[1]

    def reserve(self, columns: int) -> None:
        """Have room for so many more columns. When this raises, nothing has changed."""
        if self.has_room(columns):
            return
        room = room_for(min(self.written + columns, self._most), self._most, self._ids.shape[1])
        if room > self._ids.shape[1]:
            real = 1 if self._ended is None else (~self._ended).to(self._mask.dtype)
            ids, mask = widened(self._ids, room, self._pad_id), widened(self._mask, room, real)
            self._ids, self._mask = ids, mask

    def write(self, tokens: torch.Tensor) -> None:
        """Append a column [rows]. Rows known to have ended get the pad id."""
        self.reserve(1)
        column = self._ids[:, self.written]
        column.copy_(tokens if self._ended is None else tokens.masked_fill(self._ended, self._pad_id))
        self.written += 1
        self._copies.append(self.send(column))

    def send(self, tensor: torch.Tensor) -> Sent:
        """To the host. Read at once, it needs no copy of its own."""
        return _copy_to_host(tensor) if self.late else (tensor, None)

    def write_rows(self, tokens: torch.Tensor, lengths: list[int]) -> None:
        """Append `tokens` [rows, n], of which row i ends after `lengths[i]`. Nothing comes after them."""
        self.reserve(tokens.shape[1])
        end = self.written + tokens.shape[1]
        ended = torch.arange(tokens.shape[1], device="cpu") >= torch.tensor(lengths, device="cpu")[:, None]
        ended = ended.to(self._ids.device)
        self._ids[:, self.written : end] = tokens.masked_fill(ended, self._pad_id)
        self._mask[:, self.written : end] = ~ended
        self.read = self.written = end

    def next(self) -> list[int]:
        """The first unread column on the host, waiting for it if it has not arrived."""
        self.read += 1
        return arrived(self._copies.pop(0))

    def end_row(self, row: int) -> None:
        """The row ends with the column read last: what comes after it is padding."""
        if self._ended is None:
            with always_writable():
                self._ended = torch.zeros(len(self._ids), dtype=torch.bool, device=self._ids.device)
        self._ended[row] = True
        self._ids[row, self.read :] = self._pad_id
        self._mask[row, self.read :] = 0

    def discard_unread(self) -> None:
        self.written = self.read
        self._copies.clear()

    def row_selection(self, index: torch.Tensor) -> Callable[[], None]:
        """A function that makes row i row `index[i]` and cannot fail. All columns have to be read before."""
        index = index.to(self._ids.device)
        with always_writable():
            ids, mask = self._ids[index], self._mask[index]
            ended = None if self._ended is None else self._ended[index]

        def select() -> None:
            self._ids, self._mask, self._ended = ids, mask, ended

        return select

    def new(self) -> list[list[int]]:
        """The tokens of every row after the prompt, without the padding after its end."""
        tokens, mask = (buffer[:, self.prompt : self.written].tolist() for buffer in (self._ids, self._mask))
        return [[token for token, real in zip(*row, strict=True) if real] for row in zip(tokens, mask, strict=True)]

    def log(self) -> TokenLog:
        return TokenLog(self.ids, self._mask[:, : self.written])


def arrived(sent: Sent) -> list[Any]:
    """What was sent, waiting for it if it has not arrived."""
    tensor, event = sent
    if event is not None:
        event.synchronize()
    return tensor.tolist()


def _copy_to_host(column: torch.Tensor) -> Sent:
    if column.device.type not in ASYNCHRONOUS:
        return column.clone(), None
    copy = torch.empty(column.shape, dtype=column.dtype, device="cpu", pin_memory=True)
    copy.copy_(column, non_blocking=True)
    event = torch.Event(column.device)
    event.record()
    return copy, event
