"""Recognizes errors of failed allocations, by class or, for plain RuntimeErrors, by the exact message."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable

import torch

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


def has_memory_for(work: Callable[[], object]) -> bool:
    """Whether memory suffices for `work()`, which is done then. What makes room comes after this call: while an error
    is handled its frames refer to the tensors that filled the memory."""
    try:
        work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def is_of_onednn(error: BaseException) -> bool:
    """Whether it is one of oneDNN's ambiguous errors."""
    return isinstance(error, RuntimeError) and str(error).strip() in _ONEDNN_MESSAGES


def _is_free(size: int) -> bool:
    try:
        torch.empty(size, dtype=torch.uint8, device="cpu")
    except (RuntimeError, MemoryError):
        return False
    return True
