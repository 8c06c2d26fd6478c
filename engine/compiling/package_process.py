"""The packages of compiled layers as files, and the start of the process that builds those that are missing."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
import transformers

from caches.platform.machine import cache_folder, processor
from caches.platform.undo import on_failure
from engine.compiling.compiled_layer import CompiledLayer
from engine.compiling.layer_step import LayerStep
from engine.compiling.package_builder import failure_of, write_job
from engine.errors import OptionError
from engine.kernels.linear_backend import Table

_FORMAT = 10  # of packages: those of other versions are ignored
_PRIORITY = 5  # a lower one costs more: every slice that it gets delays both threads of a product, for longer in all


def package_of(step: LayerStep, attention: str | None, linears: Table | None) -> Path:
    """The path of the package for a step, by everything that shapes it. attention: the model's implementation."""
    releases = [torch.__version__, transformers.__version__, sys.version]
    machine = [str(torch.get_num_threads()), processor()]
    products = linears and linears.for_compiled_code()
    fields = [str(_FORMAT), str(attention), *step.describe(), str(products), *machine, *releases]
    key = sha256("\0".join(fields).encode()).hexdigest()[:32]
    return cache_folder() / "layers" / f"{key}.pt2"


def check_can_be_built(packages: Iterable[Path], retries: bool) -> None:
    """Raise `OptionError` for a package that could not be built before, and where there is no compiler.

    retries: forget what could not be built before.
    """
    for package in packages:
        if retries:
            failure_of(package).unlink(missing_ok=True)
        elif failure_of(package).exists():
            raise OptionError(f"{failure_of(package).read_text()} (`engine compile` tries again)")
    compiler = shlex.split(os.environ.get("CXX") or "g++")[0]
    if shutil.which(compiler) is None:
        raise OptionError(f"there is no C++ compiler ({compiler}), for example of the package g++")


def why_failed(packages: Iterable[Path]) -> str:
    """Why the process has ended without these packages."""
    reasons = [failure_of(package).read_text() for package in packages if failure_of(package).exists()]
    return next(iter(reasons), "the process that compiles its layers ended")


def start_building(packages: Mapping[Path, CompiledLayer], linears: Table | None) -> subprocess.Popen[bytes]:
    """Start a process of low priority that builds the package of each of these layers, with their recorded calls."""
    folder = next(iter(packages)).parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, job = tempfile.mkstemp(dir=folder, suffix=".job")
    os.close(handle)
    steps = {package: (layer.module, layer.step_call) for package, layer in packages.items()}
    command = [sys.executable, "-m", "engine.compiling.package_builder", job]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with on_failure(partial(Path(job).unlink, missing_ok=True)):  # else that process removes the file
        write_job(Path(job), torch.get_num_threads(), linears, steps)
        builder = subprocess.Popen(
            command, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
    _give_way(builder.pid)
    threading.Thread(target=builder.wait, daemon=True).start()  # or it stays as a zombie
    return builder


def _give_way(process: int) -> None:
    """Lower a process's priority. At the lowest one it would not end while both processors generate."""
    with suppress(OSError, AttributeError):  # Windows has no priorities of this kind
        os.setpriority(os.PRIO_PROCESS, process, _PRIORITY)
