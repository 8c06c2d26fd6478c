"""The matrix product of linear layers, float32 on a CPU: torch's own, another operator, or a kernel of ours.

torch sends these products to MKL. On some processors oneDNN is faster, on others not, and it depends on the number of
rows and on the size of the matrix. All routes take the same plain weights: no second copy, results equal to rounding.
For one row, `gemv.cpp` reads the weights at the speed of memory; it has to be compiled first.

The model is not changed. `torch.nn.Linear.forward` is replaced once per process by a function that does what the one
before does, unless the calling thread is in a step of ours: then `active.table` says which route a product takes.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, TypeGuard

import torch
from torch import nn
from torch.nn import functional

from caches.quantization.kernel_build import compiled
from caches.torch_api import has_onednn, onednn_linear, parameters_of

Route: TypeAlias = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]
"""Of an input [..., width], a weight [outs, width] and a bias [outs] or None, both on the CPU -> [..., outs]."""

_GEMV = Path(__file__).with_name("gemv.cpp")
TORCH = "torch"
ROW_LIMITS = (1, 3, 8, 32)  # the most rows of each bucket but the last
_ROW_NAMES = ("1 row", "2-3", "4-8", "9-32", "more")
SIZE_LIMITS = (2**17, 2**22)  # numbers in a matrix: below, the size before. Small ones are torch's in any case
SIZES = ("small", "medium", "large")


def _swapped(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """oneDNN rearranges its second operand first: here that is the input, not the weight."""
    rows = input.reshape(-1, input.shape[-1]).contiguous()  # of a strided one oneDNN makes something 500 times slower
    return _with_bias(onednn_linear(weight, rows, None).T, input, bias)


def _mm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _with_bias(torch.mm(weight, input.reshape(-1, input.shape[-1]).T).T, input, bias)


def _with_bias(product: torch.Tensor, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = product.contiguous()
    if bias is not None:
        out += bias
    return out.view(*input.shape[:-1], -1)


def routes() -> dict[str, Route]:
    """What this torch has beside its own linear, by name."""
    found: dict[str, Route] = {"mm": _mm}
    if has_onednn():
        found |= {"onednn": onednn_linear, "swapped": _swapped}
    return found


class Table:
    """Which route each product takes. names: of every size and bucket of rows a name in `routes`, or "torch"."""

    def __init__(self, names: dict[str, tuple[str, ...]], routes: dict[str, Route]):
        self._names = names
        self._routes = [[routes.get(name) for name in names[size]] for size in SIZES]

    def route(self, numbers: int, rows: int) -> Route | None:
        """The route of a product of `rows` rows with a matrix of so many numbers; None: torch's own."""
        return self._routes[bisect_right(SIZE_LIMITS, numbers)][bisect_left(ROW_LIMITS, rows)]

    def __str__(self) -> str:
        """In short: the routes by rows, and by size where sizes differ."""
        texts = {size: _in_short(self._names[size]) for size in SIZES}
        if len(set(texts.values())) == 1:
            return texts[SIZES[0]]
        return "; ".join(f"{size}: {text}" for size, text in texts.items())


def _in_short(names: tuple[str, ...]) -> str:
    if len(set(names)) == 1:
        return names[0]
    return ", ".join(f"{rows} {name}" for rows, name in zip(_ROW_NAMES, names, strict=True))


_ALL_TORCH = (TORCH,) * len(_ROW_NAMES)
_ALL_ONEDNN = ("onednn", "onednn", "swapped", "swapped", "onednn")


def table_for(model: nn.Module, choice: str) -> Table | None:
    """The routes for a model, None for torch's own alone. choice: see `configs.EngineConfig.linears`.

    Raises `ConfigError` where the kernel of "gemv" cannot be compiled.
    """
    weights = [parameters_of(module).get("weight") for module in model.modules() if isinstance(module, nn.Linear)]
    sizes = {SIZES[bisect_right(SIZE_LIMITS, weight.numel())] for weight in weights if _is_plain(weight)}
    if not sizes or choice == "default" or (choice == "onednn" and not has_onednn()):
        return None
    known = routes()
    of_rows = _ALL_ONEDNN if has_onednn() else _ALL_TORCH
    if choice == "gemv":
        of_rows = ("gemv", *of_rows[1:])
        known["gemv"] = _compiled_gemv()
    names = dict.fromkeys(SIZES, of_rows)
    if choice == "auto":
        from engine.model.linear_timings import fastest  # which measures what stands here

        names = {size: fastest(size) if size in sizes and size != SIZES[0] else _ALL_TORCH for size in SIZES}
        if set(names.values()) == {_ALL_TORCH}:
            return None
    _install()
    return Table(names, known)


class _Active(threading.local):
    table: Table | None = None


active = _Active()
"""`table`: the routes of this thread's linear layers, None outside of our steps. It is reset in a `finally`."""

_Forward: TypeAlias = Callable[[nn.Linear, torch.Tensor], torch.Tensor]


def _replacing(own: _Forward) -> _Forward:
    """What stands in place of `own`: torch's, or what another library has put there."""

    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_scripting():
            return functional.linear(input, self.weight, self.bias)
        else:  # noqa: RET505 - which TorchScript does not read
            return _routed(own, self, input)

    # Pickles find it by these names, and then torch's own where this package is not.
    forward.__module__, forward.__qualname__ = nn.Linear.__module__, "Linear.forward"
    return forward


def _routed(own: _Forward, layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling() or active.table is None:
        return own(layer, input)
    own_parameters = parameters_of(layer)
    weight, bias = own_parameters.get("weight"), own_parameters.get("bias")
    if not _is_plain(weight) or not _can_be_routed(input):
        return own(layer, input)
    if not (_is_plain(bias) or (bias is None and "bias" in own_parameters)):  # it is computed
        return own(layer, input)
    numbers = weight.numel()
    route = active.table.route(numbers, input.numel() * weight.shape[0] // numbers) if numbers else None
    return own(layer, input) if route is None else route(input, weight, bias)


def _install() -> None:
    """Also over what another library has put there since, which may call an earlier one of ours."""
    own = nn.Linear.forward
    ours = _replacing(own)
    if getattr(own, "__code__", None) is not ours.__code__:
        nn.Linear.forward = ours  # type: ignore[method-assign, assignment]


def _is_plain(weight: torch.Tensor | None) -> TypeGuard[nn.Parameter]:
    # Quantized and distributed weights are tensors of types of their own, also where they say that they are float32.
    return type(weight) is nn.Parameter and weight.is_cpu and weight.dtype is torch.float32


def _can_be_routed(input: torch.Tensor) -> bool:
    """The other operators convert no types, as autocast does, and have no derivatives."""
    plain = type(input) is torch.Tensor and input.dtype is torch.float32 and input.is_cpu and input.numel() > 0
    return plain and not torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()


def _compiled_gemv() -> Route:
    gemv = compiled(_GEMV, "linears='gemv'").gemv
    of_others = onednn_linear if has_onednn() else functional.linear

    def route(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if weight.stride(1) != 1:
            return of_others(input, weight, bias)
        return _with_bias(gemv(weight, input), input, bias)

    return route
