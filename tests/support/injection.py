"""Models that run out of memory where a test says: in these forwards, in these layers."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from helpers import try_facts
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

ERRORS = {
    "device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a test says so)"),
    "allocator": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "python": lambda: MemoryError(),
}


@dataclass
class Failures:
    """forwards: how often the model was called; raised: how many of them failed."""

    forwards: int = 0
    raised: int = 0


@contextmanager
def failing(
    model: PreTrainedModel,
    at: Iterable[tuple[int, int]] = (),
    error: str = "device",
    late: bool = False,
    all_happen: bool = True,
) -> Iterator[Failures]:
    """For every (n, k) of `at` the model's forward number n from here on, from 0, fails in decoder layer k.

    error: one of ERRORS. late: when the layer has done its work, and so has written to the cache; else before it does
    any. all_happen: where the body ends without an error, all these failures must have happened.
    """
    try_facts(model)
    layers = decoder_layers(model)
    planned = {forward: layers[layer] for forward, layer in at}
    found = Failures()

    def count(module: nn.Module, inputs: tuple) -> None:
        found.forwards += 1

    def strike(module: nn.Module, *_: object) -> None:
        if planned.get(found.forwards - 1) is module:
            found.raised += 1
            raise ERRORS[error]()

    with ExitStack() as hooks:
        gc.freeze()  # a recovery collects garbage, and nothing that was there before is any
        hooks.enter_context(_removed(model.register_forward_pre_hook(count)))
        for layer in set(planned.values()):
            hook = layer.register_forward_hook if late else layer.register_forward_pre_hook
            hooks.enter_context(_removed(hook(strike)))
        yield found
    assert not all_happen or found.raised == len(planned), (
        f"{found.raised} of the failures at {sorted(at)} in {found.forwards} forwards"
    )


@contextmanager
def failing_at_random(model: nn.Module, chance: float, draw: Random, most: int | None = None) -> Iterator[Counter[str]]:
    """Any decoder layer of any forward may fail, before or after its work; `most` times. Counts how often one did."""
    happened: Counter[str] = Counter()

    def strike(*_: object) -> None:
        if draw.random() < chance and (most is None or happened["out of memory"] < most):
            happened["out of memory"] += 1
            raise ERRORS[draw.choice(list(ERRORS))]()

    with ExitStack() as hooks:
        for layer in decoder_layers(model):
            hooks.enter_context(_removed(layer.register_forward_pre_hook(strike)))
            hooks.enter_context(_removed(layer.register_forward_hook(strike)))
        yield happened


@contextmanager
def _removed(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Those of the decoder where there is an encoder of text or images too, else all."""
    decoder = model.base_model if type(model.get_decoder()) is type(model) else model.get_decoder()
    return list(next(part for part in decoder.modules() if isinstance(part, nn.ModuleList)))


class _Allocations(TorchDispatchMode):
    """Counts what allocates, once it is told to; the allocations number `at`, from 0 on, fail."""

    def __init__(self, at: Iterable[int], error: str):
        super().__init__()
        self.at, self.error, self.counts, self.made, self.raised = frozenset(at), error, False, 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        returns = function._schema.returns
        if self.counts and returns and all(one.alias_info is None for one in returns):
            self.made += 1
            if self.made - 1 in self.at:
                self.raised += 1
                raise ERRORS[self.error]()
        return function(*arguments, **(keywords or {}))


@contextmanager
def starving(model: PreTrainedModel, at: Iterable[int] = (), error: str = "device") -> Iterator[_Allocations]:
    """From the model's first forward on the tensors number `at`, counted from 0, find no memory, in any library."""
    mode = _Allocations(at, error)

    def begin(module: nn.Module, inputs: tuple) -> None:
        mode.counts = True

    gc.freeze()
    with _removed(model.register_forward_pre_hook(begin)), mode:
        yield mode
