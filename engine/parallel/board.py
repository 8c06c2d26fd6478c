"""`Board`: a few numbers of each rank, in memory that the processes of one host share.

An exchange takes microseconds, where one through the loopback network takes up to a millisecond, and ranks exchange
numbers before every collective operation.
"""

from __future__ import annotations

import mmap
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from torch import distributed

_SHARED_MEMORY = Path("/dev/shm")
_WIDTH = 4  # numbers of a rank: of the exchange, then its values
_BUSY_S = 0.002  # how long to wait without sleep; then each sleep is a tenth of the wait so far
_LONGEST_SLEEP_S, _LIFE_S = 0.005, 0.25  # the second: between two looks whether another rank lives
_ORDERED = ("x86_64", "AMD64")  # processors on which writes are seen in the order in which they are made


class Board:
    """memory: of the file that all have mapped. processes: of the ranks. rank: the own one."""

    def __init__(self, memory: mmap.mmap, processes: list[int], rank: int):
        self._memory, self._cells = memory, memoryview(memory).cast("q")
        self._processes, self._rank, self._count = processes, rank, 0

    def swap(self, values: list[int]) -> list[list[int]]:
        """The values of each rank. All ranks call it equally often. Raises `RuntimeError` where one has ended."""
        self._count += 1
        cells, size = self._cells, len(self._processes)
        # Two sets of cells in turn: a rank that is ahead by one exchange writes into the other.
        begin = self._count % 2 * size * _WIDTH
        cell = begin + self._rank * _WIDTH
        for position, value in enumerate(values, cell + 1):
            cells[position] = value
        cells[cell] = self._count  # last: it says that the values are there
        swapped = []
        for rank in range(size):
            at = begin + rank * _WIDTH
            if cells[at] != self._count:
                self._wait(lambda at=at: cells[at] == self._count, rank)  # type: ignore[misc]
            swapped.append(list(cells[at + 1 : at + 1 + len(values)]))
        return swapped

    def _wait(self, is_there: Callable[[], bool], rank: int) -> None:
        begun = looked = time.monotonic()
        while not is_there():
            now = time.monotonic()
            time.sleep(0 if now - begun < _BUSY_S else min((now - begun) / 10, _LONGEST_SLEEP_S))
            if now - looked > _LIFE_S:
                looked = now
                if not _is_alive(self._processes[rank]) and not is_there():
                    raise RuntimeError(f"the process of rank {rank} has ended")


def _is_alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _place() -> tuple[str, int]:
    """Where processes see each other: the host, and the space of process numbers in it."""
    try:
        return socket.gethostname(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return socket.gethostname(), 0


def shared_board(group: distributed.ProcessGroup) -> Board | None:
    """The board of the ranks of `group`; None where they cannot share memory, as on several hosts."""
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    everyone: list[tuple[tuple[str, int], int]] = [(("", 0), 0)] * size
    distributed.all_gather_object(everyone, (_place(), os.getpid()), group=group)
    path: list[str | None] = [None]
    length = 2 * size * _WIDTH * 8
    if rank == 0 and _SHARED_MEMORY.is_dir() and platform.machine() in _ORDERED:
        with suppress(OSError):
            number, path[0] = tempfile.mkstemp(prefix="engine-ranks-", dir=_SHARED_MEMORY)
            try:
                os.posix_fallocate(number, 0, length)  # where there is no room, writing would end the process
            finally:
                os.close(number)
    distributed.broadcast_object_list(path, 0, group=group)
    memory = None
    if path[0] is not None and len({host for host, _ in everyone}) == 1:
        with suppress(OSError, ValueError), open(path[0], "r+b") as file:
            memory = mmap.mmap(file.fileno(), length)
    mapped = [False] * size
    distributed.all_gather_object(mapped, memory is not None, group=group)
    if rank == 0 and path[0] is not None:
        os.unlink(path[0])  # what is mapped stays until the processes end
    if memory is None or not all(mapped):
        return None
    return Board(memory, [process for _, process in everyone], rank)
