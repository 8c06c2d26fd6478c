"""Conv and recurrent states of one layer (Mamba, linear attention): their size does not depend on the text.

Models write states in place, so a step begins with a copy, from which an abort or a rollback restores them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from caches.errors import StepError
from caches.platform.torch_api import always_writable
from caches.stores.store import chosen_rows
from caches.timeline.timeline import Timeline

CONV, RECURRENT = "conv", "recurrent"
Key = tuple[str, int]  # the kind, and its number within the layer
_PARTIAL_ROLLBACK = 64  # tokens: the inputs of a convolution are kept for steps up to this length


class RecurrentState:
    """The states of one layer, each [rows, ...].

    fixed: tensors keep their addresses and may have more rows than are in use. The last step can be rolled back
    completely; partly only if all states are conv states.
    """

    is_quantized: ClassVar[bool] = False
    storage_format: ClassVar[None] = None

    def __init__(self, timeline: Timeline, fixed: bool):
        self.timeline, self.fixed = timeline, fixed
        self._states: dict[Key, torch.Tensor] = {}
        self._known: frozenset[Key] = frozenset()  # states that were written since the last reset
        self._saved: dict[Key, torch.Tensor] = {}  # copies from before the last step
        self._known_before: frozenset[Key] = frozenset()
        self._conv_inputs: dict[Key, torch.Tensor] = {}  # of the last step: the state before it and the new tokens
        self._rejected = 0  # tokens at the end of `_conv_inputs` that were rolled back
        self._last_step = 0  # tokens of the last step that can still be rolled back

    def get(self, key: Key) -> torch.Tensor | None:
        """The state [rows, ...], which the caller may write in place; None before the first step."""
        return self._used(key) if key in self._known else None

    def append_conv(self, added: torch.Tensor, number: int, kernel_size: int | None) -> torch.Tensor:
        """Add `added` [rows, channels, tokens]; returns the convolution's input: the state before, then `added`.

        kernel_size: tokens in the state; None if `added` is the state itself.
        """
        key = (CONV, number)
        size = added.shape[-1] if kernel_size is None else kernel_size
        self.timeline.bind_batch_size(added.shape[0])
        if key in self._known:
            self._check_alike(key, added[..., :0], self._used(key)[..., :0])
            inputs = torch.cat([self._used(key), added], dim=-1)
        else:
            inputs = torch.nn.functional.pad(added, (max(0, size - added.shape[-1]), 0))
        if kernel_size is not None and not self.timeline.graph and added.shape[-1] <= _PARTIAL_ROLLBACK:
            self._conv_inputs[key] = inputs
        self.set(key, inputs[..., -size:])
        return inputs

    def set(self, key: Key, value: torch.Tensor) -> torch.Tensor:
        """Write a state [rows, ...]; returns the tensor that keeps it."""
        self.timeline.bind_batch_size(value.shape[0])
        rows = self.timeline.max_rows if self.fixed else None
        if key not in self._states or len(self._states[key]) < (rows or 0):  # a reset keeps fixed tensors
            with always_writable():  # or the cache could not be used outside of inference mode later
                self._states[key] = value.new_zeros((rows or value.shape[0], *value.shape[1:]))
        if key not in self._known:
            self._known |= {key}
        state = self._used(key)
        self._check_alike(key, value, state)
        return state.copy_(value)

    def _check_alike(self, key: Key, value: torch.Tensor, state: torch.Tensor) -> None:
        if state.shape != value.shape:
            raise StepError(
                f"a {key[0]} state of shape {list(value.shape)} cannot follow one of {list(state.shape)}: a cache "
                "belongs to one model"
            )

    def _used(self, key: Key) -> torch.Tensor:
        state, rows = self._states[key], self.timeline.rows
        return state if state.shape[0] == rows else state[:rows]

    def prepare(self) -> None:
        """Allocate the memory for `begin`, which cannot fail then."""
        for key in self._known - self._saved.keys():
            with always_writable():
                self._saved[key] = torch.empty_like(self._used(key))

    def begin(self) -> None:
        for key in self._known:
            self._saved[key].copy_(self._used(key))
        self._known_before = self._known
        self._finalize_last_step()

    def _finalize_last_step(self) -> None:
        """Make the last step final: `roll_back` can no longer undo it."""
        self._conv_inputs.clear()
        self._rejected = self._last_step = 0

    def can_reject(self, rejected: int) -> bool:
        """Whether the open step can be committed without its last `rejected` tokens."""
        return rejected in (0, self.timeline.pending) or self._has_all_inputs()

    def commit(self, rejected: int) -> None:
        self._last_step = self.timeline.pending
        self.roll_back(rejected)

    def abort(self) -> None:
        self._known = self._known_before
        for key in self._known:
            self._used(key).copy_(self._saved[key])
        self._finalize_last_step()

    def can_roll_back(self, tokens: int) -> bool:
        """Whether the last `tokens` committed tokens can be rolled back: at most those of the last step."""
        return tokens in (0, self._last_step) or (tokens < self._last_step and self._has_all_inputs())

    def roll_back(self, tokens: int) -> None:
        if tokens and tokens == self._last_step:
            self.abort()
        elif tokens:
            self._rejected += tokens
            for key, inputs in self._conv_inputs.items():
                state, end = self._used(key), inputs.shape[-1] - self._rejected
                remaining = inputs[..., max(0, end - state.shape[-1]) : end]
                state[..., : state.shape[-1] - remaining.shape[-1]] = 0
                state[..., state.shape[-1] - remaining.shape[-1] :] = remaining
            self._last_step -= tokens

    def _has_all_inputs(self) -> bool:
        return self._known <= set(self._conv_inputs)

    def select_rows(self, index: torch.Tensor) -> None:
        with always_writable():
            saved, inputs = chosen_rows(self._saved, index), chosen_rows(self._conv_inputs, index)
            states = {key: chosen_rows(self._used(key), index) for key in self._states}
        self._saved, self._conv_inputs = saved, inputs
        for key, chosen in states.items():
            if self.fixed:
                self._states[key][: len(index)] = chosen
            else:
                self._states[key] = chosen

    def reset(self) -> None:
        self._known = self._known_before = frozenset()
        self._finalize_last_step()
        self._saved.clear()
        if not self.fixed:
            self._states.clear()

    def release(self) -> None:
        self.reset()
        self._states.clear()

    def dense_state(self) -> dict[str, torch.Tensor]:
        """The committed states by names such as "conv 0", each [rows, ...]."""
        return {f"{state} {number}": self._used((state, number)) for state, number in sorted(self._known)}

    def load_dense(self, content: dict[str, torch.Tensor]) -> None:
        """Replace the content by a `dense_state`."""
        self.reset()
        for name, value in content.items():
            state, number = name.split()
            self.set((state, int(number)), value)

    def state_dict(self) -> dict[str, Any]:
        """The committed states and what a rollback of the last step needs."""
        states = {key: self._used(key) for key in self._known}
        last_step = {"known before": self._known_before, "rejected": self._rejected, "last step": self._last_step}
        return {"states": states, "saved": dict(self._saved), "conv inputs": dict(self._conv_inputs)} | last_step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the content by a `state_dict`; the last step can be rolled back as before."""
        self.reset()
        for key, value in state["states"].items():
            self.set(key, value)
        self._saved, self._conv_inputs = dict(state["saved"]), dict(state["conv inputs"])
        self._known_before = state["known before"]
        self._rejected, self._last_step = state["rejected"], state["last step"]

    @staticmethod
    def agree(states: Sequence[RecurrentState]) -> None:
        """Call it before rows of `states` are joined: if their last steps differ, none can be rolled back."""
        last_steps = [
            (item._last_step, item._rejected, item._known_before, frozenset(item._saved), frozenset(item._conv_inputs))
            for item in states
        ]
        if len(set(last_steps)) > 1:
            for item in states:
                item._finalize_last_step()
                item._known_before = item._known
                item._saved.clear()

    def numbered(self, state: str) -> dict[int, torch.Tensor]:
        """The states of one kind, by their number in the layer."""
        return {key[1]: self._used(key) for key in sorted(self._known) if key[0] == state}

    def tensors(self) -> Iterator[torch.Tensor]:
        """All memory, [rows, ...], the copies for a rollback included."""
        for tensors in (self._states, self._saved, self._conv_inputs):
            yield from tensors.values()
