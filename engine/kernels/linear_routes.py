"""The matrix products of linear layers other than torch's own, and which of them a shape of matrix has.

The kind of processor tells, unless `engine linears` has measured on this machine: its results, of float32, are kept in
a file. With a measurement per process, the results of a script would differ from run to run: routes differ by rounding,
and near a tie the choice is random.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import torch
from torch.nn import functional

from caches.platform.machine import cache_folder, multiplies, processor
from caches.platform.torch_api import has_onednn, onednn_linear
from engine.kernels.linear_kernels import kernels

Route: TypeAlias = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]
"""A matrix product: (input [..., width], weight [outs, width], bias [outs] or None) -> [..., outs], on the CPU."""

Shape: TypeAlias = tuple[int, int]
"""Of a matrix: (outs, width)."""

Names: TypeAlias = tuple[str, ...]
"""The name of a route, or "torch", for each bucket of rows."""

TORCH = "torch"
ROW_LIMITS = (1, 4, 8, 16, 32, 64)  # the most rows of each bucket; the last bucket has no limit
ROW_NAMES = ("1 row", "2-4", "5-8", "9-16", "17-32", "33-64", "more")
ALL_TORCH: Names = (TORCH,) * len(ROW_NAMES)

_MEASUREMENT = 14  # version of the method: results of other versions are ignored
_SMALL = 2**17  # elements: for smaller matrices calling a route takes as long as what it would save
_ALL_KERNEL: Names = ("kernel",) * len(ROW_NAMES)
_KERNEL_FOR_FEW: Names = (*_ALL_KERNEL[:-1], TORCH)
_WITHOUT_KERNEL: Names = (TORCH, "mm", "onednn", "swapped", "swapped", "onednn", TORCH)


def shape_of(weight: torch.Tensor) -> Shape:
    outs, width = weight.shape
    return outs, width


def _swapped(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The transposed product. oneDNN packs its second operand: here the small input, not the weight."""
    rows = input.reshape(-1, input.shape[-1]).contiguous()  # oneDNN is 500 times slower with a strided one
    return with_bias(onednn_linear(weight, rows, None).T, input, bias)


def mm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return with_bias(torch.mm(weight, input.reshape(-1, input.shape[-1]).T).T, input, bias)


def _kernel(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The kernel of `native/products.cpp`, once `kernels` has loaded it."""
    is_plain_bias = bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous())
    if weight.stride(1) != 1 or not is_plain_bias:
        return functional.linear(input, weight, bias)
    out: torch.Tensor = torch.ops.kvengine.linears(input.contiguous(), [weight], [] if bias is None else [bias])
    return out


def with_bias(product: torch.Tensor, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = product.contiguous()
    if bias is not None:
        out += bias
    return out.view(*input.shape[:-1], -1)


def routes() -> dict[str, Route]:
    """The routes other than torch's own that there are on this machine, by name."""
    by_name: dict[str, Route] = {"mm": mm}
    if kernels() is not None:
        by_name["kernel"] = _kernel
    if has_onednn():
        by_name |= {"onednn": onednn_linear, "swapped": _swapped}
    return by_name


def names_for(
    shapes: Iterable[Shape], measured: dict[Shape, Names] | None = None, dtype: torch.dtype = torch.float32
) -> dict[Shape, Names]:
    """For each shape and bucket of rows the name of a route, or "torch": what was measured (default: `stored`), or else
    what the kind of processor tells. Small matrices use torch's own. dtype: of the weights, one of `native.DTYPES`."""
    if dtype is torch.float32:
        measured, by_kind = stored() if measured is None else measured, _by_kind_of_processor()
    else:
        measured, by_kind = {}, _of_sixteen_bits(dtype)
    return {shape: measured.get(shape, by_kind) if is_large(shape) else ALL_TORCH for shape in shapes}


def is_large(shape: Shape) -> bool:
    """Whether a route can be faster than torch's own by more than its call takes."""
    return shape[0] * shape[1] >= _SMALL


def _by_kind_of_processor() -> Names:
    """What measurements on processors of this kind agree on, to a tenth.

    The kernel is the fastest for up to 64 rows, on AMD's also for more. On Linux alone it has threads.
    """
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return ALL_TORCH
    if sys.platform == "linux" and "kernel" in routes():
        return _ALL_KERNEL if processor().startswith("AMD") else _KERNEL_FOR_FEW
    return _WITHOUT_KERNEL if has_onednn() else ALL_TORCH


def _of_sixteen_bits(dtype: torch.dtype) -> Names:
    """The kernel reads the weights as one stream. torch's own is taken for many rows where the processor multiplies the
    data type."""
    is_x86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if not is_x86 or sys.platform != "linux" or "kernel" not in routes():  # on Linux alone it has threads
        return ALL_TORCH
    return _KERNEL_FOR_FEW if multiplies(str(dtype).removeprefix("torch.")) else _ALL_KERNEL


def path() -> Path:
    """The file with the results for this machine. Raises `OSError` if the user has no home folder."""
    threads, names = torch.get_num_threads(), " ".join(routes())
    machine = f"{_MEASUREMENT}\n{processor()}\n{threads} threads\ntorch {torch.__version__}\n{names}"
    return cache_folder() / f"linears-{sha256(machine.encode()).hexdigest()[:16]}.json"


def stored() -> dict[Shape, Names]:
    """The results in the file, for this processor, number of threads, release of torch and list of routes; none if it
    cannot be read."""
    try:
        content = json.loads(path().read_text())
    except (OSError, ValueError):
        return {}
    known, results = (TORCH, *routes()), {}
    for text, names in content.items() if isinstance(content, dict) else ():
        outs, _, width = text.partition("x")
        is_valid = isinstance(names, list) and len(names) == len(ROW_NAMES) and all(name in known for name in names)
        if is_valid and outs.isdecimal() and width.isdecimal():
            results[int(outs), int(width)] = tuple(names)
    return results
