"""The package's C++ operators, below `torch.ops.kvengine`: a library that the installation has built.

There is one for each kind of processor, and the best that this one can run is loaded. Without a library torch computes.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable
from hashlib import sha256
from logging import getLogger
from pathlib import Path
from typing import Any

import torch

from caches.platform.machine import processor
from configs import ConfigError

HALF_PRECISION = (torch.bfloat16, torch.float16)
"""The data types in which another order of sums is another text near ties."""

DTYPES = (torch.float32, *HALF_PRECISION)
"""The data types of tensors that operators read as numbers."""

_FOLDER = Path(__file__).parent
_SOURCES = _FOLDER.parents[1] / "native"  # in a checkout
_REMEDY = (
    "install the package once more where there is a C++ compiler (for example the package g++), with "
    "`pip install --no-build-isolation`, or leave it out"
)
_lock = threading.Lock()
_outcome: list[str | None] = []  # why there is no library, or None, once it was asked for


class Operators:
    """The operators of one file of the library. needed_by: what asks for them, for messages. finish: called once, when
    they are there."""

    def __init__(self, needed_by: str, finish: Callable[[], None] = lambda: None):
        self._needed_by, self._finish = needed_by, finish
        self._is_finished = False

    def or_none(self) -> Any:
        """The operators; None where there is no library that can be loaded."""
        if not (self._is_finished and _outcome):  # no more than this is traced
            self._prepare()
        return torch.ops.kvengine if _outcome[0] is None else None

    def or_error(self) -> Any:
        """The operators. Raises `ConfigError` where there is no library that can be loaded."""
        operators = self.or_none()
        if operators is None:
            raise ConfigError(f"{self._needed_by} needs the kernels of the package, and {_outcome[0]}: {_REMEDY}")
        return operators

    def _prepare(self) -> None:
        with _lock:
            if not _outcome:
                _outcome.append(_load())
            if not self._is_finished and _outcome[0] is None:
                self._finish()
            self._is_finished = True


def _load() -> str | None:
    """Load the library; why there is none, or None where it is loaded."""
    reason = "they were not built when it was installed"
    if any(_FOLDER.glob("kernels-*.so")):
        reason = "those that were built are of other sources or for other processors"
    for path in _libraries():
        try:
            torch.ops.load_library(str(path))
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # compiled layers call its C functions
        except OSError as error:
            reason = f"{path.name} cannot be loaded ({error.__cause__ or error})"
        else:
            return None
    getLogger("engine").debug("no kernels: %s", reason)
    return reason


def _libraries() -> list[Path]:
    """Those for this processor, the best first: of the best kind, and of these the one built with this torch."""
    release = torch.__version__.partition("+")[0]
    libraries = [path.stem.split("-", 3) for path in _FOLDER.glob("kernels-*.so")]
    if (_SOURCES / "products.cpp").is_file() and (_SOURCES / "build.py").is_file():  # they may have changed since
        digest = _digest_of_sources()
        libraries = [library for library in libraries if library[1] == digest]
    supported = _kinds()
    fitting = sorted(
        (supported.index(instructions), built_with != release, f"{name}-{digest}-{built_with}-{instructions}.so")
        for name, digest, built_with, instructions in libraries
        if instructions in supported
    )
    return [_FOLDER / name for _, _, name in fitting]


def _digest_of_sources() -> str:
    """As in native/build.py."""
    files = sorted([*_SOURCES.rglob("*.cpp"), *_SOURCES.rglob("*.h"), _SOURCES / "build.py"])
    return sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _kinds() -> list[str]:
    """The kinds of native/build.py that this processor can run, the best first."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return [platform.machine().lower()]
    capability, flags = torch.backends.cpu.get_cpu_capability(), set(processor().split())
    if capability not in ("AVX2", "AVX512"):
        return []
    if capability == "AVX2":
        return ["avx2"]
    if {"avx512_vnni", "avx512_bf16"} <= flags and processor().startswith("AMD"):
        return ["zen4", "avx2"]
    has_matrix_units = {"amx_tile", "amx_int8", "amx_bf16"} <= flags
    return [*(["amx"] if has_matrix_units else []), *(["vnni"] if "avx512_vnni" in flags else []), "avx512", "avx2"]
