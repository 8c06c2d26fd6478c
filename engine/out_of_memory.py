"""What running out of memory looks like, and giving back what allocators keep in store."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

import torch

_OF_ONEDNN = ("could not create a memory", "could not create a primitive", "could not execute a primitive")
# Where memory is out in a place that knows no class of its own for it, only the message says so.
_MESSAGES = (
    "can't allocate memory",  # torch's CPU allocator
    "not enough memory",
    "out of memory",  # CUDA's and MPS's own
    "std::bad_alloc",
    "cannot allocate memory",
    *_OF_ONEDNN,
    "alloc_failed",  # cuBLAS and cuDNN
)


class Exhausted(Exception):
    """Memory is out, and there is nothing left that could be done about it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is an allocation that failed, on a device or in host memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    message = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(words in message for words in _MESSAGES)


def is_of_onednn(error: BaseException) -> bool:
    return any(words in str(error).lower() for words in _OF_ONEDNN)


def in_words(error: BaseException) -> str:
    """The first line of what it says, with its class: the error itself would hold on to every frame it went through."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def empty_allocators() -> None:
    """Give back what nothing refers to. Not while the error is handled: its frames refer to what the step has made."""
    gc.collect()
    with suppress(AttributeError, OSError):  # glibc keeps what is freed, in holes too small for something large
        ctypes.CDLL(None).malloc_trim(0)
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()
