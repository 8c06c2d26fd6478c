"""The folder for a cache on disk, and whether its file system is in memory."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from caches.errors import CapacityError
from caches.platform.warn_once import warn_once

_MOUNTS = Path("/proc/self/mountinfo")
_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs")
_ALTERNATIVE = "/var/tmp"  # keeps its files across reboots, so it is on a disk


def disk_folder(folder: str | None = None) -> str:
    """`folder`, or the default: `tempfile`'s folder (set by TMPDIR), or /var/tmp if that is in memory.

    A given folder is used even if it is in memory, with a warning: it still frees GPU memory. Raises `CapacityError` if
    both defaults are in memory, since a cache there frees no host memory.
    """
    if folder is not None:
        fs_type = memory_type(folder)
        if fs_type is not None:
            warn_once(
                f"folder={folder!r} is a {fs_type}: a cache there is in memory, not on a disk. Give a folder on a "
                "disk, or use residency='host'",
                "caches",
            )
        return folder
    refused = []
    for candidate in (_temporary(), _ALTERNATIVE):
        if candidate is None or not os.path.isdir(candidate) or not os.access(candidate, os.W_OK):
            continue
        fs_type = memory_type(candidate)
        if fs_type is None:
            return candidate
        refused.append(f"{candidate} is a {fs_type}")
    raise CapacityError(
        f"no folder on a disk was found for the cache: {', '.join(refused) or 'no folder for temporary files exists'}. "
        "Files in memory would free nothing: set TMPDIR, or give a `folder` on a disk in cache_config"
    )


def memory_type(folder: str) -> str | None:
    """The type of the folder's file system if it is in memory, such as "tmpfs"; None if it is not, or unknown."""
    try:
        lines = os.fsdecode(_MOUNTS.read_bytes()).split("\n")  # not as UTF-8: paths may have any bytes
    except OSError:  # not on Linux
        return None
    path, nearest, memory = os.path.realpath(folder), "", None
    for line in lines:
        mount, _, system = (half.split(" ") for half in line.partition(" - "))
        if len(mount) < 5 or len(system) < 2:
            continue
        point = _unescaped(mount[4])
        is_inside = path == point or path.startswith(point.rstrip("/") + "/")
        if is_inside and len(point) >= len(nearest):  # of several mounts at one point the last one is visible
            nearest, (fs_type, source) = point, system[:2]
            memory = fs_type if fs_type in _MEMORY else f"{fs_type} in compressed memory" if "zram" in source else None
    return memory


def _temporary() -> str | None:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # no candidate is writable
        return None


def _unescaped(point: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
