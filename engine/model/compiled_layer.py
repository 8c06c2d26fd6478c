"""`CompiledLayer`: one layer of a model and the compiled code of its step, which is compared with the layer itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from caches import Cache
from caches.torch_api import buffers_of, load_package, parameters_of, tree_flatten, tree_leaves, tree_unflatten
from caches.transfer.export_buffers import LayerBuffers
from engine.model.layer_chain import Run
from engine.model.layer_step import Call, LayerStep, Shape, have_shapes, tensors_of
from engine.model.package_builder import LAYER


class OtherInputs(Exception):
    """Layers are called with other tensors than those that their code was compiled for."""


class CompiledLayer:
    """Layer number `index` of a model.

    A `recording` forward sets `call`, which stays None unless there was exactly one, and `returned`. `bind` sets the
    path of the `package` and the `slots` that attention reads. `load` makes the code ready.
    """

    def __init__(self, module: nn.Module, index: int):
        self.module, self.index = module, index
        self._own_forward = module.forward
        self.call: Call | None = None
        self.returned: Any = None
        self.slots: int | None = None
        self.package = Path()
        self.weights: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._run: Run | None = None
        self._inputs: list[Shape] = []  # of the tensors that the code takes: those of the call
        self._kept: list[Shape] = []  # and those of the cache
        self._result: tuple[list[Any], Any] | None = None  # what it returns, flattened; None for a tensor

    def recording(self) -> Callable[..., Any]:
        """A forward that records its call in this thread; others may use the model meanwhile."""
        calls, thread = [], threading.get_ident()

        def forward(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return self._own_forward(*args, **kwargs)
            calls.append((args, kwargs))
            self.call = calls[0] if len(calls) == 1 else None
            self.returned = self._own_forward(*args, **kwargs)
            return self.returned

        return forward

    def bind(self, cache: Cache, package_of: Callable[[LayerStep], Path]) -> None:
        """Take the recorded step, in which `cache` is open. Raises `StepError` where it keeps anything but keys and
        values, `OptionError` where it cannot be compiled."""
        assert self.call is not None
        self.slots = LayerBuffers(cache, self.index).slots
        step = LayerStep(self.module, self.call, cache, self.index, self.slots)
        self.package, (self._inputs, self._kept) = package_of(step), step.shapes

    def discard_call(self) -> None:
        """Free the tensors of the recorded call."""
        self.call = self.returned = None

    def load(self) -> None:
        """Load the package and bind it to this layer's weights, without a copy of them."""
        self.discard_call()
        self.weights = [tensor.detach() for tensor in self._present_weights()]
        self._addresses = [tensor.data_ptr() for tensor in self.weights]
        named = dict([*self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers()])
        self._run = load_package(
            str(self.package), lambda names: {name: named[name.removeprefix(LAYER)].detach() for name in names}
        )

    @property
    def run(self) -> Run:
        """The code, once it is loaded."""
        assert self._run is not None
        return self._run

    @property
    def has_its_weights(self) -> bool:
        """Whether the layer's weights are still where the code reads them."""
        return self._addresses == [tensor.data_ptr() for tensor in self._present_weights()]

    def _present_weights(self) -> Iterator[torch.Tensor]:
        for module in self.module.modules():
            for kept in (parameters_of(module), buffers_of(module)):
                yield from (tensor for tensor in kept.values() if tensor is not None)

    def check(self, inputs: list[torch.Tensor]) -> None:
        """Raise `OtherInputs` for tensors of a call that the code cannot take."""
        if not have_shapes(inputs, self._inputs, inputs[0].shape[0]):
            raise OtherInputs

    def check_cache(self, cache: Cache, rows: int) -> None:
        """Raise `OtherInputs` for a cache whose tensors the code cannot take."""
        if not have_shapes(LayerBuffers(cache, self.index).tensors(rows), self._kept, rows):
            raise OtherInputs

    def computing(self, cache: Cache) -> Callable[..., Any]:
        """A forward that runs the code."""

        def forward(inputs: list[torch.Tensor], kept: list[torch.Tensor], *call: Any) -> Any:
            out = self.run([*inputs, *kept])
            return out[0] if self._result is None else _filled(self._result, _present(out))

        return self._in_this_thread(cache, forward)

    def comparing(self, cache: Cache, errors: list[float]) -> Callable[..., Any]:
        """The layer's own forward, which appends to `errors` by how much the code's result differs."""

        def forward(inputs: list[torch.Tensor], kept: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
            copies = [tensor.clone() for tensor in kept]
            out = _present(self.run([*inputs, *copies]))
            result = self._own_forward(*args, **kwargs)
            self._result = None if isinstance(result, torch.Tensor) else tree_flatten(result)
            expected = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            pairs = zip([*out, *copies[:-2]], [*expected, *kept[:-2]], strict=True)
            errors.append(max(_difference(one, other) for one, other in pairs))
            return result

        return self._in_this_thread(cache, forward)

    def _in_this_thread(self, cache: Cache, compute: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that gives `compute` the tensors of its call, those of the cache, and the call itself."""
        buffers, thread = LayerBuffers(cache, self.index), threading.get_ident()

        def forward(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:  # another caller of the model
                return self._own_forward(*args, **kwargs)
            inputs = list(tensors_of((*args, *kwargs.values())))
            self.check(inputs)
            return compute(inputs, buffers.tensors(inputs[0].shape[0]), args, kwargs)

        return forward


def _present(results: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """The tensors among the results of a package, which has None where a layer returns None."""
    return [one for one in results if one is not None]


def _filled(result: tuple[list[Any], Any], tensors: list[torch.Tensor]) -> Any:
    """A flattened result of a layer, with other tensors."""
    given = iter(tensors)
    return tree_unflatten([next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in result[0]], result[1])


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The relative difference of two tensors; NaN where they are not numbers."""
    return float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
