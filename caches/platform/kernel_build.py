"""Compiles a C++ file into operators of torch on first use, once per machine."""

from __future__ import annotations

import atexit
import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from logging import getLogger
from pathlib import Path
from typing import Any

import torch

from caches.platform.machine import cache_folder, once_per_machine, processor
from configs import ConfigError

# As fast as -ffast-math, but NaN and infinity keep their meaning and no other code changes its rounding.
_FLAGS = ("-O3", "-march=native", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno")
_NOT_MAPPED = "failed to map segment"  # by the loader, where memory is out or the folder's files may not be run
_LIBRARY = ("-std=c++20", "-shared", "-fPIC")


class Operators:
    """The operators of a C++ file, below `torch.ops.kvengine`: compiled when they are first asked for.

    needed_by: what asks for them, for messages. finish: called once, when they are registered.
    """

    def __init__(self, source: Path, needed_by: str, finish: Callable[[], None] = lambda: None):
        self._source, self._needed_by, self._finish = source, needed_by, finish
        self._lock = threading.Lock()
        self._outcome: list[ConfigError | None] = []  # once they have been asked for

    def or_none(self) -> Any:
        """The operators; None where they cannot be compiled, which is tried once per process."""
        return torch.ops.kvengine if self._error() is None else None

    def or_error(self) -> Any:
        """The operators. Raises `ConfigError` where they cannot be compiled."""
        error = self._error()
        if error is not None:
            raise error
        return torch.ops.kvengine

    def if_loaded(self) -> Any:
        """The operators if they are there already, without compiling."""
        return torch.ops.kvengine if self._outcome and self._outcome[0] is None else None

    @property
    def is_expected(self) -> bool:
        """Whether they are there or a compiler is, without compiling."""
        return self._outcome[0] is None if self._outcome else shutil.which(_compiler()[0]) is not None

    def _error(self) -> ConfigError | None:
        if not self._outcome:
            with self._lock:
                if not self._outcome:
                    self._outcome.append(self._load())
        return self._outcome[0]

    def _load(self) -> ConfigError | None:
        try:
            load_operators(self._source, self._needed_by)
        except ConfigError as error:
            getLogger("engine").debug(str(error))
            return error
        self._finish()
        return None


def load_operators(source: Path, option: str) -> None:
    """Register the operators of a C++ file, from a library in the user's cache folder or compiled into it.

    The library's name has a hash of the source and its headers, the compiler, its options, the processor and the
    releases of torch, Python and the C library, and one of its own content. It is renamed into place when complete, so
    processes never see half of it. A library that is damaged or cannot be loaded is compiled once more, but not where
    memory is out.

    option: what needs them, for messages. Raises `ConfigError` if it cannot be compiled or loaded.
    """
    name = f"kvengine_{source.stem}"
    for _ in range(2):
        try:
            path = _library(source, name)
        except OSError as error:
            raise _cannot_compile(option, str(error)) from error
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if "error" in line]
            why = lines[0] if lines else f"exit code {error.returncode}"
            raise _cannot_compile(option, f"{error.cmd[0]}: {why}") from error
        try:
            torch.ops.load_library(str(path))
            return
        except OSError as error:
            refused = error
            if _NOT_MAPPED in str(error.__cause__ or error):  # the file is whole: another would not be mapped either
                break
            with suppress(OSError):
                path.unlink()
    raise ConfigError(
        f"{option} needs kernels that were compiled but cannot be loaded: {refused.__cause__ or refused}. Set the "
        "variable CXX to the compiler that fits this Python and its torch, free memory, or leave it out"
    ) from refused


def _cannot_compile(option: str, why: str) -> ConfigError:
    return ConfigError(
        f"{option} needs a C++ compiler, to compile its kernels once: {why}. Install one (for example the package "
        "g++), or leave it out"
    )


def _library(source: Path, name: str) -> Path:
    """The path of the compiled file. Raises `OSError` and `subprocess.CalledProcessError`."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    options = [*_FLAGS, *_threads(), *_LIBRARY, abi]
    releases = [torch.__version__, sys.version, *platform.libc_ver()]
    inputs = [*_texts(source), *options, *_compiler(), processor(), *releases]
    key = sha256("\0".join(inputs).encode()).hexdigest()[:16]
    folder = _writable_folder()
    for path in folder.glob(f"{name}_{key}_*.so"):
        with suppress(FileNotFoundError):  # another process has found it damaged
            if path.stem.endswith(f"_{_digest(path)}"):
                return path
            path.unlink()  # loading it would end the process with a bus error
    if shutil.which(_compiler()[0]) is not None:
        once_per_machine.info("compiling kernels for this machine, once")
    building = Path(tempfile.mkdtemp(dir=folder, prefix=".building-"))
    try:
        library = building / f"{name}.so"
        command = [*_compiler(), *options, *_paths(), str(source), "-o", str(library), *_libraries()]
        subprocess.run(command, check=True, capture_output=True, text=True)
        with library.open("rb+") as file:
            os.fsync(file.fileno())
        path = folder / f"{name}_{key}_{_digest(library)}.so"
        os.replace(library, path)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return path


def _texts(source: Path) -> list[str]:
    """Of a file and of those that it includes by a name in quotes, once each."""
    found: dict[Path, str] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop().resolve()
        if path not in found:
            found[path] = path.read_text()
            waiting += [path.parent / name for name in re.findall(r'^#include "([^"]+)"', found[path], re.MULTILINE)]
    return list(found.values())


def _digest(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()[:16]


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "c++")


def _threads() -> list[str]:
    # torch's thread pool uses OpenMP on Linux; other systems' compilers lack it, and kernels run in one thread.
    return ["-fopenmp"] if sys.platform == "linux" else []


def _paths() -> list[str]:
    return [f"-isystem{Path(torch.__file__).parent / 'include'}"]


def _libraries() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [f"-L{folder}", "-lc10", "-ltorch_cpu", "-ltorch", *undefined]


def _writable_folder() -> Path:
    """The user's cache folder, or a temporary folder of this process if that cannot be written."""
    with suppress(OSError):
        folder = cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return _folder_of_this_process()


@functools.cache
def _folder_of_this_process() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="kvengine-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
