"""The machine's processor, and the folder for what is compiled or measured on it."""

from __future__ import annotations

import functools
import os
import platform
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

_FIELDS = ("model name", "flags", "features", "cpu implementer", "cpu part", "cpu variant")
# By system: the variable with the folder for caches, and its default below the user's home.
_USER_CACHES = {"win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("XDG_CACHE_HOME", "Library/Caches")}


def cache_folder() -> Path:
    """`$KVENGINE_CACHE`, or else `kvengine` in the system's folder for user caches. It may not exist yet.

    Raises `OSError` if the user has no home folder.
    """
    if chosen := os.environ.get("KVENGINE_CACHE"):
        return Path(chosen)
    name, below = _USER_CACHES.get(sys.platform, ("XDG_CACHE_HOME", ".cache"))
    if base := os.environ.get(name):
        return Path(base) / "kvengine"
    try:
        return Path.home() / below / "kvengine"
    except RuntimeError as error:
        raise OSError(str(error)) from error


@functools.cache
def processor() -> str:
    """The processor's model and instruction sets, as the system reports them."""
    try:
        section = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = (line.partition(":") for line in section.splitlines())
    fields = {name.strip().lower(): value.strip() for name, _, value in lines}
    return "\n".join(fields[name] for name in _FIELDS if name in fields) or platform.machine()


@functools.cache
def multiplies(dtype: str) -> bool:
    """Whether the processor has instructions that multiply numbers of 16 bits, "bfloat16" or "float16"."""
    return {"bfloat16": "avx512_bf16", "float16": "avx512_fp16"}.get(dtype) in processor().split()


def usable_processors() -> int:
    """How many processors the system lets this process use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def last_level_cache_bytes() -> int:
    """The size of the processor's largest cache; 0 where the system does not report it."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(file.read_text().strip().removesuffix("K")) * 1024)
    return max(sizes)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that other processes see all of it or nothing. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    finally:
        with suppress(OSError):  # else it has its name
            os.unlink(name)
