"""How much memory is free: of a device, of the host, of a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from caches import CapacityError
from caches.memory.folders import disk_folder

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Free:
    """Bytes that are free; None where that is unknown. On a CPU the host's memory is the device's."""

    device: int | None
    host: int | None
    disk: int | None


def find_free(device: torch.device, folder: str | None = None) -> Free:
    """What is free on a device, in host memory and in `folder` (default: that of caches on disk)."""
    host = _host_bytes()
    on_device = host if device.type == "cpu" else _device_bytes(device)
    try:
        disk = shutil.disk_usage(disk_folder(folder)).free
    except CapacityError:  # no folder is on a disk
        disk = 0
    except OSError:
        disk = None
    return Free(on_device, host, disk)


def _device_bytes(device: torch.device) -> int | None:
    """What the device has left, and what torch holds of it without using it."""
    module = torch.get_device_module(device)
    if not module.is_available():  # a run on another machine is planned
        return None
    if hasattr(module, "mem_get_info"):
        free, _ = module.mem_get_info(device)
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return int(free + max(0, unused))
    if hasattr(module, "recommended_max_memory"):  # mps
        return int(module.recommended_max_memory() - module.driver_allocated_memory())
    return None


def _host_bytes() -> int | None:
    """What the machine has left, or the limits of this process and of its group leave it, whichever is least."""
    return min((free for free in (*_of_machine(), *_of_groups(), *_of_limits())), default=None)


def _of_machine() -> Iterator[int]:
    known = _numbers(Path("/proc/meminfo"), ":")
    if "MemAvailable" in known:
        yield 1024 * known["MemAvailable"]
    elif hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        yield os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
        kind = next((kind for kind in names if kind in controllers.split(",")), None)
        if kind is None:
            continue
        limit_name, used_name, idle_name, root = names[kind]
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is not None and used is not None:
                # Pages of files that are not in use are given back when others are wanted.
                yield max(0, limit - used + _numbers(group / "memory.stat", " ").get(idle_name, 0))
            if group == root:
                break


def _of_limits() -> Iterator[int]:
    """RLIMIT_DATA and RLIMIT_AS, less what this process has taken of them."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    taken = _numbers(Path("/proc/self/status"), ":")
    for limit, name in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY and name in taken:
            yield max(0, most - 1024 * taken[name])


def _number(file: Path) -> int | None:
    """The number in a file, None where there is none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _numbers(file: Path, mark: str) -> dict[str, int]:
    """Lines of a name, a mark and a number."""
    try:
        lines = [line.partition(mark) for line in file.read_text().splitlines()]
    except OSError:
        return {}
    found = {name: rest.split() for name, _, rest in lines}
    return {name: int(rest[0]) for name, rest in found.items() if rest and rest[0].isdigit()}
