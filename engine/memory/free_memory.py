"""How much memory is free: of a device, of the host, of a folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from caches import CapacityError
from caches.memory.folders import disk_folder
from caches.platform.host_allocator import give_back_freed_memory

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Free:
    """Bytes that are free; None where that is unknown. On a CPU the host's memory is the device's."""

    device: int | None
    host: int | None
    disk: int | None


def find_free(device: torch.device, folder: str | None = None) -> Free:
    """What is free on a device, in host memory and in `folder` (default: that of caches on disk)."""
    give_back_freed_memory()
    # What the machine has left, or the limits of this process and of its group leave it, whichever is least.
    limits = _of_limits()
    host = min(psutil.virtual_memory().available, *_of_groups(), *limits.values())
    on_device = host if device.type == "cpu" else _device_bytes(device)
    try:
        disk = shutil.disk_usage(disk_folder(folder)).free
        disk = min(disk, limits.get("addresses", disk))  # a file is mapped
    except CapacityError:  # no folder is on a disk
        disk = 0
    except OSError:
        disk = None
    return Free(on_device, host, disk)


def _device_bytes(device: torch.device) -> int | None:
    """What the device has left, and what torch holds of it without using it."""
    try:
        module = torch.get_device_module(device)
    except RuntimeError:  # torch has none for this kind, such as "meta"
        return None
    if not module.is_available():  # a run on another machine is planned
        return None
    if hasattr(module, "mem_get_info"):
        free, _ = module.mem_get_info(device)
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return int(free + max(0, unused))
    if hasattr(module, "recommended_max_memory"):  # mps
        return int(module.recommended_max_memory() - module.driver_allocated_memory())
    return None


def _of_groups() -> Iterator[int]:
    """Of the control groups that this process is in, and those that they are in: both versions of them."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    names = {"": ("memory.max", "memory.current", "inactive_file", _CGROUPS)}
    names["memory"] = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", _CGROUPS / "memory")
    for line in lines:
        _, controllers, path = line.split(":", 2)
        controller = next((controller for controller in names if controller in controllers.split(",")), None)
        if controller is None:
            continue
        limit_name, used_name, idle_name, root = names[controller]
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is not None and used is not None:
                # Pages of files that are not in use are given back when others are wanted.
                yield max(0, limit - used + (_number(group / "memory.stat", f"^{idle_name} ") or 0))
            if group == root:
                break


def _of_limits() -> dict[str, int]:
    """What RLIMIT_DATA ("data") and RLIMIT_AS ("addresses") leave this process, where there are such limits."""
    if not hasattr(psutil, "RLIMIT_DATA"):  # not on macOS and Windows
        return {}
    process = psutil.Process()
    memory, remaining = process.memory_info(), {}
    for name, limit, used in (("data", psutil.RLIMIT_DATA, memory.data), ("addresses", psutil.RLIMIT_AS, memory.vms)):
        max_bytes, _ = process.rlimit(limit)
        if max_bytes != psutil.RLIM_INFINITY:
            remaining[name] = max(0, max_bytes - used)
    return remaining


def _number(file: Path, prefix: str = r"\A\s*") -> int | None:
    """The number at the end of a line that begins with `prefix`, None where there is none."""
    with suppress(OSError):
        if match := re.search(rf"{prefix}(\d+)\s*$", file.read_text(), re.MULTILINE):
            return int(match[1])
    return None
