"""All compiled layers of a step as one call, in place of the model's list of layers.

A model spends 30 µs on each layer's call: of a small model with weights of 4 bits, a twelfth of a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from caches.platform.torch_api import tree_flatten
from engine.compiling.compiled_layer import Attentions, CompiledLayer
from engine.compiling.layer_step import Call


class LayerChain:
    """In place of `layers` it gives the thread that made it one layer, which computes all of them.

    Other threads are given the layers themselves. links: all of them. attentions: theirs, given their mask. calls: how
    often they were computed.
    """

    def __init__(self, layers: nn.ModuleList, links: Sequence[CompiledLayer], attentions: Attentions):
        self._layers, self._links, self._attentions, self._thread = layers, links, attentions, threading.get_ident()
        self._joined, self.calls = [_Joined(links[0].module, self._compute)], 0

    def discard(self) -> None:
        """Free the cache that it computes with, to which it refers in a circle."""
        self._joined.clear()

    def _given(self) -> Any:
        return self._joined if threading.get_ident() == self._thread else self._layers

    def __iter__(self) -> Iterator[Any]:
        return iter(self._given())

    def __len__(self) -> int:
        return len(self._given())

    def __getitem__(self, index: Any) -> Any:
        return self._given()[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layers, name)

    def _compute(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        (hidden, *shared), mask = self._links[0].inputs_of(args, kwargs)
        for layer, attention in zip(self._links, self._attentions(self._links, mask), strict=True):
            [hidden] = layer.compute([hidden, *shared], attention)
        return hidden


class _Joined:
    """A function in place of a layer, with the attributes of `first`."""

    def __init__(self, first_layer: nn.Module, compute: Callable[..., torch.Tensor]):
        self._first, self._compute = first_layer, compute

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._compute(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


def are_chained(calls: Sequence[tuple[Call, Any]]) -> bool:
    """Whether each layer takes first what the one before it returned, a tensor, and then what all of them are given.

    calls: each layer's arguments and what it returned.
    """
    (first_values, spec), *later_calls = [tree_flatten((args[1:], kwargs)) for (args, kwargs), _ in calls]
    return (
        all(isinstance(result, torch.Tensor) for _, result in calls)
        and all(args and args[0] is result for ((args, _), _), (_, result) in zip(calls[1:], calls, strict=False))
        and all(call_spec == spec and all(map(_is_same, values, first_values)) for values, call_spec in later_calls)
    )


def _is_same(value: Any, expected: Any) -> bool:
    return value is expected or (not isinstance(value, torch.Tensor) and value == expected)
