"""The matrix product of float32 linear layers on a CPU: torch's own (MKL), oneDNN, or the kernel of this package.

Which one is the fastest depends on the processor, the number of rows and the matrix's shape. All use the weights as
they are, without a copy; results differ by rounding.

The model is not changed. `torch.nn.Linear.forward` is replaced once per process by a function that does the same as the
original, unless the calling thread is in a step of the engine: then `active.table` selects the route of each product.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from typing import TypeAlias, TypeGuard

import torch
from torch import nn
from torch.nn import functional

from caches.platform.torch_api import has_onednn, parameters_of
from engine.kernels.linear_routes import (
    ALL_TORCH,
    ROW_LIMITS,
    ROW_NAMES,
    TORCH,
    Names,
    Route,
    Shape,
    fastest,
    routes,
    shape_of,
)

_ALL_ONEDNN: Names = ("onednn", "onednn", "swapped", "swapped", "swapped", "onednn", "onednn")


class Table:
    """The route of each product. names: by the matrix's shape; shapes that are not there use torch's own."""

    def __init__(self, names: dict[Shape, Names], routes: dict[str, Route]):
        self._names = names
        self._routes = {shape: [routes.get(name) for name in by_rows] for shape, by_rows in names.items()}
        buckets = zip(*self._routes.values(), strict=True)
        self._first = next((i for i, found in enumerate(buckets) if any(found)), len(ROW_NAMES))  # bucket with a route

    def __reduce__(self) -> tuple[Callable[..., Table], tuple[dict[Shape, Names]]]:
        return _with_known_routes, (self._names,)

    def route(self, shape: Shape, rows: int) -> Route | None:
        """The route for `rows` rows and a matrix of this shape; None for torch's own."""
        by_rows = self._routes.get(shape)
        return None if by_rows is None else by_rows[bisect_left(ROW_LIMITS, rows)]

    def for_step(self, rows: int) -> Table | None:
        """This table; None if products of up to `rows` rows are torch's own: looking each up costs 2 % of a step."""
        return self if bisect_left(ROW_LIMITS, rows) >= self._first else None

    def for_compiled_code(self) -> Table:
        """The same routes for compiled code: oneDNN stays, other products are the kernel's, or torch's own without one.
        torch's compiler has no transposed product, and compiled code rounds in another way anyway."""
        other = "kernel" if "kernel" in routes() else TORCH
        names = {
            shape: tuple(name if name == "onednn" else other for name in by_rows)
            for shape, by_rows in self._names.items()
        }
        return _with_known_routes(names)

    def __str__(self) -> str:
        """The routes by rows, and by shape if shapes differ."""
        by_routes = defaultdict(list)
        for shape, names in sorted(self._names.items()):
            by_routes[_in_short(names)].append("x".join(map(str, shape)))
        if len(by_routes) == 1:
            return next(iter(by_routes))
        return "; ".join(f"{' '.join(shapes)}: {text}" for text, shapes in by_routes.items())


def _with_known_routes(names: dict[Shape, Names]) -> Table:
    return Table(names, routes())


def _in_short(names: Names) -> str:
    if len(set(names)) == 1:
        return names[0]
    return ", ".join(f"{rows} {name}" for rows, name in zip(ROW_NAMES, names, strict=True))


def table_for(model: nn.Module, choice: str) -> Table | None:
    """The routes for a model; None if all products are torch's own. choice: see `configs.EngineConfig.linears`."""
    weights = [parameters_of(module).get("weight") for module in model.modules() if isinstance(module, nn.Linear)]
    shapes = {shape_of(weight) for weight in weights if _is_plain(weight) and weight.numel()}
    if not shapes or choice == "default" or (choice == "onednn" and not has_onednn()):
        return None
    if choice == "auto":
        names = {shape: by_rows for shape, by_rows in fastest(shapes).items() if by_rows != ALL_TORCH}
        if not names:
            return None
    else:
        names = dict.fromkeys(shapes, _ALL_ONEDNN)
    install()
    return Table(names, routes())


class _Active(threading.local):
    table: Table | None = None
    traced: bool = False


active = _Active()
"""`table`: the routes for this thread; None outside of the engine's steps, which reset it in a `finally`. `traced`:
whether code that is compiled takes them too."""

_Forward: TypeAlias = Callable[[nn.Linear, torch.Tensor], torch.Tensor]


def _replacement(original: _Forward) -> _Forward:
    """A `Linear.forward` that calls `original`, torch's or another library's, unless a route is active."""

    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_scripting():
            return functional.linear(input, self.weight, self.bias)
        else:  # noqa: RET505 - TorchScript does not compile this branch
            return _routed(original, self, input)

    # Pickles refer to it by these names: they load torch's own forward without this package.
    forward.__module__, forward.__qualname__ = nn.Linear.__module__, "Linear.forward"
    return forward


def _routed(original: _Forward, layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    table = active.table
    if table is None or (torch.compiler.is_compiling() and not active.traced):
        return original(layer, input)
    parameters = parameters_of(layer)
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if not _is_plain(weight):
        return original(layer, input)
    outs, width = weight.shape
    route = table.route((outs, width), input.numel() // width) if width else None
    if route is None or not _can_be_routed(input):
        return original(layer, input)
    if not (_is_plain(bias) or (bias is None and "bias" in parameters)):  # a computed bias
        return original(layer, input)
    return route(input, weight, bias)


def install() -> None:
    """Replace torch's `Linear.forward`. That of another library stays: it calls torch's, or computes something else."""
    current = nn.Linear.forward
    if getattr(current, "__globals__", None) is vars(torch.nn.modules.linear):
        nn.Linear.forward = _replacement(current)  # type: ignore[method-assign, assignment]


def _is_plain(weight: torch.Tensor | None) -> TypeGuard[nn.Parameter]:
    # Quantized and distributed weights are tensor subclasses, which may report float32. Traced weights are subclasses
    # too; `LayerStep` has looked at the types of the real ones.
    if weight is None or (type(weight) is not nn.Parameter and not active.traced):
        return False
    return weight.is_cpu and weight.dtype is torch.float32


def _can_be_routed(input: torch.Tensor) -> bool:
    """The routes have no derivatives and do not support autocast."""
    if (type(input) is not torch.Tensor and not active.traced) or input.dtype is not torch.float32:
        return False
    return input.is_cpu and input.numel() > 0 and not torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
