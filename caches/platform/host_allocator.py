"""Lets glibc reuse the memory of freed CPU tensors, and gives it back to the system where that is wanted."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache

_NO_ALLOCATOR = AttributeError, OSError, TypeError  # other libraries have no such function, Windows none without a name
# By the variable of the environment: the parameter of `mallopt`, and bytes. Glibc itself raises the first one to 32 MiB
# at most, when a block of that size is freed; from then on the second one is 64 MiB.
_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": (-3, 32 * 2**20), "MALLOC_TRIM_THRESHOLD_": (-1, 256 * 2**20)}


@cache
def keep_freed_memory() -> None:
    """Let glibc keep what tensors of up to 32 MiB free, in this process: at the end of the heap up to 256 MiB.

    Otherwise, until the first block of 32 MiB is freed, it gives memory back to the system several times per layer of a
    prompt, and the next tensor takes it page by page: 5 to 15 % of the time of a prompt of 1,000 tokens. Free memory
    between blocks that are in use, and that of other threads, it keeps in any case. A setting that the environment has
    stays (`man mallopt`).
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    with suppress(*_NO_ALLOCATOR):
        libc = ctypes.CDLL(None)
        for variable, (parameter, value) in _SETTINGS.items():
            tunable = "glibc.malloc." + variable.removeprefix("MALLOC_").rstrip("_").lower()
            if variable not in os.environ and tunable not in tunables and not libc.mallopt(parameter, value):
                return  # the second alone would fix the first at 128 KiB


def give_back_freed_memory() -> None:
    """Give free memory back to the system, also from between blocks that are in use."""
    with suppress(*_NO_ALLOCATOR):
        ctypes.CDLL(None).malloc_trim(0)
