"""Measures which matrix product is the fastest for each shape of matrix and number of rows: `engine linears`.

Nothing is measured while other programs use the processors: products whose threads wait for each other would lose to
those of one thread.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import TypeVar

import torch
from torch.nn import functional

from caches.platform.machine import last_level_cache_bytes, usable_processors, write_atomically
from caches.platform.out_of_memory import recovering
from engine.kernels.linear_routes import ROW_LIMITS, TORCH, Names, Route, Shape, is_large, path, routes, stored

Group = TypeVar("Group")
_MARGIN = 1.1  # a route has to be so many times as fast as torch's own
_REPEATS = 7
_ROWS = (*ROW_LIMITS[:-1], 48, 256)  # one for each bucket: 4, 8 and 16 rows are more usual than those between
_TIMED = 2**22  # elements that one timing reads, at least: 16 MB. From 16 rows on fewer, as each takes longer
_LARGEST = 2**23  # elements: a larger matrix is measured by its first rows, which are computed alike
_POOL_BYTES = (2**26, 2**29)  # bounds of what the measured matrices are taken from
_QUIET = 0.85  # the least share of the processors' time that a quiet machine gives to the threads that ask for it
_PROBE_SECONDS = 0.05


def fastest(shapes: Iterable[Shape]) -> dict[Shape, Names]:
    """For each shape and bucket of rows the name of the fastest route, or "torch".

    What is not stored yet is measured now (about 1 s per shape), and stored. Small matrices are left out. So are those
    without a result while other programs use the processors, or if memory is out.
    """
    results = stored()
    missing = sorted(shape for shape in set(shapes) - results.keys() if is_large(shape))
    with suppress(_Busy):
        if missing and (measured := _measure(missing)):
            results = measured | stored()  # what another process has written meanwhile stays
            text = json.dumps({f"{outs}x{width}": names for (outs, width), names in results.items()}, indent=1)
            with suppress(OSError):  # then only this process knows them
                write_atomically(path(), text.encode())
    return results


@torch.autocast("cpu", enabled=False)
@torch.no_grad()
def _measure(shapes: Iterable[Shape]) -> dict[Shape, Names]:
    """The fastest route per shape and bucket; none if memory is out. Raises `_Busy`."""
    assert len(_ROWS) == len(ROW_LIMITS) + 1
    least, most = _POOL_BYTES
    with recovering():
        # Larger than the processor's caches. Not torch.zeros: its pages may all be one physical page.
        bytes = min(max(least, last_level_cache_bytes() * 5 // 4), most)
        pool = torch.full((bytes // 4,), 0.01, dtype=torch.float32, device="cpu")
        _check_quiet(pool)
        works = {(shape, rows): _works(_matrices(pool, shape, rows), rows) for shape in shapes for rows in _ROWS}
        relative = against_torch(works, partial(_check_quiet, pool))
        return {shape: tuple(_fastest(relative[shape, rows]) for rows in _ROWS) for shape in shapes}
    return {}


class _Busy(Exception):
    """Other programs use the processors."""


def _check_quiet(pool: torch.Tensor) -> None:
    """Raise `_Busy` where the threads of a sum do not get the processors' time. pool: what is summed."""
    if sys.platform == "win32":  # its clock of processor time is too coarse
        return
    begun, of_all, of_this = time.perf_counter(), time.process_time(), time.thread_time()
    while (seconds := time.perf_counter() - begun) < _PROBE_SECONDS:
        pool.sum()
    wanted = _QUIET * seconds * min(torch.get_num_threads(), usable_processors())
    if time.process_time() - of_all < wanted or time.thread_time() - of_this < _QUIET * seconds:
        raise _Busy


def _matrices(pool: torch.Tensor, shape: Shape, rows: int = 1) -> Callable[[], list[torch.Tensor]]:
    """Returns the next matrices of this shape in `pool`, which are in no cache of the processor."""
    width = min(shape[1], len(pool))
    outs = max(1, min(shape[0], _LARGEST // width))
    size = outs * width
    endless = cycle([part.view(outs, width) for part in pool.split(size) if len(part) == size])
    count = -(-_TIMED // (size * max(1, rows // 8)))
    return lambda: list(islice(endless, count))


def _works(matrices: Callable[[], list[torch.Tensor]], rows: int) -> dict[str, Callable[[], float]]:
    """For each route a function that takes the seconds of its products. matrices: see `_matrices`."""
    input = torch.ones(rows, matrices()[0].shape[1], dtype=torch.float32, device="cpu")

    def seconds(route: Route) -> float:
        inputs = matrices()
        begun = time.perf_counter()
        for matrix in inputs:
            route(input, matrix, None)
        return time.perf_counter() - begun

    return {name: partial(seconds, route) for name, route in {TORCH: functional.linear, **routes()}.items()}


def _fastest(relative: dict[str, float]) -> str:
    """The fastest route, or torch's own where no other is faster by the margin. relative: see `against_torch`."""
    best = min(relative, key=relative.__getitem__)
    return best if relative[best] * _MARGIN < 1 else TORCH


def against_torch(
    groups: Mapping[Group, dict[str, Callable[[], float]]], check: Callable[[], None] = lambda: None
) -> dict[Group, dict[str, float]]:
    """For each group the seconds that its works return, relative to those of "torch" in the same round: the medians.

    On a machine that others use too the speed of memory changes from second to second, and the least of all seconds may
    be that of a lucky one. What is 3 times slower than the fastest of its group is called no more, and left out.

    check: called after each round; it may raise.
    """
    for works in groups.values():
        for work in works.values():
            work()  # warm-up
    rounds: dict[Group, list[dict[str, float]]] = {group: [] for group in groups}
    for _ in range(_REPEATS):
        for group, works in groups.items():
            rounds[group].append({name: works[name]() for name in _kept(works, rounds[group])})
        check()
    return {group: _medians(taken) for group, taken in rounds.items()}


def _kept(names: Iterable[str], rounds: list[dict[str, float]]) -> list[str]:
    """Those of the works that are called once more."""
    if len(rounds) < 2:  # any one may have been disturbed
        return list(names)
    relative = _medians(rounds)
    limit = 3 * min(relative.values())
    return [name for name, value in relative.items() if value <= limit or name == TORCH]


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(one[name] / one[TORCH] for one in rounds) for name in rounds[-1]}
