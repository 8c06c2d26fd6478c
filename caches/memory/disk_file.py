"""One file per cache for all its tensors on disk: one file descriptor for any number of layers.

A tensor has ranges of pages, mapped one behind the other into a `Window`. It grows without a copy, and freed pages fit
any other tensor. The disk space is freed when the last range is: the file is closed then. Punching holes for single
ranges would write data that is never read.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import shutil
import sys
import tempfile
import threading
from contextlib import suppress
from typing import Any

from caches.errors import CapacityError
from caches.memory.folders import disk_folder
from caches.platform.undo import on_failure

_PAGE = mmap.ALLOCATIONGRANULARITY
_MAP_FIXED = 0x10  # Linux and macOS
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_ZEROS = 2**24


class DiskFile:
    """An unnamed temporary file: nothing stays on the disk after the process ends, however it ends.

    The file is open while a tensor uses a part of it. Bytes are reserved before use: a full disk raises `CapacityError`
    on growth, not SIGBUS on a later write. A copy is an empty file in the same folder. After `os.fork` the child opens
    a file of its own when it grows; inherited windows still map the parent's file.

    folder: see `disk_folder`.
    """

    def __init__(self, folder: str | None = None):
        if not hasattr(mmap, "MAP_SHARED"):
            raise CapacityError("residency='disk' maps files as POSIX systems do: use residency='host' here")
        self._given, self.folder = folder, disk_folder(folder)
        self._file: Any = None
        self._size = 0  # of the file
        self._users = 0  # ranges in use, and `_take` under way
        self._free: list[tuple[int, int]] = []  # in order, none touches the next
        # Filled by `give_back`, which runs whenever Python frees a tensor: also during `_take`, or in another thread.
        self._returned: list[tuple[int, int]] = []
        self._process = os.getpid()  # the process that opened the file
        self._locks: dict[int, Any] = {}  # by process: a forked process may inherit a locked one

    def window(self, size: int, previous: Window | None = None) -> Window:
        """Mapped memory of at least `size` bytes that begins with the ranges of `previous`.

        In a forked process it begins with a copy of them. Raises `CapacityError` if the disk is full or no file can be
        opened, `MemoryError` if the ranges cannot be mapped.
        """
        reused = [] if previous is None or previous.ranges[0].is_inherited() else previous.ranges
        missing = -(-max(1, size) // _PAGE) * _PAGE - sum(disk_range.end - disk_range.begin for disk_range in reused)
        try:
            ranges = [*reused, *self._take(missing)]
        except OSError as error:
            raise CapacityError(self._why_not(missing, error)) from error
        try:
            window = _mapped(self._file.fileno(), ranges)
        except OSError as error:
            ranges.clear()  # the traceback would keep them in use
            raise MemoryError(
                f"{size:,} bytes of a file in {self.folder} cannot be mapped: {error.strerror} (no addresses left, or "
                "more mappings than vm.max_map_count allows)"
            ) from error
        if previous is not None and not reused:
            window[: len(previous)] = previous
        return window

    @property
    def _lock(self) -> Any:
        return self._locks.setdefault(os.getpid(), threading.RLock())

    def _take(self, size: int) -> list[_Range]:
        """Allocate ranges of `size` bytes in all: free pages first, then new ones at the end of the file."""
        ranges: list[_Range] = []
        with self._lock:
            if self._process != os.getpid():
                self._process, self._users = os.getpid(), 0
                self.close()  # the parent's descriptor stays open
            self._users += 1  # so that `_leave` in another thread does not close the file
            try:
                with on_failure(ranges.clear):  # the traceback would keep them in use
                    self._fill(ranges, size)
            finally:
                self._leave()
        return ranges

    def _fill(self, ranges: list[_Range], size: int) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 - see `_leave`
        self._sort_in()
        while size and self._free:
            begin, end = self._free.pop(0)
            cut = min(end, begin + size)
            if cut < end:
                self._free.insert(0, (cut, end))
            ranges.append(_Range(self, begin, cut))
            size -= cut - begin
        if size:
            self._extend(size)
            ranges.append(_Range(self, self._size - size, self._size))

    def _extend(self, size: int) -> None:
        try:
            _reserve(self._file.fileno(), self._size, size)
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            raise
        self._size += size

    def _sort_in(self) -> None:
        """Add the returned ranges to the free ones; adjacent ranges are merged."""
        returned, self._returned = self._returned, []
        ranges, self._free = sorted([*self._free, *returned]), []
        for begin, end in ranges:
            if self._free and self._free[-1][1] == begin:
                begin = self._free.pop()[0]
            self._free.append((begin, end))

    def give_back(self, begin: int, end: int) -> None:
        """Bytes [begin, end) are no longer used."""
        with self._lock:
            if self._file is None:  # both were garbage, and Python collected this file first
                return
            self._returned.append((begin, end))
            self._leave()

    def enter(self) -> None:
        with self._lock:
            self._users += 1

    def _leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            self.close()

    def close(self) -> None:
        """Close the file, which frees the disk space. No range may be in use."""
        if self._file is not None:
            self._file.close()
        self._file, self._size, self._free, self._returned = None, 0, [], []

    def __del__(self) -> None:
        with suppress(AttributeError):  # `__init__` raised
            self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._given,)

    def _why_not(self, size: int, error: OSError) -> str:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return _no_descriptor(error)
        is_there = os.path.isdir(self.folder)
        free = f"where {shutil.disk_usage(self.folder).free:,} bytes are free" if is_there else "which is no folder"
        return (
            f"the cache needs a file of {self._size + size:,} bytes in {self.folder}, {free}: {error.strerror}. "
            "Choose another `folder`, free some space, or generate fewer tokens or rows"
        )


class _Range:
    """Bytes [begin, end) of a `DiskFile`; freed when the last reference to this object goes."""

    def __init__(self, disk_file: DiskFile, begin: int, end: int):
        self.begin, self.end, self._disk_file, self._process = begin, end, disk_file, os.getpid()
        disk_file.enter()

    def is_inherited(self) -> bool:
        """Whether the range belongs to the file of a parent process."""
        return self._process != os.getpid()

    def __del__(self) -> None:
        if not self.is_inherited():
            self._disk_file.give_back(self.begin, self.end)


class Window(mmap.mmap):
    """Ranges of a `DiskFile`, mapped one behind the other. A tensor made from the window keeps it in use."""

    ranges: list[_Range]


def _mapped(file: int, ranges: list[_Range]) -> Window:
    """Map `ranges` of a file descriptor into one window.

    Addresses are reserved with an anonymous map first: Python's own map of a file would keep a descriptor per window.
    """
    size = sum(disk_range.end - disk_range.begin for disk_range in ranges)
    window = Window(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    window.ranges = ranges
    address = ctypes.addressof(ctypes.c_char.from_buffer(window))
    for disk_range in ranges:
        length = disk_range.end - disk_range.begin
        flags = mmap.MAP_SHARED | _MAP_FIXED
        mapped = _libc().mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, disk_range.begin)
        if mapped != address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        address += length
    return window


def _reserve(file: int, begin: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, begin, size)
        return
    zeros = bytes(min(size, _ZEROS))  # without posix_fallocate, bytes are reserved by writing them
    for offset in range(begin, begin + size, _ZEROS):
        os.pwrite(file, zeros[: begin + size - offset], offset)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, number = ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_int64)
    return libc


def _no_descriptor(error: OSError) -> str:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = "the system's limit of open files is reached"
    if error.errno == errno.EMFILE:
        limit = f"this process has reached its limit of {soft:,} open files (ulimit -n; at most {hard:,})"
    return (
        f"a cache on disk needs one open file, but {limit}: reset or delete caches on disk that are not needed, close "
        "other files, or raise the limit"
    )
