"""One decode step of one layer as a function of tensors: what is compiled, and which layers share the code."""

from __future__ import annotations

import json
import types
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedConfig

from caches import Cache
from caches.torch_api import tree_flatten, tree_unflatten
from caches.transfer.export_buffers import LayerBuffers
from engine.errors import OptionError
from engine.model.linear_routes import ROW_LIMITS

_KNOWN = ("torch.nn.", "transformers.", "engine.")  # modules of others may compute what their attributes do not say
_MOST = 2**24  # rows, slots
_PLAIN = (bool, int, float, str, type(None))
_OUTSIDE = {"architectures", "transformers_version", "vocab_size"}  # of a configuration, what layers do not read

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a layer's forward: positional ones, and those by name."""

Shape: TypeAlias = tuple[torch.dtype, list["int | str"]]
"""Of a tensor of compiled code: the data type and the sizes; those that the code leaves open by name."""


class LayerStep(nn.Module):
    """A layer's forward as a function of tensors, for an open step of `cache` with one token per row.

    call: the arguments that the model gives to the layer, `cache` among them. index: the layer's number. slots: those
    that attention reads in the step of this call, see `LayerBuffers.slots`.
    Raises `OptionError` where such a step cannot be compiled, `StepError` for another kind of cache.
    """

    def __init__(self, layer: nn.Module, call: Call, cache: Cache, index: int, slots: int | None):
        super().__init__()
        self._slots = slots
        self.layer, self._cache, self._index = layer, cache, index
        self._values, self._spec = tree_flatten(call)
        self.inputs = [value for value in self._values if isinstance(value, torch.Tensor)]
        for value in self._values:
            if not isinstance(value, (torch.Tensor, *_PLAIN)) and value is not cache:
                raise OptionError(f"its layers are called with a {type(value).__name__}")
            if isinstance(value, torch.Tensor) and not value.is_contiguous():
                raise OptionError("its layers are called with tensors that are not contiguous")
        self._rows = self.inputs[0].shape[0]
        self.kept = LayerBuffers(cache, index).tensors(self._rows)

    def forward(self, inputs: list[torch.Tensor], kept: list[torch.Tensor]) -> Any:
        """inputs: the tensors of the call. kept: see `LayerBuffers.tensors`; written in place."""
        given, buffers = iter(inputs), LayerBuffers(self._cache, self._index)
        values = [next(given) if isinstance(value, torch.Tensor) else value for value in self._values]
        args, kwargs = tree_unflatten(values, self._spec)
        masks = [one for old, one in zip(self.inputs, inputs, strict=True) if self._is_mask(old)]
        with buffers.in_use(kept, masks[0].shape[-1] if masks else self._slots):
            return self.layer(*args, **kwargs)

    def _is_mask(self, tensor: torch.Tensor) -> bool:
        return self._slots is not None and tensor.ndim == 4 and tensor.shape[-1] == self._slots

    def open_sizes(self) -> tuple[list[dict[int, str]], list[dict[int, str]]]:
        """The sizes that the code values open, by axis, for each tensor of `inputs` and `kept`."""
        least, most = rows_like(self._rows)
        rows = {0: "rows"} if least < most else {}
        *stores, _, _ = self.kept
        grows = any(map(self._is_mask, self.inputs))
        return (
            [(rows if one.shape[0] == self._rows else {}) | ({3: "seen"} if self._is_mask(one) else {})
             for one in self.inputs],
            [*(rows | ({2: "room"} if grows else {}) for _ in stores), {}, {}],
        )  # fmt: skip

    @property
    def shapes(self) -> tuple[list[Shape], list[Shape]]:
        """Those of `inputs` and `kept`."""
        inputs, kept = self.open_sizes()
        return _shapes(self.inputs, inputs), _shapes(self.kept, kept)

    def describe(self) -> list[str]:
        """Everything that shapes the code, apart from releases and the machine. Raises `OptionError`."""
        inputs, kept = self.shapes
        tensors = zip([*self.inputs, *self.kept], [*inputs, *kept], strict=True)
        shapes = [f"{dtype} {sizes} {one.is_contiguous()}" for one, (dtype, sizes) in tensors]
        values = [str(value) for value in self._values if isinstance(value, _PLAIN)]
        return [str(self._spec), *shapes, *values, str(rows_like(self._rows)), *_structure(self.layer)]


def _shapes(tensors: Iterable[torch.Tensor], open_sizes: Iterable[dict[int, str]]) -> list[Shape]:
    return [
        (one.dtype, [open.get(axis, size) for axis, size in enumerate(one.shape)])
        for one, open in zip(tensors, open_sizes, strict=True)
    ]


def have_shapes(tensors: Sequence[torch.Tensor], shapes: Sequence[Shape], rows: int) -> bool:
    """Whether code for these shapes can take the tensors in a step of `rows` rows. It does not check them itself."""
    if len(tensors) != len(shapes):
        return False
    for tensor, (dtype, sizes) in zip(tensors, shapes, strict=True):  # loops: it is called for each layer of each step
        if tensor.dtype != dtype or tensor.ndim != len(sizes):
            return False
        for size, known in zip(tensor.shape, sizes, strict=True):
            if size != (rows if known == "rows" else known) and known not in ("seen", "room"):
                return False
    return True


def tensors_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
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


def dynamic_shapes(step: LayerStep) -> tuple[list[Any], list[Any]]:
    """The open sizes of `step` for `torch.export`."""
    least, most = rows_like(step.inputs[0].shape[0])
    dims = {"rows": torch.export.Dim("rows", min=least, max=most)} if least < most else {}
    dims |= {name: torch.export.Dim(name, min=2, max=_MOST) for name in ("seen", "room")}
    inputs, kept = step.open_sizes()
    return ([{axis: dims[name] for axis, name in open.items()} for open in inputs],
            [{axis: dims[name] for axis, name in open.items()} for open in kept])  # fmt: skip


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that compiled code has as constants."""
    return {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN) and "idx" not in key}


def _settings(config: PreTrainedConfig) -> str:
    """What a layer may read from its configuration, also in its forward."""
    said = {
        name: value
        for name, value in config.to_dict().items()
        if not (name.startswith("_") or name.endswith("_token_id") or name in _OUTSIDE)
    }
    return json.dumps(said, sort_keys=True, default=str)


def _structure(layer: nn.Module) -> Iterator[str]:
    """The layer's modules with their attributes, configurations and code, and its tensors without their values."""
    configs = {id(one): one for module in layer.modules() if (one := vars(module).get("config")) is not None}
    yield from (_settings(one) for one in configs.values() if isinstance(one, PreTrainedConfig))
    for name, module in layer.named_modules():
        kind = type(module)
        if not f"{kind.__module__}.".startswith(_KNOWN):
            raise OptionError(f"its layers have modules of another library ({kind.__module__}.{kind.__qualname__})")
        if "forward" in vars(module):  # of accelerate or of the caller
            raise OptionError(f"the forward of its layers' {name or kind.__qualname__} was replaced")
        if module.training:
            raise OptionError("it is in training mode")
        plain = sorted(plain_attributes(module).items(), key=str)
        yield f"{name} {kind.__qualname__} {_code(kind.forward)} {plain}"
    for name, tensor in [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers()]:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != "cpu":
            raise OptionError(f"its weights are {type(tensor).__name__}s on {tensor.device}")
        yield f"{name} {tensor.dtype} {list(tensor.shape)} {tensor.is_contiguous()}"


def _code(function: Any) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return str(function)
    constants = [constant for constant in code.co_consts if not isinstance(constant, types.CodeType)]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
