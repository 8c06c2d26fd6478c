"""Errors of failed allocations: recognized by class or by the exact message, put in words, and recovered from.

`recovering` is how a run goes on after one.
"""

from __future__ import annotations

import errno
import re
import sys
from types import FrameType, TracebackType

import torch
from accelerate.utils.memory import clear_device_cache

from caches.platform.host_allocator import give_back_freed_memory

_LONG = 300  # characters of a message of another library
# The beginnings of messages of torch and its libraries for plain RuntimeErrors.
_MESSAGES = re.compile(
    r"(\[enforce fail at \S+:\d+\] .{0,40})?DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|MPS backend out of memory"
    r"|(CUDA|HIP|XPU)( driver)? error: out of memory"
    r"|CUDA error: (CU|HIP)BLAS_STATUS_ALLOC_FAILED"
    r"|cuDNN error: CUDNN_STATUS_(ALLOC|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION)_FAILED"
    r"|(std::bad_alloc|bad allocation)( \(originally from .*)?$"
    r"|unable to mmap \d+ bytes .*: Cannot allocate memory \(12\)$"
)
# oneDNN's messages are the same for a failed allocation and for an unsupported operation.
_ONEDNN_MESSAGES = ("could not create a memory object", "could not create a primitive", "could not execute a primitive")


def is_out_of_memory(error: BaseException, size: int = 0) -> bool:
    """Whether `error` is a failed allocation, on a device or in host memory.

    size: bytes that may have been requested. Where the message is ambiguous (oneDNN), an allocation of `size` bytes is
    tried; with 0 the answer is no.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if is_of_onednn(error):
        return size > 0 and not _is_free(size)
    return isinstance(error, RuntimeError) and _MESSAGES.match(str(error).strip()) is not None


class recovering:
    """A block that ends where memory is out, and at errors of `classes`; other errors pass through it.

        with recovering(CacheError) as outcome:
            return branch(cache)
        make_room(outcome.failure)

    What recovers comes after the block: while an error is handled, its frames refer to the tensors that filled the
    memory. failure: the error without its frames; None where the block came to its end. size: see `is_out_of_memory`.
    """

    def __init__(self, *classes: type[BaseException], size: int = 0):
        self._classes, self._size = classes, size
        self.failure: BaseException | None = None

    def __enter__(self) -> recovering:
        return self

    def __exit__(self, error_class: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None or not (isinstance(error, self._classes) or is_out_of_memory(error, self._size)):
            return False
        self.failure = without_frames(error)
        return True


def without_frames(error: BaseException) -> BaseException:
    """The error itself without its tracebacks, which hold on to everything that the failed step had made.

    An error that is still being handled, in whose handling this one was raised, keeps its own: it may be the caller's.
    """
    running = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        running.add(frame)
        frame = frame.f_back
    pending: list[BaseException | None] = [error]
    visited = set()
    while pending:
        linked = pending.pop()
        if linked is None or id(linked) in visited:
            continue
        trace = linked.__traceback__
        if linked is not error and trace is not None and trace.tb_frame in running:  # the frame that handles it
            continue
        visited.add(id(linked))
        linked.__traceback__ = None
        pending += [linked.__cause__, linked.__context__]
    return error


def is_of_onednn(error: BaseException) -> bool:
    """Whether it is one of oneDNN's ambiguous errors."""
    return isinstance(error, RuntimeError) and str(error).strip() in _ONEDNN_MESSAGES


def _is_free(size: int) -> bool:
    try:
        torch.empty(size, dtype=torch.uint8, device="cpu")
    except (RuntimeError, MemoryError):
        return False
    return True


class Exhausted(Exception):
    """Memory is out, and there is nothing left that could be done about it. `__cause__`: the error that said so."""


def first_line(error: BaseException) -> str:
    """The first line of its text, without the place in torch's code; its class where it has none. A line that ends in a
    colon goes on with the next."""
    lines = [line.strip() for line in str(error).partition(" (originally from")[0].splitlines() if line.strip()]
    count = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    return " ".join(lines[:count]) or type(error).__name__


def in_words(error: BaseException) -> str:
    """Its class and the first line of its text."""
    line = first_line(error)
    line = line if len(line) <= _LONG else f"{line[:_LONG].rpartition(' ')[0] or line[:_LONG]} ..."
    return line if line == type(error).__name__ else f"{type(error).__name__}: {line}"


def empty_allocators(collects: bool = True) -> None:
    """Give back what nothing refers to. Not while the error is handled: its frames refer to what the step has made.

    collects: whether garbage is collected, which takes 0.4 s in a process with torch and transformers.
    """
    clear_device_cache(garbage_collection=collects)
    give_back_freed_memory()
