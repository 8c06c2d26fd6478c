"""Products of few rows with the weights of a linear layer, in C++ kernels (float32 inputs on a CPU).

They are compiled on first use, in about 3 s, once per machine. Without a compiler there are none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from caches.quantization.kernel_build import Operators


def kernels() -> Any:
    """The operators of `linear_kernels.cpp`; None if they cannot be compiled. Traceable after one call."""
    return _OPERATORS.or_none()


def _make_traceable() -> None:
    for name in ("linear", "int8_linear", "int4_linear"):
        torch.library.register_fake(f"kvengine::{name}", _empty_product)


def _empty_product(input: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return input.new_empty(input.shape[0], weight.shape[0])


_OPERATORS = Operators(Path(__file__).with_suffix(".cpp"), "The fastest product of linear layers", _make_traceable)
