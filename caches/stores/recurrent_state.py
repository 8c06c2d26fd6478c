"""Conv and recurrent state of one layer: tensors whose size does not depend on how many tokens were read.

Models read them and write them in place, so what a failed or rejected step has to put back is copied before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from caches.errors import StepError
from caches.stores.dense import chosen_rows
from caches.timeline.timeline import Timeline

CONV, RECURRENT = "conv", "recurrent"
Key = tuple[str, int]  # which of the two, and its number among those of the layer
_TAKEN_BACK_IN_PART = 64  # tokens: of longer steps the columns that a convolution read are not kept


class RecurrentState:
    """The states of one layer, each [rows, ...]. fixed: their tensors never move; they may hold more rows than used.

    A step can be taken back as a whole; in part only where all states are those of convolutions.
    """

    is_quantized: ClassVar[bool] = False
    storage_format: ClassVar[None] = None

    def __init__(self, timeline: Timeline, fixed: bool):
        self.timeline, self.fixed = timeline, fixed
        self._held: dict[Key, torch.Tensor] = {}
        self._known: frozenset[Key] = frozenset()  # those that were ever written: the others are not handed out
        self._before: dict[Key, torch.Tensor] = {}
        self._known_before: frozenset[Key] = frozenset()
        self._read: dict[Key, torch.Tensor] = {}  # what a convolution was given in the last step: its state and the new
        self._dropped = 0  # of those the columns at the end that were taken back
        self._last_step = 0  # tokens of the last step, while it can be taken back

    def get(self, key: Key) -> torch.Tensor | None:
        """The state [rows, ...], to be read and written in place; None before the first step."""
        return self._used(key) if key in self._known else None

    def append_conv(self, new: torch.Tensor, number: int, kernel_size: int | None) -> torch.Tensor:
        """Add `new` [rows, channels, columns]; returns what the convolution reads: the columns before and the new ones.

        kernel_size: columns to keep; None when `new` is the whole state to keep.
        """
        key = (CONV, number)
        size = new.shape[-1] if kernel_size is None else kernel_size
        self.timeline.bind_batch_size(new.shape[0])
        if key in self._known:
            self._check_alike(key, new[..., :0], self._used(key)[..., :0])
            read = torch.cat([self._used(key), new], dim=-1)
        else:
            read = torch.nn.functional.pad(new, (max(0, size - new.shape[-1]), 0))
        if kernel_size is not None and not self.timeline.graph and new.shape[-1] <= _TAKEN_BACK_IN_PART:
            self._read[key] = read
        self.set(key, read[..., -size:])
        return read

    def set(self, key: Key, value: torch.Tensor) -> torch.Tensor:
        """Write a state [rows, ...]; returns it where it is kept."""
        self.timeline.bind_batch_size(value.shape[0])
        rows = self.timeline.max_rows if self.fixed else None
        if key not in self._held or len(self._held[key]) < (rows or 0):  # those from before a reset may be too few
            with torch.inference_mode(False):  # else this cache could not be continued outside of inference mode
                self._held[key] = value.new_zeros((rows or value.shape[0], *value.shape[1:]))
        if key not in self._known:
            self._known |= {key}
        held = self._used(key)
        self._check_alike(key, value, held)
        return held.copy_(value)

    def _check_alike(self, key: Key, value: torch.Tensor, held: torch.Tensor) -> None:
        if held.shape != value.shape:
            raise StepError(
                f"a {key[0]} state of shape {list(value.shape)} cannot follow one of {list(held.shape)}: a cache "
                "belongs to one model"
            )

    def _used(self, key: Key) -> torch.Tensor:
        held, rows = self._held[key], self.timeline.rows
        return held if held.shape[0] == rows else held[:rows]

    def prepare(self) -> None:
        """Before `begin`, which needs no memory then."""
        for key in self._known - self._before.keys():
            with torch.inference_mode(False):
                self._before[key] = torch.empty_like(self._used(key))

    def begin(self) -> None:
        for key in self._known:
            self._before[key].copy_(self._used(key))
        self._known_before = self._known
        self._forget_last()

    def _forget_last(self) -> None:
        """The last step cannot be taken back any more."""
        self._read.clear()
        self._dropped = self._last_step = 0

    def can_reject(self, rejected: int) -> bool:
        """Whether the open step can be settled without its last `rejected` tokens."""
        return rejected in (0, self.timeline.pending) or self._only_read_columns()

    def commit(self, rejected: int) -> None:
        self._last_step = self.timeline.pending
        self.roll_back(rejected)

    def abort(self) -> None:
        self._known = self._known_before
        for key in self._known:
            self._used(key).copy_(self._before[key])
        self._forget_last()

    def can_roll_back(self, tokens: int) -> bool:
        """Whether the last `tokens` committed ones can be taken back: no more than the last step's."""
        return tokens in (0, self._last_step) or (tokens < self._last_step and self._only_read_columns())

    def roll_back(self, tokens: int) -> None:
        if tokens and tokens == self._last_step:
            self.abort()
        elif tokens:
            self._dropped += tokens
            for key, read in self._read.items():
                held, end = self._used(key), read.shape[-1] - self._dropped
                left = read[..., max(0, end - held.shape[-1]) : end]
                held[..., : held.shape[-1] - left.shape[-1]] = 0
                held[..., held.shape[-1] - left.shape[-1] :] = left
            self._last_step -= tokens

    def _only_read_columns(self) -> bool:
        return self._known <= set(self._read)

    def select_rows(self, index: torch.Tensor) -> None:
        with torch.inference_mode(False):
            before, read = chosen_rows(self._before, index), chosen_rows(self._read, index)
            held = {key: chosen_rows(self._used(key), index) for key in self._held}
        self._before, self._read = before, read
        for key, chosen in held.items():
            if self.fixed:
                self._held[key][: len(index)] = chosen
            else:
                self._held[key] = chosen

    def reset(self) -> None:
        self._known = self._known_before = frozenset()
        self._forget_last()
        self._before.clear()
        if not self.fixed:
            self._held.clear()

    def release(self) -> None:
        self.reset()
        self._held.clear()

    def dense_state(self) -> dict[str, torch.Tensor]:
        """What is committed, by names such as "conv 0"."""
        return {f"{kind} {number}": self._used((kind, number)) for kind, number in sorted(self._known)}

    def load_dense(self, content: dict[str, torch.Tensor]) -> None:
        """Hold exactly this content."""
        self.reset()
        for name, value in content.items():
            kind, number = name.split()
            self.set((kind, int(number)), value)

    def state_dict(self) -> dict[str, Any]:
        """All of it, also what it takes to go back."""
        held = {key: self._used(key) for key in self._known}
        last = {"known before": self._known_before, "dropped": self._dropped, "last step": self._last_step}
        return {"held": held, "before": dict(self._before), "read": dict(self._read)} | last

    def load_state_dict(self, written: dict[str, Any]) -> None:
        """Hold exactly this, and be able to go back as far."""
        self.reset()
        for key, value in written["held"].items():
            self.set(key, value)
        self._before, self._read = dict(written["before"]), dict(written["read"])
        self._known_before = written["known before"]
        self._dropped, self._last_step = written["dropped"], written["last step"]

    @staticmethod
    def agree(states: Sequence[RecurrentState]) -> None:
        """Before their rows are put together: where the last steps differ, none of them can be taken back any more."""
        last = [(one._last_step, one._dropped, one._known_before, *map(frozenset, (one._before, one._read)))
                for one in states]  # fmt: skip
        if len(set(last)) > 1:
            for one in states:
                one._forget_last()
                one._known_before = one._known
                one._before.clear()

    def numbered(self, kind: str) -> dict[int, torch.Tensor]:
        """The states of one kind by their number."""
        return {key[1]: self._used(key) for key in sorted(self._known) if key[0] == kind}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything it keeps, rows first: copies for taking back included."""
        for kept in (self._held, self._before, self._read):
            yield from kept.values()
