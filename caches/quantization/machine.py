"""What belongs to this machine alone: its processor, and the folder for what is compiled or measured on it."""

from __future__ import annotations

import functools
import os
import platform
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

_FIELDS = ("model name", "flags", "features", "cpu implementer", "cpu part", "cpu variant")
# By system: the variable that names the folder, and where in the user's home it is otherwise.
_USER_CACHES = {"win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("XDG_CACHE_HOME", "Library/Caches")}


def cache_folder() -> Path:
    """`$KVENGINE_CACHE`, else `kvengine` in the user's cache folder of this system. It may not exist yet.

    Raises `OSError` where the user has no home.
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
    """The model of the processor and the instructions it has, as the system states them."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = (line.partition(":") for line in first.splitlines())
    found = {name.strip().lower(): value.strip() for name, _, value in lines}
    return "\n".join(found[name] for name in _FIELDS if name in found) or platform.machine()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that other processes see whole or not at all. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
