"""Memory that is out at a chosen moment: the k-th tensor or file that our caches ask for is not there."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
from contract import CELLS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from caches.memory.disk_file import DiskFile


class Counting(TorchDispatchMode):
    """Counts what is asked for while it is entered; `fails_at` (from 1) says which is refused."""

    def __init__(self, fails_at: Container[int]):
        super().__init__()
        self.fails_at, self.count = fails_at, 0

    def ask(self, refusal: Callable[[], Exception]) -> None:
        self.count += 1
        if self.count in self.fails_at:
            raise refusal()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if _asked_by_caches():
            known = {_storage(given) for given in tree_leaves((args, kwargs)) if _is_plain(given)}
            if any(_storage(one) not in known for one in tree_leaves(made) if _is_plain(one)):
                self.ask(lambda: torch.OutOfMemoryError(f"no memory for {func}"))
        return made


def _is_plain(value: object) -> bool:
    return type(value) is torch.Tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _asked_by_caches() -> bool:
    """Whether it was our code that asked, and not a model or a test."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("caches", "test_", "trial", "contract")):
            return name.startswith("caches")
        frame = frame.f_back
    return False


@contextmanager
def memory(fails_at: int | Container[int] = ()) -> Iterator[Counting]:
    """Files count too."""
    counting = Counting([fails_at] if isinstance(fails_at, int) else fails_at)
    take = DiskFile._take

    def taken(slab: DiskFile, size: int) -> list:
        counting.ask(lambda: OSError(errno.ENOSPC, "No space left on device"))
        return take(slab, size)

    DiskFile._take = taken
    try:
        with counting:
            yield counting
    finally:
        DiskFile._take = take


def each_cell_with(choices: Iterable[str]) -> pytest.MarkDecorator:
    """Every cell of the contract with one of the `choices`, in turn, and memory out at a few moments.

    Every fourth cell with all of them, and at more moments, belongs to the whole product.
    """
    choices, cases = list(choices), []
    for turn, cell in enumerate(CELLS):
        few = ([choices[turn % len(choices)]], 2)
        cases.append(pytest.param(*cell, *few, id="-".join([*cell, *few[0]])))
        if turn % 4 == 0:
            name = "-".join([*cell, "all"])
            cases.append(pytest.param(*cell, choices, 6, marks=pytest.mark.product, id=name))
    return pytest.mark.parametrize(("backend", "kind", "choices", "most"), cases)


def moments(count: int, most: int) -> list[int]:
    """All of 1 to `count`, or `most` of them: the first, the last, and some between."""
    if count <= most:
        return list(range(1, count + 1))
    return sorted({1 + round(number * (count - 1) / (most - 1)) for number in range(most)})
