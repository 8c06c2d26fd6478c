"""C++ that is compiled when it is first needed, once per machine."""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from caches.quantization.machine import cache_folder, processor
from configs import ConfigError

# As fast as with -ffast-math, but numbers that are not finite stay so, and no other code computes differently.
_FLAGS = ("-O3", "-march=native", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno")
_LIBRARY = ("-std=c++20", "-shared", "-fPIC")


@functools.cache
def compiled(source: Path, option: str) -> Any:
    """The functions of a C++ file, from the user's cache folder or compiled into it.

    The file is for one processor and one release of torch, of Python and of the C library, and is named after them. It
    is moved into place when it is whole: a compilation that is killed leaves nothing that another waits for, and two at
    once do not meet. One that cannot be loaded is compiled once more. Raises `ConfigError` where that is not possible,
    which names the option that asks for it.
    """
    name = f"kvengine_{source.stem}"
    for _ in range(2):
        try:
            path = _library(source, name)
        except OSError as error:
            raise _cannot_compile(option, str(error)) from error
        except subprocess.CalledProcessError as error:
            said = [line for line in error.stderr.splitlines() if "error" in line]
            why = said[0] if said else f"it ended with {error.returncode}"
            raise _cannot_compile(option, f"{error.cmd[0]}: {why}") from error
        try:
            return _loaded(name, path)
        except (ImportError, OSError) as error:
            refused = error
            with suppress(OSError):
                path.unlink()
    raise ConfigError(
        f"{option} has compiled kernels that cannot be loaded: {refused}. Choose the compiler that belongs to this "
        "Python and its torch with the variable CXX, or leave it out"
    ) from refused


def _loaded(name: str, path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _cannot_compile(option: str, why: str) -> ConfigError:
    return ConfigError(
        f"{option} needs a C++ compiler, to compile its kernels once: {why}. Install one (for example the package "
        "g++), or leave it out"
    )


def _library(source: Path, name: str) -> Path:
    """The path of the compiled file. Raises `OSError` and `subprocess.CalledProcessError`."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    options = [*_FLAGS, *_threads(), *_LIBRARY, abi, f"-DTORCH_EXTENSION_NAME={name}"]
    releases = [torch.__version__, sys.version, *platform.libc_ver()]
    known = [source.read_text(), *options, *_compiler(), processor(), *releases]
    key = sha256("\0".join(known).encode()).hexdigest()[:16]
    folder = _writable_folder()
    path = folder / f"{name}_{key}.so"
    if path.exists():
        return path
    building = Path(tempfile.mkdtemp(dir=folder, prefix=".building-"))
    try:
        made = building / path.name
        command = [*_compiler(), *options, *_paths(), str(source), "-o", str(made), *_libraries()]
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(made, path)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return path


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "c++")


def _threads() -> list[str]:
    # torch's own threads. Elsewhere compilers have no OpenMP, and one thread does the work.
    return ["-fopenmp"] if sys.platform == "linux" else []


def _paths() -> list[str]:
    from torch.utils import cpp_extension  # which is slow to import

    places = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    return [f"-isystem{place}" for place in places]


def _libraries() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [f"-L{folder}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", *undefined]


def _writable_folder() -> Path:
    """The user's cache folder for this machine, or a folder of this process alone."""
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
