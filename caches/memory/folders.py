"""The folder of a cache on disk, and whether its files would be in memory."""

from __future__ import annotations

import functools
import logging
import os
import re
import tempfile
from pathlib import Path

from caches.errors import CapacityError

_MOUNTS = Path("/proc/self/mountinfo")
_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs")
_ALTERNATIVE = "/var/tmp"  # of the two standard folders the one that outlives a reboot, so it is on a disk
_logger = logging.getLogger("caches")


def disk_folder(folder: str | None = None) -> str:
    """`folder`, or the default: that of `tempfile` (which TMPDIR sets), or /var/tmp where that one is in memory.

    A folder that was given is taken even where it is in memory, with a warning: the caller may know why, for instance
    beside a GPU. Raises `CapacityError` where both defaults are in memory, since moving a cache there frees nothing.
    """
    if folder is not None:
        kind = memory_type(folder)
        if kind is not None:
            _warn_once(folder, kind)
        return folder
    seen = []
    for candidate in (_temporary(), _ALTERNATIVE):
        if candidate is None or not os.path.isdir(candidate) or not os.access(candidate, os.W_OK):
            continue
        kind = memory_type(candidate)
        if kind is None:
            return candidate
        seen.append(f"{candidate} is a {kind}")
    raise CapacityError(
        f"no folder on a disk was found for the cache: {', '.join(seen) or 'there is no folder for temporary files'}. "
        "Files there are memory, so nothing would be freed: set TMPDIR, or give a `folder` on a disk in cache_config"
    )


def memory_type(folder: str) -> str | None:
    """The type of the file system of `folder` if its files are in memory ("tmpfs"), else None, also where unknown."""
    try:
        lines = os.fsdecode(_MOUNTS.read_bytes()).split("\n")  # as paths are decoded: their bytes may be any
    except OSError:  # not on Linux
        return None
    path, nearest, found = os.path.realpath(folder), "", None
    for line in lines:
        mount, _, system = (part.split(" ") for part in line.partition(" - "))
        if len(mount) < 5 or len(system) < 2:
            continue
        point = _unescaped(mount[4])
        is_inside = path == point or path.startswith(point.rstrip("/") + "/")
        if is_inside and len(point) >= len(nearest):  # of several mounts at one place the last one counts
            nearest, (kind, source) = point, system[:2]
            found = kind if kind in _MEMORY else f"{kind} in compressed memory" if "zram" in source else None
    return found


def _temporary() -> str | None:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # no folder can be written
        return None


def _unescaped(point: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point)


@functools.cache
def _warn_once(folder: str, kind: str) -> None:
    _logger.warning(
        "folder=%r is a %s: a cache there is in memory and not on a disk. Give a folder on a disk, or use "
        "residency='host'",
        folder,
        kind,
    )
