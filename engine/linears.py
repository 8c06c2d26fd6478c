"""Linear layers on a CPU through oneDNN where that is faster than what torch picks by itself, or a kernel of our own.

torch sends float32 matrix products to MKL, which on some processors computes them at half of oneDNN's speed or less,
with one row as with thousands. oneDNN's operator takes the same plain weights: no second copy, no conversion, results
equal to rounding. Which one is faster is measured once per process, on a matrix that no cache holds. With one row both
leave a good part of the memory's bandwidth unused; `gemv.cpp` reads the weights as fast as they come, but has to be
compiled first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from caches.kernels import compiled

_GEMV = Path(__file__).with_name("gemv.cpp")
_SWAPPED = range(4, 33)  # rows


class Linears:
    """The linear layers of a model that can be routed: plain `nn.Linear`, float32, on the CPU.

    choice: "default" routes none, "onednn" all of them, "auto" all of them if oneDNN is faster here, "gemv" all of
    them, with one row through a kernel that is compiled now; raises `ConfigError` where that is not possible.
    """

    def __init__(self, model: nn.Module, choice: str):
        # The modules' own dictionaries: nn.Module's handling of attributes would take longer than the product.
        self._routes: list[tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = []
        if choice == "default" or (choice != "gemv" and not has_onednn()):
            return
        # An instance with a `forward` of its own has been wrapped by somebody (accelerate, adapters): left alone.
        plain = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in m.__dict__ and _fits(m)]
        if plain and (choice != "auto" or onednn_is_faster()):
            self._first = plain[0]
            through = _through_gemv if choice == "gemv" else _through_onednn
            self._routes = [(module.__dict__, through(module)) for module in plain]

    def __len__(self) -> int:
        return len(self._routes)

    def __enter__(self) -> None:
        """Within a `with` block the layers take their routes. Two threads may be in one: both set the same."""
        if self._routes and _fits(self._first):  # the model may have been moved
            for attributes, forward in self._routes:
                attributes.setdefault("forward", forward)  # it may have been wrapped since

    def __exit__(self, *raised: object) -> None:
        for attributes, forward in self._routes:
            if attributes.get("forward") is forward:
                attributes.pop("forward", None)


def _fits(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    # Quantized and distributed weights are tensors of types of their own, also where they say that they are float32.
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.float32


def _through_onednn(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    parameters = module._parameters
    product = torch.ops.mkldnn._linear_pointwise

    def linear(input: torch.Tensor) -> torch.Tensor:
        weight, bias = parameters["weight"], parameters["bias"]
        assert weight is not None
        rows = input.numel() // weight.shape[1]
        if rows not in _SWAPPED:
            return product(input, weight, bias, "none", [], "")
        # What stands in the place of the weight is rearranged first: better the few rows. A fifth to a third faster.
        out = product(weight, input.reshape(rows, -1), None, "none", [], "").T.contiguous()
        if bias is not None:
            out += bias
        return out.view(*input.shape[:-1], -1)

    return linear


def _through_gemv(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    parameters, gemv = module._parameters, compiled(_GEMV, "linears='gemv'").gemv
    of_rows = _through_onednn(module) if has_onednn() else partial(type(module).forward, module)

    def linear(input: torch.Tensor) -> torch.Tensor:
        weight, bias = parameters["weight"], parameters["bias"]
        assert weight is not None
        if input.numel() != weight.shape[1] or weight.stride(1) != 1:
            return of_rows(input)
        out = gemv(weight, input)
        if bias is not None:
            out += bias
        return out.view(*input.shape[:-1], -1)

    return linear


def has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def onednn_is_faster() -> bool:
    """Measured on 64 MB of weights and one row: about 0.2 s, once per process."""
    weight, row = torch.zeros(8192, 2048), torch.zeros(1, 2048)
    times = _median_times(
        lambda: nn.functional.linear(row, weight),
        lambda: torch.ops.mkldnn._linear_pointwise(row, weight, None, "none", [], ""),
    )
    return times > 1  # by however little: while others use the memory too, both wait for it


def _median_times(one: Callable[[], object], other: Callable[[], object], runs: int = 21) -> float:
    """How many times as long `one` takes, in turns with the other: a machine that does something else slows both."""
    return statistics.median(_seconds(one) / _seconds(other) for _ in range(runs))


def _seconds(compute: Callable[[], object]) -> float:
    begun = time.perf_counter()
    compute()
    return time.perf_counter() - begun
