"""What running out of memory looks like: the kinds of errors, and the exact forms of those that have no kind."""

from __future__ import annotations

import errno
import re

import torch

# Of RuntimeErrors: what torch and the libraries below it say, from the beginning of the message.
_FORMS = re.compile(
    r"(\[enforce fail at \S+:\d+\] .{0,40})?DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|MPS backend out of memory"
    r"|(CUDA|HIP|XPU)( driver)? error: out of memory"
    r"|CUDA error: (CU|HIP)BLAS_STATUS_ALLOC_FAILED"
    r"|cuDNN error: CUDNN_STATUS_(ALLOC|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION)_FAILED"
    r"|(std::bad_alloc|bad allocation)$"
    r"|unable to mmap \d+ bytes .*: Cannot allocate memory \(12\)$"
)
# oneDNN says the same when it has no memory and when it cannot do what it was asked for.
_OF_ONEDNN = ("could not create a memory object", "could not create a primitive", "could not execute a primitive")


def is_out_of_memory(error: BaseException, size: int = 0) -> bool:
    """Whether it is an allocation that failed, on a device or in host memory.

    size: bytes that may have been asked for. Where the message does not tell, as with oneDNN, an allocation of so many
    is tried now; 0 says that memory is not the reason.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if is_of_onednn(error):
        return size > 0 and not _is_free(size)
    return isinstance(error, RuntimeError) and _FORMS.match(str(error).strip()) is not None


def is_of_onednn(error: BaseException) -> bool:
    """Whether oneDNN failed for a reason that its message does not tell."""
    return isinstance(error, RuntimeError) and str(error).strip() in _OF_ONEDNN


def _is_free(size: int) -> bool:
    try:
        torch.empty(size, dtype=torch.uint8)
    except (RuntimeError, MemoryError):
        return False
    return True
