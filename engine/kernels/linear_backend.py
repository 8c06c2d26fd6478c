"""The matrix product of linear layers on a CPU, in float32, bfloat16 or float16: torch's own (MKL), oneDNN, or the
kernel of this package.

Which one is the fastest depends on the processor, the number of rows and the matrix's shape. All use the weights as
they are, without a copy; results differ by rounding.

torch is not changed, and the model only while a step of the engine computes: then its linear layers are of the class
`RoutedLinear`, which takes the route of each product from `active`. Their attributes stay as they are, and copies and
pickles that are made meanwhile have torch's class. Other threads compute as without it.
"""

from __future__ import annotations

import operator
import threading
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from functools import partial
from itertools import compress, repeat
from typing import Any, NamedTuple, TypeAlias, TypeGuard, cast
from weakref import ref

import torch
from torch import nn

from caches.platform.native import DTYPES
from caches.platform.torch_api import has_onednn, parameters_of
from engine.kernels.linear_routes import (
    ALL_TORCH,
    ROW_LIMITS,
    ROW_NAMES,
    TORCH,
    Names,
    Route,
    Shape,
    names_for,
    routes,
    shape_of,
)

_ALL_ONEDNN: Names = ("onednn", "onednn", "swapped", "swapped", "swapped", "onednn", "onednn")


Matrix: TypeAlias = tuple[torch.dtype, Shape]
"""What the weights of a layer are: their data type and shape."""


class Routes(NamedTuple):
    """Of one matrix. dtype: of its weights. by_rows: the route for each bucket of rows; None for torch's own."""

    dtype: torch.dtype
    by_rows: list[Route | None]


class Table:
    """The route of each product. names: by the matrix; matrices that are not there use torch's own."""

    def __init__(self, names: dict[Matrix, Names], routes: dict[str, Route]):
        self._names = names
        self.routes = {
            (dtype, shape): Routes(dtype, [routes.get(name) for name in by_rows])
            for (dtype, shape), by_rows in names.items()
        }

    def __reduce__(self) -> tuple[Callable[..., Table], tuple[dict[Matrix, Names]]]:
        return _with_known_routes, (self._names,)

    def for_compiled_code(self) -> Table:
        """The same routes for compiled code: oneDNN stays, other products are the kernel's, or torch's own without one.
        torch's compiler has no transposed product, and compiled code rounds in another way anyway."""
        other = "kernel" if "kernel" in routes() else TORCH
        names = {
            matrix: tuple(name if name == "onednn" else other for name in by_rows)
            for matrix, by_rows in self._names.items()
        }
        return _with_known_routes(names)

    def __repr__(self) -> str:
        """Everything that the routes of a layer follow from."""
        return f"Table({sorted(map(str, self._names.items()))})"

    def __str__(self) -> str:
        """The routes by rows, and by shape if matrices differ."""
        by_routes = defaultdict(list)
        for (_, shape), names in sorted(self._names.items(), key=lambda item: item[0][1]):
            by_routes[_in_short(names)].append("x".join(map(str, shape)))
        if len(by_routes) == 1:
            return next(iter(by_routes))
        return "; ".join(f"{' '.join(shapes)}: {text}" for text, shapes in by_routes.items())


def _with_known_routes(names: dict[Matrix, Names]) -> Table:
    return Table(names, routes())


def _in_short(names: Names) -> str:
    if len(set(names)) == 1:
        return names[0]
    return ", ".join(f"{rows} {name}" for rows, name in zip(ROW_NAMES, names, strict=True))


def _is_plain(weight: torch.Tensor | None) -> TypeGuard[nn.Parameter]:
    return type(weight) is nn.Parameter and weight.is_cpu and weight.dtype in DTYPES and weight.numel() > 0


def table_for(model: nn.Module, choice: str) -> Table | None:
    """The routes for a model; None if all products are torch's own. choice: see `configs.EngineConfig.linears`."""
    weights = [parameters_of(module).get("weight") for module in model.modules() if isinstance(module, nn.Linear)]
    if choice == "default" or (choice == "onednn" and not has_onednn()):
        return None
    by_type = defaultdict[torch.dtype, set[Shape]](set)
    for weight in filter(_is_plain, weights):
        by_type[weight.dtype].add(shape_of(weight))
    names: dict[Matrix, Names] = {}
    for dtype, shapes in by_type.items():
        if choice == "auto":
            by_shape = names_for(shapes, dtype=dtype)
        else:
            by_shape = dict.fromkeys(shapes, _ALL_ONEDNN) if dtype is torch.float32 else {}
        names |= {(dtype, shape): by_rows for shape, by_rows in by_shape.items() if by_rows != ALL_TORCH}
    return Table(names, routes()) if names else None


class _ActiveRoutes(threading.local):
    routes: dict[nn.Module, Routes] | None = None


active = _ActiveRoutes()
"""`routes`: those of the layers of the step that this thread computes; None outside of steps, which reset it in a
`finally`."""

_Change: TypeAlias = Callable[[], object]
_set_class: Callable[[nn.Module, type[nn.Module]], None] = object.__dict__["__class__"].__set__


class RoutedLinear(nn.Linear):
    """A linear layer while a step computes. Its `__class__`, copies and pickles are those of an `nn.Linear`."""

    __class__ = property(lambda layer: nn.Linear, _set_class)

    def __reduce_ex__(self, protocol: Any) -> Any:
        construct, (_, *arguments), *state = cast(Any, nn.Linear.__reduce_ex__(self, protocol))
        return construct, (nn.Linear, *arguments), *state

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The one call of Python that a product takes. The routes of the layer alone are known before: weights may be
        replaced, moved, quantized (as subclasses, which may report float32) or computed, and code of the model may turn
        on derivatives or autocast, which routes do not support."""
        if (
            torch.compiler.is_dynamo_compiling()
        ):  # code that layers share must not read the routes, which differ by layer
            return nn.Linear.forward(self, input)
        routes, parameters = active.routes, parameters_of(self)
        weight, bias = parameters.get("weight"), parameters.get("bias", False)  # False: it is computed
        if (
            routes is not None
            and type(input) is torch.Tensor
            and type(weight) is nn.Parameter
            and (of_layer := routes.get(self)) is not None
            and input.dtype is weight.dtype is of_layer.dtype
            and weight.is_cpu
            and (bias is None or (type(bias) is nn.Parameter and bias.dtype is weight.dtype and bias.is_cpu))
            and (rows := input.numel() // self.in_features)
            and (route := of_layer.by_rows[bisect_left(ROW_LIMITS, rows)]) is not None
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        ):
            return route(input, weight, bias)
        return nn.Linear.forward(self, input)


class TracedLinear(RoutedLinear):
    """A linear layer of code that is compiled. Its tensors stand for those that `LayerStep` has looked at."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        routes, parameters = active.routes, parameters_of(self)
        weight = parameters.get("weight")
        of_layer = None if routes is None else routes.get(self)
        if of_layer is not None and weight is not None and "bias" in parameters:
            route = of_layer.by_rows[bisect_left(ROW_LIMITS, input.numel() // self.in_features)]
            if route is not None and input.dtype is weight.dtype is of_layer.dtype:
                return route(input, weight, parameters["bias"])
        return nn.Linear.forward(self, input)


class RoutedLinears:
    """The linear layers of a model whose products have routes. They are not kept alive: others may replace them."""

    def __init__(self, model: nn.Module, table: Table):
        self._layers: list[tuple[ref[nn.Module], Routes, int]] = []  # the first bucket of rows that has a route
        for module in model.modules():
            weight = parameters_of(module).get("weight") if type(module) is nn.Linear else None
            of_layer = None if weight is None else table.routes.get(cast(Matrix, (weight.dtype, weight.shape)))
            if of_layer is not None:
                first = next((bucket for bucket, route in enumerate(of_layer.by_rows) if route), None)
                if first is not None:
                    self._layers.append((ref(module), of_layer, first))

    def of_step(self, rows: int | None = None) -> dict[nn.Module, Routes]:
        """The routes of those that have one for products of up to `rows` rows (None: any number), and are of torch's
        class, as between steps. None of them where another library has replaced the forward of that class."""
        if getattr(nn.Linear.forward, "__globals__", None) is not vars(torch.nn.modules.linear):
            return {}
        last = len(ROW_LIMITS) if rows is None else bisect_left(ROW_LIMITS, rows)
        return {layer: of_layer for reference, of_layer, first in self._layers
                if first <= last and type(layer := reference()) is nn.Linear}  # fmt: skip


def changes(layers: Collection[nn.Module], routed: type[nn.Linear]) -> tuple[_Change, _Change]:
    """Functions that change the class of these layers of torch's class to `routed`, and back.

    Each is C code, which Ctrl-C does not stop halfway. Layers that are of another class by then stay as they are.
    """
    are_routed = map(operator.is_, map(type, layers), repeat(routed))
    there = map(_set_class, layers, repeat(routed))
    back = map(_set_class, compress(layers, are_routed), repeat(nn.Linear))
    run: Callable[..., object] = deque
    return partial(run, there, 0), partial(run, back, 0)
