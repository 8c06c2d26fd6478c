"""The memory that glibc keeps between the tensors of a CPU."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache

_NO_ALLOCATOR = AttributeError, OSError, TypeError  # other libraries have no such function, Windows none without a name
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of mallopt
_LARGEST_BLOCK, _MOST_KEPT = 32 * 2**20, 256 * 2**20


@cache
def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MiB that tensors of up to 32 MiB have freed, for this process.

    By itself it gives memory back to the system several times per layer of a prompt, and the next tensor takes it page
    by page: 5 to 15 % of the time of a prompt of 1,000 tokens (`man mallopt`: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD). What
    the environment sets stays.
    """
    if not any(name.startswith("MALLOC_") for name in os.environ) and "malloc" not in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        with suppress(*_NO_ALLOCATOR):
            libc = ctypes.CDLL(None)
            libc.mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)
            libc.mallopt(_TRIM_THRESHOLD, _MOST_KEPT)


def give_back_freed_memory() -> None:
    """Give back what glibc keeps, also in holes too small for something large."""
    with suppress(*_NO_ALLOCATOR):
        ctypes.CDLL(None).malloc_trim(0)
