"""The process that compiles layers: `python -m engine.compiling.package_builder JOB`, a file that `write_job` wrote.

Each layer's step becomes a package of torch's AOTInductor: machine code without weights, which any process binds to the
weights of a layer of that shape.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import nn

from caches.attention.kernels import KERNELS as ATTENTION_KERNELS
from caches.platform.machine import write_atomically
from caches.platform.torch_api import compile_package, state_without_hooks
from engine.compiling.layer_step import LayerStep, dynamic_shapes
from engine.kernels.linear_backend import RoutedLinears, Table, TracedLinear, active, changes
from engine.kernels.linear_kernels import join_products, kernels

LAYER = "layer."  # before the names of the weights in a package
_KEPT = 64  # elements: larger tensors come to the other process without their values


def write_job(path: Path, threads: int, linears: Table | None, steps: dict[Path, Any]) -> None:
    """steps: by the package's path the arguments of a `LayerStep`."""
    file = io.BytesIO()
    _Pickler(file).dump((threads, linears, steps))
    write_atomically(path, file.getvalue())


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.numel() > _KEPT:
            return _blank, (type(obj), tuple(obj.shape), obj.stride(), obj.dtype)
        if isinstance(obj, nn.Module):
            return _module, (type(obj), state_without_hooks(obj))
        return NotImplemented


def _blank(
    tensor_class: type[torch.Tensor], shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Any:
    tensor = torch.empty_strided(shape, stride, dtype=dtype)
    return nn.Parameter(tensor, requires_grad=False) if tensor_class is nn.Parameter else tensor


def _module(module_class: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    module = module_class.__new__(module_class)
    module.__dict__.update(state)
    return module


def failure_of(package: Path) -> Path:
    """The file with the reason why a package cannot be built."""
    return package.with_suffix(".failed")


def build(job: Path) -> None:
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
        compile_package(program, str(building), join_products)
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
