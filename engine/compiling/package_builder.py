"""The packages of compiled layers as files, and the process that builds those that are missing.

That process is `python -m engine.compiling.package_builder JOB`, a file that `start_building` wrote. Each layer's step
becomes a package of torch's AOTInductor: machine code without weights, which any process binds to the weights of a
layer of that shape.
"""

from __future__ import annotations

import io
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import torch
import transformers
from filelock import FileLock
from torch import nn

from caches.attention.kernels import KERNELS as ATTENTION_KERNELS
from caches.attention.kernels import c_functions as attention_c_functions
from caches.platform.machine import cache_folder, processor, write_atomically
from caches.platform.torch_api import compile_package, state_without_hooks
from caches.platform.undo import on_failure
from engine.compiling.layer_step import Call, LayerStep, dynamic_shapes
from engine.errors import OptionError
from engine.kernels.linear_backend import RoutedLinears, Table, TracedLinear, active, changes
from engine.kernels.linear_kernels import c_functions, join_products, kernels

LAYER = "layer."  # before the names of the weights in a package
Steps: TypeAlias = "Mapping[Path, tuple[nn.Module, Call]]"
"""By the path of the package the arguments of a `LayerStep`."""

_FORMAT = 13  # of packages: those of other versions are ignored
_PRIORITY = 5  # a lower one costs more: every slice that it gets delays both threads of a product, for longer in all
_KEPT = 64  # elements: larger tensors come to the other process without their values


def package_of(step: LayerStep, attention: str | None, linears: Table | None) -> Path:
    """The path of the package for a step, by everything that shapes it. attention: the model's implementation."""
    releases = [torch.__version__, transformers.__version__, sys.version]
    machine = [str(torch.get_num_threads()), processor()]
    products = linears and linears.for_compiled_code()
    fields = [str(_FORMAT), str(attention), *step.describe(), repr(products), *machine, *releases]
    key = sha256("\0".join(fields).encode()).hexdigest()[:32]
    return cache_folder() / "layers" / f"{key}.pt2"


def failure_of(package: Path) -> Path:
    """The file with the reason why a package cannot be built."""
    return package.with_suffix(".failed")


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


def start_building(steps: Steps, linears: Table | None) -> subprocess.Popen[bytes]:
    """Start a process of low priority that builds these packages."""
    folder = next(iter(steps)).parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, job = tempfile.mkstemp(dir=folder, suffix=".job")
    os.close(handle)
    command = [sys.executable, "-m", "engine.compiling.package_builder", job]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with on_failure(partial(Path(job).unlink, missing_ok=True)):  # else that process removes the file
        content = io.BytesIO()
        _Pickler(content).dump((torch.get_num_threads(), linears, dict(steps)))
        write_atomically(Path(job), content.getvalue())
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


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: object) -> tuple[Callable[..., object], tuple[object, ...]]:
        if isinstance(obj, torch.Tensor) and obj.numel() > _KEPT:
            return _blank, (type(obj), tuple(obj.shape), obj.stride(), obj.dtype)
        if isinstance(obj, nn.Module):
            return _module, (type(obj), state_without_hooks(obj))
        return NotImplemented


def _blank(
    tensor_class: type[torch.Tensor], shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype)
    return nn.Parameter(tensor, requires_grad=False) if tensor_class is nn.Parameter else tensor


def _module(module_class: type[nn.Module], state: dict[str, object]) -> nn.Module:
    module = module_class.__new__(module_class)
    module.__dict__.update(state)
    return module


def build(job: Path) -> None:
    steps: Steps
    threads, linears, steps = pickle.loads(job.read_bytes())
    torch.set_num_threads(threads)
    kernels()  # before layers that use them are traced
    ATTENTION_KERNELS.or_none()  # have the operator for attention
    for package, (layer, call) in steps.items():
        try:
            with FileLock(package.with_suffix(".lock")):  # another process may build it now
                if not package.exists():
                    _build(LayerStep(layer, call), linears, package)
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            write_atomically(failure_of(package), f"{type(error).__name__}: {reason}".encode())


@torch.no_grad()
def _build(step: LayerStep, linears: Table | None, package: Path) -> None:
    routes = {} if linears is None else RoutedLinears(step, linears.for_compiled_code()).of_step()
    enter, leave = changes(routes, TracedLinear)
    try:
        active.routes = routes
        enter()
        program = torch.export.export(step, (step.inputs,), dynamic_shapes=(dynamic_shapes(step),), strict=False)
    finally:
        active.routes = None
        leave()
    unknown = [name for name in (*program.state_dict, *program.constants) if not name.startswith(LAYER)]
    if unknown:
        raise ValueError(f"the layer uses tensors that are neither parameters nor buffers: {', '.join(unknown)}")
    building = package.with_suffix(f".{os.getpid()}.pt2")
    try:
        compile_package(program, str(building), join_products, {**c_functions(), **attention_c_functions()})
        os.replace(building, package)
    finally:
        with suppress(OSError):
            building.unlink()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the process that generates
    job = Path(sys.argv[1])
    try:
        build(job)
    finally:
        with suppress(OSError):
            job.unlink()
