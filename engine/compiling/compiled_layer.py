"""Layers of a model with the compiled code of their step, which is compared with the layer itself, one by one and as a
chain that is called once."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn
from transformers.cache_utils import Cache as TransformersCache

from caches.platform.torch_api import (
    TreeSpec,
    buffers_of,
    load_package,
    parameters_of,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from engine.compiling.layer_attention import AttentionCall, Code, Compute, LayerAttention, OpenCache, attentions_of, run
from engine.compiling.layer_step import Call, LayerStep, Place, Shape, have_shapes, open_size, tensors_of
from engine.compiling.package_builder import LAYER

Attentions: TypeAlias = Callable[[Sequence["CompiledLayer"], object], Sequence[Compute]]
"""Attention of some layers, which are computed next, given the mask of all of them; none where they are open."""


class OtherInputs(Exception):
    """Layers are called with other tensors than those that their code was compiled for."""


class CompiledLayer:
    """Layer number `index` of a model.

    A `recording` forward sets `call`, which stays None unless there was exactly one, and `returned`. `bind` takes them.
    It sets the path of the `package`, `step_call` for its `LayerStep`, and `mask_place`: the position or the name of
    the argument that is the mask. `load` makes the code ready.
    """

    def __init__(self, module: nn.Module, index: int):
        self.module, self.index = module, index
        self._own_forward = module.forward
        self.call: Call | None = None
        self.returned: object = None
        self.step_call: Call | None = None
        self.mask_place: int | str | None = None
        self.package = Path()
        self.weights: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._open: OpenCache | None = None
        self._attention: LayerAttention | None = None
        self._code: Code | None = None
        self._inputs: list[Shape] = []  # of the tensors that the code takes: those of the call
        self._result: tuple[list[object], TreeSpec] | None = None  # what it returns, flattened; None for a tensor

    def recording(self, handle: TransformersCache) -> Callable[..., object]:
        """A forward that records its call. handle: the argument for the cache. It may raise `OptionError`."""
        calls: list[Call] = []

        def forward(*args: object, **kwargs: object) -> object:
            calls.append((args, kwargs))
            self.call = calls[0] if len(calls) == 1 else None
            self._open = OpenCache(handle, self.index)
            self.returned = self._open.watch(self._own_forward, *_exchanged(args, kwargs, handle, self._open))
            return self.returned

        return self._in_this_thread(forward)

    def bind(self, handle: TransformersCache, package_of: Callable[[LayerStep], Path]) -> bool:
        """Take the recorded call; False where it does not attend to the cache, or to more than that.

        Raises `OptionError` where it cannot be compiled.
        """
        assert self.call is not None
        assert self._open is not None
        (args, kwargs), open_cache = self.call, self._open
        self.call = self.returned = self._open = None
        if len(open_cache.calls) != 1 or open_cache.is_used_otherwise:
            return False
        [attention_call] = open_cache.calls
        mask, self.mask_place = _named_mask(self._own_forward, args, kwargs)
        if attention_call.mask is not mask:
            return False
        self._attention = attention_call.attention
        args, kwargs = _exchanged(args, kwargs, handle, Place.CACHE)
        self.step_call = _with(args, kwargs, self.mask_place, Place.MASK)
        step = LayerStep(self.module, self.step_call)
        self.package, self._inputs = package_of(step), step.shapes
        return True

    @staticmethod
    def load(layers: Sequence[CompiledLayer]) -> None:
        """Load the package of these layers and bind it to the weights of each, without a copy of them. The operators
        that it calls have to be there."""
        for layer in layers:
            layer.step_call = None
            layer.weights = [tensor.detach() for tensor in layer._present_weights()]
            layer._addresses = [tensor.data_ptr() for tensor in layer.weights]
        codes = load_package(str(layers[0].package), [layer._named_weights() for layer in layers])
        for layer, code in zip(layers, codes, strict=True):
            layer._code = code

    def _named_weights(self) -> dict[str, torch.Tensor]:
        """As they are called in the package."""
        named = [*self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers()]
        return {f"{LAYER}{name}": tensor.detach() for name, tensor in named}

    @property
    def step_arguments(self) -> tuple[nn.Module, Call]:
        """Those of its `LayerStep`, after `bind` and until the call is discarded."""
        assert self.step_call is not None
        return self.module, self.step_call

    @property
    def known_attention(self) -> LayerAttention:
        """How it calls attention, after `bind`."""
        assert self._attention is not None
        return self._attention

    @property
    def has_its_weights(self) -> bool:
        """Whether the layer's weights are still where the code reads them."""
        return self._addresses == [tensor.data_ptr() for tensor in self._present_weights()]

    def _present_weights(self) -> Iterator[torch.Tensor]:
        for module in self.module.modules():
            for tensors in (parameters_of(module), buffers_of(module)):
                yield from (tensor for tensor in tensors.values() if tensor is not None)

    def inputs_of(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[list[torch.Tensor], object]:
        """The tensors of a call, and its mask. Raises `OtherInputs` for tensors that the code cannot take."""
        mask, position = None, self.mask_place
        if isinstance(position, str):
            mask = kwargs.get(position)
            kwargs = {name: value for name, value in kwargs.items() if name != position}
        elif position is not None and position < len(args):
            mask, args = args[position], (*args[:position], *args[position + 1 :])
        inputs = list(tensors_of((*args, *kwargs.values())))
        if not have_shapes(inputs, self._inputs, open_size(inputs[0])[1]):
            raise OtherInputs
        return inputs, mask

    @property
    def code(self) -> Code:
        """After `load`."""
        assert self._code is not None
        return self._code

    def computing(self, attentions: Attentions) -> Callable[..., object]:
        """A forward that runs the code."""

        def forward(*args: object, **kwargs: object) -> object:
            inputs, mask = self.inputs_of(args, kwargs)
            out = run([self.code], inputs, attentions([self], mask))
            return out[0] if self._result is None else _filled(self._result, _present(out))

        return self._in_this_thread(forward)

    def comparing(self, handle: TransformersCache, errors: list[float]) -> Callable[..., object]:
        """The layer's own forward, which appends to `errors` by how much what the code computes differs."""

        def forward(*args: object, **kwargs: object) -> object:
            inputs, _ = self.inputs_of(args, kwargs)
            cache = OpenCache(handle, self.index)
            result = cache.watch(self._own_forward, *_exchanged(args, kwargs, handle, cache))
            [attention_call] = cache.calls
            self._result = None if isinstance(result, torch.Tensor) else tree_flatten(result)
            attention_inputs: list[torch.Tensor] = []
            out = _present(run([self.code], inputs, [partial(_repeated, attention_call, attention_inputs)]))
            expected = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            pairs = zip([*out, *attention_inputs], [*expected, *attention_call.inputs], strict=True)
            errors.append(max(_difference(actual, reference) for actual, reference in pairs))
            return result

        return self._in_this_thread(forward)

    def _in_this_thread(self, compute: Callable[..., object]) -> Callable[..., object]:
        """`compute` in this thread, the layer's own forward for other callers of the model."""
        thread = threading.get_ident()

        def forward(*args: object, **kwargs: object) -> object:
            is_other_thread = threading.get_ident() != thread
            return (self._own_forward if is_other_thread else compute)(*args, **kwargs)

        return forward


class LayerChain:
    """In place of `layers` it gives the thread that made it one layer, which computes all of them.

    A model spends 30 µs on each layer's call: of a small model with weights of 4 bits, a twelfth of a step. Other
    threads are given the layers themselves. links: all of them. attentions: theirs, given their mask. calls: how often
    they were computed.
    """

    def __init__(self, layers: nn.ModuleList, links: Sequence[CompiledLayer], attentions: Attentions):
        self._layers, self._links, self._attentions, self._thread = layers, links, attentions, threading.get_ident()
        self._joined, self.calls = [_Joined(links[0].module, self._compute)], 0

    def discard(self) -> None:
        """Free the cache that it computes with, to which it refers in a circle."""
        self._joined.clear()

    def _given(self) -> list[_Joined] | nn.ModuleList:
        return self._joined if threading.get_ident() == self._thread else self._layers

    def __iter__(self) -> Iterator[_Joined | nn.Module]:
        return iter(self._given())

    def __len__(self) -> int:
        return len(self._given())

    def __getitem__(self, index: int | slice) -> object:
        return self._given()[index]

    def __getattr__(self, name: str) -> object:
        return getattr(self._layers, name)

    def _compute(self, *args: object, **kwargs: object) -> torch.Tensor:
        self.calls += 1
        inputs, mask = self._links[0].inputs_of(args, kwargs)
        [hidden] = run([layer.code for layer in self._links], inputs, self._attentions(self._links, mask))
        return hidden


class _Joined:
    """A function in place of a layer, with the attributes of `first`."""

    def __init__(self, first_layer: nn.Module, compute: Callable[..., torch.Tensor]):
        self._first, self._compute = first_layer, compute

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self._compute(*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        return getattr(self._first, name)


def are_chained(calls: Sequence[tuple[Call, object]]) -> bool:
    """Whether each layer takes first what the one before it returned, a tensor, and then what all of them are given.

    calls: each layer's arguments and what it returned.
    """
    (first_values, spec), *later_calls = [tree_flatten((args[1:], kwargs)) for (args, kwargs), _ in calls]
    return (
        all(isinstance(result, torch.Tensor) for _, result in calls)
        and all(args and args[0] is result for ((args, _), _), (_, result) in zip(calls[1:], calls, strict=False))
        and all(call_spec == spec and all(map(_is_same, values, first_values)) for values, call_spec in later_calls)
    )


def _is_same(value: object, expected: object) -> bool:
    return value is expected or (not isinstance(value, torch.Tensor) and value == expected)


def attentions_with(handle: TransformersCache) -> Attentions:
    """Those of a step, which update the cache that is the model's argument `handle`."""

    def attentions(layers: Sequence[CompiledLayer], mask: object) -> Sequence[Compute]:
        return attentions_of([layer.known_attention for layer in layers], handle, mask)

    return attentions


def _repeated(attention_call: AttentionCall, received: list[torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """What attention has found before. received: takes the tensors of this call."""
    received += [tensor.clone() for tensor in inputs]
    return attention_call.found


def _exchanged(args: tuple[object, ...], kwargs: dict[str, object], replaced: object, replacement: object) -> Call:
    """The arguments with `replacement` in place of `replaced`."""
    return (tuple(replacement if value is replaced else value for value in args),
            {name: replacement if value is replaced else value for name, value in kwargs.items()})  # fmt: skip


def _with(args: tuple[object, ...], kwargs: dict[str, object], key: int | str | None, value: object) -> Call:
    """The arguments with `value` at this place."""
    if isinstance(key, str):
        return args, {**kwargs, key: value}
    return tuple(value if position == key else argument for position, argument in enumerate(args)), kwargs


def _named_mask(
    forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[object, int | str | None]:
    """The argument `attention_mask` of a call, and its place; None where it has none."""
    name = "attention_mask"
    if name in kwargs:
        return kwargs[name], name
    names = list(inspect.signature(forward).parameters)[: len(args)]
    return (args[names.index(name)], names.index(name)) if name in names else (None, None)


def _present(results: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """The tensors among the results of a package, which has None where a layer returns None."""
    return [result for result in results if result is not None]


def _filled(result: tuple[list[object], TreeSpec], tensors: list[torch.Tensor]) -> object:
    """A flattened result of a layer, with other tensors."""
    inner, spec = result
    values = iter(tensors)
    return tree_unflatten([next(values) if isinstance(leaf, torch.Tensor) else leaf for leaf in inner], spec)


def _difference(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """The relative difference of two tensors; NaN where they are not numbers."""
    return float((tensor.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30))
