"""One file per cache for all its tensors on disk: it takes one descriptor, however many layers and tensors there are.

A tensor has some ranges of whole pages, which are mapped one behind the other. So it grows without being copied, and
pages that are given back fit any other tensor. The disk gets them back with the last of them, when the file is closed:
taking single ones out of it would first write what nothing will read.
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

_PAGE = mmap.ALLOCATIONGRANULARITY
_MAP_FIXED = 0x10  # Linux and macOS
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_ZEROS = 2**24


class DiskFile:
    """A file without a name, so nothing stays on the disk whatever happens to the process.

    It is open while a tensor has a part of it. Its bytes are reserved before they are used: a full disk is a
    `CapacityError` when room is made, and not a signal later. A copy is an empty file for the same `folder`. A fork of
    the process opens a file of its own when it makes room; the windows it inherits are those of the parent.

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
        # A range may come back at any moment, in `_take` or in another thread: wherever Python collects its tensor.
        self._returned: list[tuple[int, int]] = []
        self._process = os.getpid()  # whose file it is
        self._locks: dict[int, Any] = {}  # by process: a fork may inherit one that is held

    def window(self, size: int, before: Window | None = None) -> Window:
        """Memory of at least `size` bytes which begins with the ranges of `before`.

        Or with a copy of them, in a fork of the process that has them. Raises `CapacityError` where the disk is full or
        no file can be opened, `MemoryError` where it cannot be mapped.
        """
        kept = [] if before is None or before.ranges[0].is_inherited() else before.ranges
        missing = -(-max(1, size) // _PAGE) * _PAGE - sum(part.end - part.begin for part in kept)
        try:
            ranges = [*kept, *self._take(missing)]
        except OSError as error:
            raise CapacityError(self._why_not(missing, error)) from error
        try:
            window = _mapped(self._file.fileno(), ranges)
        except OSError as error:
            ranges.clear()  # the error keeps this frame
            raise MemoryError(
                f"{size:,} bytes of a file in {self.folder} cannot be mapped: {error.strerror} (of addresses, or of "
                "the mappings that vm.max_map_count allows)"
            ) from error
        if before is not None and not kept:
            window[: len(before)] = before
        return window

    @property
    def _lock(self) -> Any:
        return self._locks.setdefault(os.getpid(), threading.RLock())

    def _take(self, size: int) -> list[_Range]:
        """Free pages first, then new ones at the end of the file."""
        taken: list[_Range] = []
        with self._lock:
            if self._process != os.getpid():
                self._process, self._users = os.getpid(), 0
                self.close()  # the parent's descriptor stays open
            self._users += 1  # or the file might be closed meanwhile
            try:
                if self._file is None:
                    self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 - see `_leave`
                self._sort_in()
                while size and self._free:
                    begin, end = self._free.pop(0)
                    cut = min(end, begin + size)
                    if cut < end:
                        self._free.insert(0, (cut, end))
                    taken.append(_Range(self, begin, cut))
                    size -= cut - begin
                if size:
                    self._extend(size)
                    taken.append(_Range(self, self._size - size, self._size))
            except BaseException:
                taken.clear()  # the error keeps this frame
                raise
            finally:
                self._leave()
        return taken

    def _extend(self, size: int) -> None:
        try:
            _reserve(self._file.fileno(), self._size, size)
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            raise
        self._size += size

    def _sort_in(self) -> None:
        """What came back is free; ranges that touch become one."""
        returned, self._returned = self._returned, []  # in this order: one that comes now is in either
        ranges, self._free = sorted([*self._free, *returned]), []
        for begin, end in ranges:
            if self._free and self._free[-1][1] == begin:
                begin = self._free.pop()[0]
            self._free.append((begin, end))

    def give_back(self, begin: int, end: int) -> None:
        """These bytes are no longer used."""
        with self._lock:
            if self._file is None:  # collected together, the disk_file first
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
        """Without any range in use."""
        if self._file is not None:
            self._file.close()
        self._file, self._size, self._free, self._returned = None, 0, [], []

    def __del__(self) -> None:
        with suppress(AttributeError):  # it was refused before it had a file
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
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
    """Bytes [begin, end) of a disk_file, until nothing refers to them."""

    def __init__(self, disk_file: DiskFile, begin: int, end: int):
        self.begin, self.end, self._slab, self._process = begin, end, disk_file, os.getpid()
        disk_file.enter()

    def is_inherited(self) -> bool:
        """Whether it belongs to the file of the process that this one was forked from."""
        return self._process != os.getpid()

    def __del__(self) -> None:
        if not self.is_inherited():
            self._slab.give_back(self.begin, self.end)


class Window(mmap.mmap):
    """Ranges of a disk_file, one behind the other in memory, for as long as a tensor refers to it."""

    ranges: list[_Range]


def _mapped(file: int, ranges: list[_Range]) -> Window:
    """The addresses are taken first, then given to the file: Python's own map would keep a descriptor for each."""
    size = sum(part.end - part.begin for part in ranges)
    window = Window(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    window.ranges = ranges
    address = ctypes.addressof(ctypes.c_char.from_buffer(window))
    for part in ranges:
        length = part.end - part.begin
        flags = mmap.MAP_SHARED | _MAP_FIXED
        found = _libc().mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, part.begin)
        if found != address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        address += length
    return window


def _reserve(file: int, begin: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, begin, size)
        return
    zeros = bytes(min(size, _ZEROS))  # systems that can only be asked by storage_format
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
    whose = "the system has as many files open as it can"
    if error.errno == errno.EMFILE:
        whose = f"this process has all {soft:,} descriptors open that it may have (ulimit -n; at most {hard:,})"
    return (
        f"a cache on disk needs one open file, but {whose}: reset or delete caches on disk that are not needed, close "
        "other files, or raise the limit"
    )
