"""Ctrl-C twice at random moments of random calls: what a run leaves behind. `python interrupts.py 1000` counts."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from architectures import prompt, tiny_model

import engine
from engine.kernels import linear_backend
from engine.model.model_lock import turn_of

CALLS: list[dict[str, Any]] = [
    {},
    {"cache": "static"},
    {"cache": "quantized", "cache_config": {"residual_length": 8}},
    {"cache": "offloaded", "do_sample": True},
    {"num_beams": 3, "cache": "static"},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"penalty_alpha": 0.6, "top_k": 3},
    {"prompt_lookup_num_tokens": 3},
]
_LONGEST_S = 0.08  # about as long as a call takes


def attributes(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Of every module what it keeps, one level deep: containers by what is in them, the rest by identity."""
    return {
        name: {
            key: tuple((at, id(part)) for at, part in value.items()) if isinstance(value, dict) else id(value)
            for key, value in module.__dict__.items()
        }
        for name, module in model.named_modules()
    }


def interrupted_twice(tries: int, seed: int, tell: Callable[[str], None] = lambda line: None) -> dict[str, int]:
    """How many tries, how many Ctrl-C came while a call was computing, and how many of the calls came to their end.

    Raises `AssertionError` with the first try after which something was not as before.
    """
    chosen, model, inputs = random.Random(seed), tiny_model("llama"), prompt()
    config = engine.EngineConfig(linears="onednn" if linear_backend.has_onednn() else "default")
    kept = engine.Generator(model, config=config)
    for options in CALLS:  # transformers installs hooks of its own with the first call that records something
        kept.generate(inputs, max_new_tokens=1, **options)
    before, counts = attributes(model), {"tries": 0, "interrupts": 0, "ended": 0, "ignored": 0}
    expected = kept.generate(inputs, max_new_tokens=8).tokens
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: ignored.append(unraisable.exc_type)
    try:
        for number in range(tries):
            options = chosen.choice(CALLS) | {"max_new_tokens": 12}
            ignored: list[Any] = []
            generator = kept if chosen.random() < 0.5 else engine.Generator(model, config=config)
            call = chosen.choice([_generated, _streamed])
            first, second = chosen.uniform(0, _LONGEST_S), chosen.choice([0, chosen.uniform(0, 0.002), 0.01])
            ended, caught = _attempt(lambda: call(generator, inputs, options), first, second)  # noqa: B023
            state = f"try {number} ({options}, Ctrl-C after {first:.6f} s and {second:.6f} s)"
            assert attributes(model) == before, state
            assert linear_backend.active.routes is None, state
            assert not any(type(module) is linear_backend.RoutedLinear for module in model.modules()), state
            assert torch.is_grad_enabled(), state
            assert _is_free(model), state
            # Python itself drops what is raised while it collects an object.
            assert set(ignored) <= {KeyboardInterrupt}, (state, ignored)
            counts["tries"] += 1
            counts["interrupts"] += caught
            counts["ended"] += ended
            counts["ignored"] += len(ignored)
            if (number + 1) % 100 == 0:
                tell(str(counts))
    finally:
        sys.unraisablehook = hook
    assert kept.generate(inputs, max_new_tokens=8).tokens == expected
    return counts


def _generated(generator: engine.Generator, inputs: Any, options: dict[str, Any]) -> None:
    generator.generate(inputs, **options)


def _streamed(generator: engine.Generator, inputs: Any, options: dict[str, Any]) -> None:
    for _ in generator.stream(inputs, **options):
        pass


def _attempt(call: Callable[[], None], first: float, second: float) -> tuple[bool, int]:
    """Make a call and press Ctrl-C twice: whether it came to its end, and how many interrupts it raised."""
    go, sent, ended = threading.Event(), threading.Event(), []
    handlers: list[Any] = []
    caught = 0

    def press() -> None:
        go.wait()
        for wait in (first, second):
            time.sleep(wait)
            os.kill(os.getpid(), signal.SIGINT)
        sent.set()

    def ignore() -> None:
        handlers.append(signal.signal(signal.SIGINT, signal.SIG_IGN))

    presses = threading.Thread(target=press)
    presses.start()
    try:  # three times: either Ctrl-C may come while the one before is handled
        try:
            try:
                go.set()
                call()
                ended.append(True)
                ignore()
            except KeyboardInterrupt:
                caught += not ended
                ignore()
        except KeyboardInterrupt:
            caught += not ended
            ignore()
    except KeyboardInterrupt:
        caught += not ended
        ignore()
    sent.wait()
    presses.join()
    time.sleep(0.001)  # what was sent is delivered
    assert handlers[0] is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return bool(ended), caught


def _is_free(model: torch.nn.Module) -> bool:
    """Whether another thread gets its turn."""
    free: list[bool] = []

    def take() -> None:
        lock = turn_of(model)
        free.append(lock.acquire(timeout=5))
        if free[0]:
            lock.release()

    taker = threading.Thread(target=take)
    taker.start()
    taker.join()
    return free == [True]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupted_twice(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, print)
