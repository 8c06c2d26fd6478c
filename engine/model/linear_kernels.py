"""Products of few rows with the weights of a linear layer, in C++ kernels (float32 inputs on a CPU).

They are compiled on first use, in about 3 s, once per machine. Without a compiler there are none.
"""

from __future__ import annotations

import threading
from logging import getLogger
from pathlib import Path
from typing import Any

import torch

from caches.quantization.kernel_build import load_operators
from configs import ConfigError

_SOURCE = Path(__file__).with_suffix(".cpp")
_lock = threading.Lock()  # operators are registered once
_found: list[bool] = []  # whether they could be loaded, once that is known


def kernels() -> Any:
    """The operators of `linear_kernels.cpp`; None if they cannot be compiled. Traceable after one call."""
    if not _found:
        _try_once()
    return torch.ops.kvengine if _found[0] else None


def _try_once() -> None:
    with _lock:
        if not _found:
            _found.append(_load())


def _load() -> bool:
    try:
        load_operators(_SOURCE, "The fastest product of linear layers")
    except ConfigError as error:
        getLogger("engine").debug(str(error))
        return False
    for name in ("linear", "int8_linear", "int4_linear"):
        torch.library.register_fake(f"kvengine::{name}", _empty_product)
    return True


def _empty_product(input: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return input.new_empty(input.shape[0], weight.shape[0])
