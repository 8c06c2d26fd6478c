"""Float32 in place of 16 bits, for trials of models whose rounding hides what they look for. Weights are not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from caches.platform.native import HALF_PRECISION
from caches.platform.torch_api import TorchDispatchMode, schema_of, tree_map

_WITHOUT_SUMS = (torch.ops.aten.embedding.default,)  # a whole table would be widened for a few rows
# These compare data types before operators are called.
_CHECKED = (torch.conv1d, torch.conv2d, torch.conv3d, torch.nn.functional.scaled_dot_product_attention)


@contextmanager
def in_full() -> Iterator[None]:
    """Within it operators compute in float32 where they would in 16 bits, and make tensors of float32.

    Views, and tensors that an operator writes to, keep their data type.
    """
    with _Functions(), _Operators():
        yield


class _Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        return func(*_widened(args), **_widened(options)) if func in _CHECKED else func(*args, **options)


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        options, schema = dict(kwargs or {}), schema_of(func)
        if func in _WITHOUT_SUMS:
            return func(*args, **options)
        if not any(argument.alias_info is not None for argument in schema.arguments):
            return func(*_widened(args), **_widened(options))
        if schema.is_mutable and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            args = (args[0], *_with(lambda _: args[0].dtype, args[1:]))
        return func(*args, **options)


def _widened(values: Any) -> Any:
    return _with(lambda dtype: torch.float32 if dtype in HALF_PRECISION else dtype, values)


def _with(wanted: Callable[[torch.dtype], torch.dtype], values: Any) -> Any:
    """Floating-point tensors, and data types of them, with another one."""

    def change(value: Any) -> Any:
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return wanted(value)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            dtype = wanted(value.dtype)
            return value if dtype == value.dtype else value.to(dtype)
        return value

    return tree_map(change, values)
