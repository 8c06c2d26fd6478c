"""One decode step of one layer as a function of tensors: what is compiled, and which layers share the code."""

from __future__ import annotations

import json
import types
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import TypeAlias

import torch
from torch import nn
from transformers import PreTrainedConfig

from caches.platform.torch_api import COMPILED_MARK, tree_flatten, tree_unflatten
from engine.compiling.layer_attention import PLAIN, TracedCache
from engine.errors import OptionError
from engine.kernels.linear_routes import ROW_LIMITS

_KNOWN = ("torch.nn.", "transformers.", "engine.")  # modules of others may compute what their attributes do not say
_MOST = 2**24  # rows
_OUTSIDE = {"architectures", "transformers_version", "vocab_size"}  # of a configuration, what layers do not read

Call: TypeAlias = tuple[tuple[object, ...], dict[str, object]]
"""The arguments of a layer's forward: positional ones, and those by name."""

Shape: TypeAlias = tuple[torch.dtype, list["int | None"]]
"""Of a tensor of compiled code: the data type and the sizes; None for the one that the code leaves open."""


class Place(Enum):
    """What stands in a call for what is not part of the code."""

    CACHE = 0
    MASK = 1


class LayerStep(nn.Module):
    """A layer's forward as a function of tensors, in a step of one token per row or of several tokens of one row:
    attention is the operator `layer_attention`.

    call: the arguments that the model gives to the layer, with a `Place` for the cache and for the mask.
    Raises `OptionError` where such a step cannot be compiled.
    """

    def __init__(self, layer: nn.Module, call: Call):
        super().__init__()
        self.layer = layer
        self._values, self._spec = tree_flatten(call)
        self.inputs = [value.contiguous() for value in self._values if isinstance(value, torch.Tensor)]
        for value in self._values:
            if not isinstance(value, (torch.Tensor, Place, *PLAIN)):
                raise OptionError(f"its layers are called with a {type(value).__name__}")
        self._open = open_size(self.inputs[0])

    def forward(self, inputs: list[torch.Tensor]) -> object:
        """inputs: the tensors of the call, contiguous."""
        tensors, cache = iter(inputs), TracedCache()
        replacements = {Place.CACHE: cache, Place.MASK: inputs[0].new_zeros(1, 1, 1, 1)}  # a mask is attention's alone
        values = [next(tensors) if isinstance(value, torch.Tensor) else
                  replacements[value] if isinstance(value, Place) else value for value in self._values]  # fmt: skip
        args, kwargs = tree_unflatten(values, self._spec)
        return cache.trace(self.layer, args, kwargs)

    @property
    def shapes(self) -> list[Shape]:
        """Those of `inputs`."""
        (axis, size), (low, high) = self._open, rows_like(self._open[1])
        return [
            (tensor.dtype, [None if at == axis and length == size and low < high else length
                         for at, length in enumerate(tensor.shape)])
            for tensor in self.inputs
        ]  # fmt: skip

    def describe(self) -> list[str]:
        """Everything that shapes the code, apart from releases and the machine. Raises `OptionError`."""
        shapes = [f"{dtype} {sizes}" for dtype, sizes in self.shapes]
        values = [str(value) for value in self._values if isinstance(value, PLAIN)]
        return [str(self._spec), *shapes, *values, str(rows_like(self._open[1])), *_structure(self.layer)]


def open_size(hidden: torch.Tensor) -> tuple[int, int]:
    """The axis and the size that code leaves open, in a step with these hidden states [rows, tokens, width]."""
    rows, tokens = hidden.shape[:2]
    return (1, tokens) if hidden.ndim == 3 and rows == 1 and tokens > 1 else (0, rows)


def have_shapes(tensors: Sequence[torch.Tensor], shapes: Sequence[Shape], size: int) -> bool:
    """Whether code for these shapes, with this open size, can take the tensors. It does not check them itself."""
    if len(tensors) != len(shapes):
        return False
    for tensor, (dtype, sizes) in zip(tensors, shapes, strict=True):  # loops: it is called for each layer of each step
        if tensor.dtype != dtype or tensor.ndim != len(sizes):
            return False
        for axis, length in zip(tensor.shape, sizes, strict=True):
            if axis != (size if length is None else length):
                return False
    return True


def tensors_of(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, in the order of `LayerStep.inputs`."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.contiguous()
        elif isinstance(value, tuple | list):
            yield from tensors_of(value)


def rows_like(rows: int) -> tuple[int, int]:
    """The least and the most rows of those that share the code with `rows`."""
    bucket, limits = bisect_left(ROW_LIMITS, rows), (0, *ROW_LIMITS, _MOST)
    return limits[bucket] + 1, limits[bucket + 1]


def dynamic_shapes(step: LayerStep) -> list[dict[int, object]]:
    """The open sizes of `step` for `torch.export`."""
    low, high = rows_like(open_size(step.inputs[0])[1])
    dim = torch.export.Dim("rows", min=low, max=max(high, 2))
    return [{axis: dim for axis, size in enumerate(sizes) if size is None} for _, sizes in step.shapes]


def plain_attributes(module: nn.Module) -> dict[str, object]:
    """The attributes of a module that compiled code has as constants."""
    attributes = ((key, value) for key, value in vars(module).items() if key != COMPILED_MARK and "idx" not in key)
    return {key: value for key, value in attributes if isinstance(value, PLAIN)}


def _settings(config: PreTrainedConfig) -> str:
    """What a layer may read from its configuration, also in its forward."""
    settings = {
        name: value
        for name, value in config.to_dict().items()
        if not (name.startswith("_") or name.endswith("_token_id") or name in _OUTSIDE)
    }
    return json.dumps(settings, sort_keys=True, default=str)


def _structure(layer: nn.Module) -> Iterator[str]:
    """The layer's modules with their attributes, configurations and code, and its tensors without their values."""
    configs = {id(config): config for module in layer.modules() if (config := vars(module).get("config")) is not None}
    # A module that was copied into the layer brings a copy of its configuration.
    yield from dict.fromkeys(_settings(config) for config in configs.values() if isinstance(config, PreTrainedConfig))
    for name, module in layer.named_modules():
        module_class = module.__class__
        if not f"{module_class.__module__}.".startswith(_KNOWN):
            library_class = f"{module_class.__module__}.{module_class.__qualname__}"
            raise OptionError(f"its layers have modules of another library ({library_class})")
        if "forward" in vars(module):  # of accelerate or of the caller
            raise OptionError(f"the forward of its layers' {name or module_class.__qualname__} was replaced")
        if module.training:
            raise OptionError("it is in training mode")
        plain = sorted(plain_attributes(module).items(), key=str)
        yield f"{name} {module_class.__qualname__} {_code(module_class.forward)} {plain}"
    for name, tensor in [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers()]:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != "cpu":
            raise OptionError(f"its weights are {type(tensor).__name__}s on {tensor.device}")
        yield f"{name} {tensor.dtype} {list(tensor.shape)} {tensor.is_contiguous()}"


def _code(function: Callable[..., object]) -> str:
    if not isinstance(function, types.FunctionType):
        return str(function)
    code = function.__code__
    constants = [constant for constant in code.co_consts if not isinstance(constant, types.CodeType)]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
