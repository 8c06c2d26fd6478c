"""Which matrix product is the fastest on this machine: measured once, then read from a file.

Measured in every process, the same script would compute differently from run to run: two routes differ in rounding,
and a stopwatch near a tie says now this, now that.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from itertools import cycle, islice
from pathlib import Path

import torch
from torch.nn import functional

from caches.out_of_memory import is_out_of_memory
from caches.quantization.machine import cache_folder, processor, write_atomically
from engine.model.linear_backend import ROW_LIMITS, TORCH, Route, routes

_MEASUREMENT = 2  # which one this is: verdicts of another are not read
_MARGIN = 1.1  # how much faster than torch's own another route has to be
_TURNS = 11
_ROWS = (1, 2, 6, 16, 64)  # one for each bucket
_SHAPES = {"medium": (2048, 768, 3), "large": (4096, 2048, 1)}  # outs, width, and how many are timed at once
_POOL = 2**24  # numbers of all matrices, 64 MB: more than the processor's caches hold
_lock = threading.Lock()
_known: dict[tuple[str, str], tuple[str, ...]] = {}


def fastest(size: str) -> tuple[str, ...]:
    """The name of the fastest route, or "torch", for matrices of this size and each bucket of rows.

    Measured when nothing is known of this processor, number of threads and release of torch: about 2 s. Without memory
    for that it is torch's own, until there is some.
    """
    key = _machine()
    with _lock:
        if (key, size) not in _known:
            found = _read(size)
            if found is None:
                found = _measure(size)
                if found is None:
                    return (TORCH,) * len(_ROWS)
                _write(size, found)
            _known[key, size] = found
        return _known[key, size]


def path() -> Path:
    """Where the verdicts for this machine are. Raises `OSError` where the user has no home."""
    return cache_folder() / f"linears-{sha256(_machine().encode()).hexdigest()[:16]}.json"


def _machine() -> str:
    return f"{_MEASUREMENT}\n{processor()}\n{torch.get_num_threads()} threads\ntorch {torch.__version__}"


def _stored() -> dict[str, list[str]]:
    """What the file says; nothing where there is none that can be read."""
    try:
        found = json.loads(path().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read(size: str) -> tuple[str, ...] | None:
    names = _stored().get(size)
    known = {TORCH, *routes()}
    if not isinstance(names, list) or len(names) != len(_ROWS):
        return None
    if not all(isinstance(name, str) and name in known for name in names):
        return None
    return tuple(names)


def _write(size: str, names: tuple[str, ...]) -> None:
    content = json.dumps(_stored() | {size: list(names)}, indent=1)
    try:
        write_atomically(path(), content.encode())
    except OSError:
        return  # the verdict holds for this process alone


@torch.autocast("cpu", enabled=False)
def _measure(size: str) -> tuple[str, ...] | None:
    """None when memory is out."""
    assert len(_ROWS) == len(ROW_LIMITS) + 1
    try:
        # Written, since all pages of torch.zeros are one page that a cache holds.
        pool = torch.full((_POOL,), 0.01, dtype=torch.float32, device="cpu")
        outs, width, count = _SHAPES[size]
        inputs = [torch.ones(rows, width, dtype=torch.float32, device="cpu") for rows in _ROWS]
        matrices = [part.view(outs, width) for part in pool.split(outs * width) if len(part) == outs * width]
        turns = cycle(matrices)
        return tuple(_fastest_of(lambda: list(islice(turns, count)), input) for input in inputs)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


@torch.no_grad()
def _fastest_of(matrices: Callable[[], list[torch.Tensor]], input: torch.Tensor) -> str:
    """matrices: the next ones, which no cache holds."""

    def seconds(route: Route) -> float:
        given = matrices()
        begun = time.perf_counter()
        for matrix in given:
            route(input, matrix, None)
        return time.perf_counter() - begun

    gains = {
        name: times(partial(seconds, functional.linear), partial(seconds, route)) for name, route in routes().items()
    }
    best = max(gains, key=gains.__getitem__)
    return best if gains[best] > _MARGIN else TORCH


def times(one: Callable[[], float], other: Callable[[], float]) -> float:
    """How many times as long `one` takes, from what both say, in turns.

    The least counts: a verdict is kept for good, and what else the machine does only ever adds.
    """
    one(), other()  # what is prepared once
    turns = [(one(), other()) for _ in range(_TURNS)]
    return min(first for first, _ in turns) / min(second for _, second in turns)
