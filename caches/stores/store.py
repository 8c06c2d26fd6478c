"""`Store`, the interface of what keeps one component of one layer; `state_dict`s of several rows.

A `Timeline` decides which slots are used; a store only moves the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from caches.errors import StepError
from caches.memory.buffers import Buffer
from caches.timeline.timeline import Timeline


class Store(Protocol):
    """One component of one layer: its keys, its values or its index."""

    @property
    def timeline(self) -> Timeline:
        """Which slots are in use."""

    @property
    def is_quantized(self) -> bool:
        """Whether it keeps fewer bits than it is given."""

    @property
    def storage_format(self) -> object:
        """The format of `state_dict`: stores with equal formats can load each other's. None: full precision."""

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """In the forward: add `new` [rows, heads, pending, head_dim]; returns what attention reads."""

    def add(self, new: torch.Tensor) -> None:
        """`append` without the result."""

    def read(self) -> torch.Tensor | None:
        """In a forward that adds nothing: what attention reads; None if there are no tokens.

        An offloaded store's result is valid until the next store of the same name reads.
        """

    def reserve(self, room: int) -> None:
        """Before a step: grow to `room` slots."""

    def compact(self) -> None:
        """Before a step: move the kept tokens to the front. Must not fail."""

    def commit(self, rejected: int) -> None:
        """After a step, before the timeline commits: its last `rejected` tokens are rejected."""

    def abort(self) -> None:
        """After a failed step, before the timeline closes it: discard the pending tokens."""

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes a copy of row `index[i]`. Raises without changing anything."""

    def reset(self) -> None:
        """Become empty."""

    def release(self) -> None:
        """Become empty and free all memory, which `reset` may keep."""

    def committed(self) -> torch.Tensor | None:
        """The kept tokens, [rows, heads, kept_tokens, head_dim]; None before the first step."""

    def load_dense(self, dense: torch.Tensor) -> None:
        """Replace the content by [rows, heads, kept_tokens, head_dim]. The timeline was updated before."""

    def state_dict(self) -> dict[str, Any]:
        """The kept tokens in the store's own format (`storage_format`): tensors [rows, ...]."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the content by a `state_dict`. The timeline was updated before."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """All memory of the store."""

    def offloaded_buffers(self) -> Iterator[Buffer]:
        """The buffers that are not on the compute device."""


def check_alike(heads_and_width: tuple[int, int], dtype: torch.dtype, added: torch.Tensor) -> None:
    """Raise `StepError` unless `added` [rows, heads, slots, width] has these heads, this width and data type."""
    heads, width = heads_and_width
    if (added.shape[1], added.shape[3]) != (heads, width) or added.dtype != dtype:
        raise StepError(
            f"the layer has {heads} heads of size {width} in {dtype}, but the step has {added.shape[1]} heads of size "
            f"{added.shape[3]} in {added.dtype}: a cache belongs to one model"
        )


def chosen_rows(state: Any, index: torch.Tensor) -> Any:
    """A `state_dict` (tensors and nested dicts of them) with row `index[i]` as row i."""
    if isinstance(state, dict):
        return {name: chosen_rows(value, index) for name, value in state.items()}
    return state.index_select(0, index.to(state.device)) if _has_rows(state) else state


def joined_rows(states: Sequence[Any]) -> Any:
    """One `state_dict` with the rows of all `states`, which have to be of the same tokens."""
    first_state = states[0]
    if isinstance(first_state, dict):
        return {name: joined_rows([state[name] for state in states]) for name in first_state}
    return torch.cat(list(states)) if _has_rows(first_state) else first_state


def _has_rows(value: Any) -> bool:
    # `torch.tensor([])` is transformers' placeholder for an empty layer; [rows, 0, width] has rows.
    return isinstance(value, torch.Tensor) and (value.ndim > 1 or (value.ndim == 1 and value.numel() > 0))
