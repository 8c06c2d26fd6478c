"""Hundreds of calls of all kinds, and what they leave behind. Run as a program it prints that as JSON."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from helpers import needed
from places import ROOMS
from references import draft_of, tiny
from strategy_cases import LOSSY, MODELS, OPTIONS

import caches
import engine
import strategies
from strategies.operations import needs_of

NEW = 5
ROUNDS = 4  # in which the same calls are made again


def hidden_layer(model: torch.nn.Module) -> torch.nn.Module:
    """One in the middle of the model."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) > 1]
    return lists[-1][1]


@contextmanager
def out_of_memory(model: torch.nn.Module, at: int) -> Iterator[None]:
    """In its call with this number, from 1 on, a layer of the model finds none."""
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(0)
        if len(calls) == at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    hook = hidden_layer(model).register_forward_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that raises, in the third step of most texts."""
    if ids.shape[1] in (3, 6, 15):
        raise RuntimeError("no more")
    return scores


def not_a_number(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores * float("nan") if ids.shape[1] in (3, 6, 15) else scores


class AtStep:
    """Set when it is asked for the third time."""

    left = 2

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0


def whole(model: Any, inputs: Any, **options: Any) -> None:
    engine.generate(model, inputs, **options)


def next_turn(model: Any, inputs: Any, **options: Any) -> None:
    first = engine.generate(model, inputs, **options)
    if first.cache is not None and not model.config.is_encoder_decoder:
        engine.generate(model, first.sequences, cache=first.cache, max_new_tokens=2)


def stream(model: Any, inputs: Any, **options: Any) -> None:
    list(engine.stream(model, inputs, **options))


def left_stream(model: Any, inputs: Any, **options: Any) -> None:
    next(engine.stream(model, inputs, **options))


def unused_stream(model: Any, inputs: Any, **options: Any) -> None:
    engine.stream(model, inputs, **options)


def cancelled(model: Any, inputs: Any, **options: Any) -> None:
    engine.generate(model, inputs, cancellation=AtStep(), **options)


def raising(model: Any, inputs: Any, **options: Any) -> None:
    engine.generate(model, inputs, logits_processor=[fails], **options)


def bad_logits(model: Any, inputs: Any, **options: Any) -> None:
    engine.generate(model, inputs, logits_processor=[not_a_number], **options)


def refused(model: Any, inputs: Any, **options: Any) -> None:
    engine.generate(model, inputs, **options | {"max_new_tokens": -1})


def recovered(model: Any, inputs: Any, **options: Any) -> None:
    with out_of_memory(model, 3):
        engine.generate(model, inputs, **options)


def given_up(model: Any, inputs: Any, **options: Any) -> None:
    with out_of_memory(model, 3):
        engine.generate(model, inputs, on_oom=[], **options)


ENDINGS = [whole, next_turn, stream, left_stream, unused_stream, cancelled, raising, bad_logits, refused, recovered,
           given_up]  # fmt: skip


def call(ending: Callable[..., None], strategy: str, kind: str, cache: str) -> str:
    """What came of it: "done", or the class of the error."""
    model, inputs = tiny(MODELS[kind])
    chosen = strategies.build(strategy, **OPTIONS.get(strategy, {}))
    options = {"cache": cache, "cache_config": LOSSY.get(cache) or needed(cache), "strategy": chosen}
    if needs_of(chosen).draft:
        options["assistant_model"] = draft_of(MODELS[kind])
    try:
        ending(model, inputs, max_new_tokens=NEW, **options)
    except (engine.EngineError, caches.CacheError) as error:
        return type(error).__name__
    return "done"


def cells(count: int) -> list[tuple[Callable[..., None], str, str, str]]:
    """So many calls, in which every strategy meets every cache, and both the endings and kinds of models in turn."""
    draw = random.Random(0)
    pairs = list(product(strategies.names(), caches.names()))
    draw.shuffle(pairs)
    kinds = list(MODELS)
    found = []
    for number in range(count):
        strategy, cache = pairs[number % len(pairs)]
        fit = [kind for kind in kinds if suits(cache, kind)]
        found.append((ENDINGS[number % len(ENDINGS)], strategy, draw.choice(fit), cache))
    return found


def suits(cache: str, kind: str) -> bool:
    try:
        caches.build(cache, tiny(MODELS[kind])[0].config, **(LOSSY.get(cache) or needed(cache)))
    except caches.UnsupportedLayerError:
        return False
    return True


def alive() -> Counter[str]:
    """What the collector knows of ours and of torch's tensors, by class."""
    kinds = [type(thing) for thing in gc.get_objects()]
    ours = [kind for kind in kinds if issubclass(kind, torch.Tensor) or str(kind.__module__).split(".")[0] in ROOMS]
    return Counter(kind.__qualname__ for kind in ours)


def resident_bytes() -> int:
    """Of this process, once the allocator has handed back what it can."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main(calls: int, leaks: bool) -> None:
    """leaks: whether every cache that is built is kept, so that the test can be seen to fail."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # of memory that was out
    planned, build, kept = cells(calls // ROUNDS), caches.build, []
    gc.freeze()  # what is frozen is not looked at: modules, models, and what is made once
    made = [call(*one) for one in planned]
    gc.collect()
    gc.freeze()
    if leaks:
        caches.build = lambda *arguments, **options: kept.append(build(*arguments, **options)) or kept[-1]
    resident, objects = [0] * (ROUNDS + 1), [0] * (ROUNDS + 1)
    for number in range(ROUNDS + 1):
        made += [call(*one) for one in planned if number > 0]
        gc.collect()
        resident[number], objects[number] = resident_bytes(), len(gc.get_objects())
    print(json.dumps({"resident_bytes": resident, "objects": objects, "alive": alive(), "made": Counter(made)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), "leaks" in sys.argv)
