"""Measures which matrix product is the fastest on this machine, once; the result is stored in a file.

With a measurement per process, the results of a script would differ from run to run: routes differ by rounding, and
near a tie the choice is random.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import cycle, islice
from pathlib import Path

import torch
from torch.nn import functional

from caches.out_of_memory import is_out_of_memory
from caches.quantization.machine import cache_folder, processor, write_atomically
from engine.model.linear_products import ROW_LIMITS, TORCH, Route, routes

_MEASUREMENT = 2  # version of the method: results of other versions are ignored
_MARGIN = 1.1  # a route has to be so many times as fast as torch's own
_REPEATS = 11
_ROWS = (1, 2, 6, 16, 64)  # one for each bucket
_SHAPES = {"medium": (2048, 768, 3), "large": (4096, 2048, 1)}  # outs, width, and matrices per timing
_POOL = 2**24  # elements of all matrices, 64 MB: more than the processor's caches
_lock = threading.Lock()
_known: dict[tuple[str, str], tuple[str, ...]] = {}


def fastest(size: str) -> tuple[str, ...]:
    """The name of the fastest route, or "torch", for each bucket of rows. size: "medium" or "large".

    Measured (about 2 s) unless there is a result for this processor, number of threads and release of torch. If memory
    is out, it is "torch", and the next call measures again.
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
    """The file with the results for this machine. Raises `OSError` if the user has no home folder."""
    return cache_folder() / f"linears-{sha256(_machine().encode()).hexdigest()[:16]}.json"


def _machine() -> str:
    return f"{_MEASUREMENT}\n{processor()}\n{torch.get_num_threads()} threads\ntorch {torch.__version__}"


def _stored() -> dict[str, list[str]]:
    """The content of the file; empty if it cannot be read."""
    try:
        found = json.loads(path().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read(size: str) -> tuple[str, ...] | None:
    names, known = _stored().get(size), (TORCH, *routes())
    is_valid = isinstance(names, list) and len(names) == len(_ROWS) and all(name in known for name in names)
    return tuple(names) if names and is_valid else None


def _write(size: str, names: tuple[str, ...]) -> None:
    with suppress(OSError):  # then the result is valid for this process only
        write_atomically(path(), json.dumps(_stored() | {size: list(names)}, indent=1).encode())


@torch.autocast("cpu", enabled=False)
def _measure(size: str) -> tuple[str, ...] | None:
    """The fastest route per bucket; None if memory is out."""
    assert len(_ROWS) == len(ROW_LIMITS) + 1
    try:
        # Not torch.zeros: its pages may all be one physical page, which stays in the processor's cache.
        pool = torch.full((_POOL,), 0.01, dtype=torch.float32, device="cpu")
        outs, width, count = _SHAPES[size]
        inputs = [torch.ones(rows, width, dtype=torch.float32, device="cpu") for rows in _ROWS]
        matrices = [part.view(outs, width) for part in pool.split(outs * width) if len(part) == outs * width]
        endless = cycle(matrices)
        return tuple(_fastest_of(lambda: list(islice(endless, count)), input) for input in inputs)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


@torch.no_grad()
def _fastest_of(matrices: Callable[[], list[torch.Tensor]], input: torch.Tensor) -> str:
    """matrices: returns the next ones, which are not in the processor's caches."""

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
    """The ratio of the seconds that `one` and `other` return, called alternately.

    Minima are compared, because other load on the machine only adds time.
    """
    one(), other()  # warm-up
    seconds = [(one(), other()) for _ in range(_REPEATS)]
    return min(first for first, _ in seconds) / min(second for _, second in seconds)
