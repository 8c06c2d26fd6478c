"""The matrix products of linear layers other than torch's own, and which is the fastest for each shape of matrix.

They are measured once per machine, where the kind of processor does not tell, and the results are kept in a file. With
a measurement per process, the results of a script would differ from run to run: routes differ by rounding, and near a
tie the choice is random. Nothing is measured while other programs use the processors: products whose threads wait for
each other would lose to those of one thread.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from hashlib import sha256
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import TypeAlias, TypeVar

import torch
from filelock import FileLock
from torch.nn import functional

from caches.platform.machine import (
    cache_folder,
    last_level_cache_bytes,
    once_per_machine,
    processor,
    usable_processors,
    write_atomically,
)
from caches.platform.out_of_memory import recovering
from caches.platform.torch_api import has_onednn, onednn_linear
from engine.kernels.linear_kernels import kernels

Route: TypeAlias = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]
"""A matrix product: (input [..., width], weight [outs, width], bias [outs] or None) -> [..., outs], on the CPU."""

Shape: TypeAlias = tuple[int, int]
"""Of a matrix: (outs, width)."""

Names: TypeAlias = tuple[str, ...]
"""The name of a route, or "torch", for each bucket of rows."""

Group = TypeVar("Group")
TORCH = "torch"
ROW_LIMITS = (1, 4, 8, 16, 32, 64)  # the most rows of each bucket; the last bucket has no limit
ROW_NAMES = ("1 row", "2-4", "5-8", "9-16", "17-32", "33-64", "more")
ALL_TORCH: Names = (TORCH,) * len(ROW_NAMES)

_MEASUREMENT = 14  # version of the method: results of other versions are ignored
_MARGIN = 1.1  # a route has to be so many times as fast as torch's own
_REPEATS = 7
_ROWS = (*ROW_LIMITS[:-1], 48, 256)  # one for each bucket: 4, 8 and 16 rows are more usual than those between
_TIMED = 2**22  # elements that one timing reads, at least: 16 MB. From 16 rows on fewer, as each takes longer
_SMALL = 2**17  # elements: for smaller ones calling a route takes as long as what it would save
_LARGEST = 2**23  # elements: a larger matrix is measured by its first rows, which are computed alike
_POOL_BYTES = (2**26, 2**29)  # bounds of what the measured matrices are taken from
_QUIET = 0.85  # the least share of the processors' time that a quiet machine gives to the threads that ask for it
_PROBE_SECONDS = 0.05
_PATIENCE_SECONDS = 60  # with another process that measures
_lock = threading.Lock()
_known: dict[str, dict[Shape, Names]] = {}


def shape_of(weight: torch.Tensor) -> Shape:
    outs, width = weight.shape
    return outs, width


def _swapped(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The transposed product. oneDNN packs its second operand: here the small input, not the weight."""
    rows = input.reshape(-1, input.shape[-1]).contiguous()  # oneDNN is 500 times slower with a strided one
    return with_bias(onednn_linear(weight, rows, None).T, input, bias)


def mm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return with_bias(torch.mm(weight, input.reshape(-1, input.shape[-1]).T).T, input, bias)


def _kernel(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The kernel of `native/products.cpp`, once `kernels` has loaded it."""
    if weight.stride(1) != 1:
        return functional.linear(input, weight, bias)
    out: torch.Tensor = torch.ops.kvengine.linears(input.contiguous(), [weight])
    if bias is not None:
        out += bias
    return out


def with_bias(product: torch.Tensor, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = product.contiguous()
    if bias is not None:
        out += bias
    return out.view(*input.shape[:-1], -1)


def routes() -> dict[str, Route]:
    """The routes other than torch's own that there are on this machine, by name."""
    found: dict[str, Route] = {"mm": mm}
    if kernels() is not None:
        found["kernel"] = _kernel
    if has_onednn():
        found |= {"onednn": onednn_linear, "swapped": _swapped}
    return found


def usual(shapes: Iterable[Shape]) -> dict[Shape, Names]:
    """What calls use: the results that are stored; else those that all measurements of this kind of processor agree
    on, without measuring; else `fastest`, which measures."""
    shapes = set(shapes)
    agreed = _agreed()
    if agreed is None:
        return fastest(shapes)
    wanted = _large(shapes)
    with _lock:
        stored = _known.setdefault(_machine(), {})
        if wanted - stored.keys():
            stored.update(_read())
        return {shape: stored.get(shape, agreed) if shape in wanted else ALL_TORCH for shape in shapes}


def _agreed() -> Names | None:
    """On AMD's processors with AVX-512 the kernel was the fastest for all shapes and rows, or within a tenth of it."""
    is_known = sys.platform == "linux" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    is_known = is_known and processor().startswith("AMD")
    return ("kernel",) * len(ROW_NAMES) if is_known and "kernel" in routes() else None


def fastest(shapes: Iterable[Shape]) -> dict[Shape, Names]:
    """For each shape and bucket of rows the name of the fastest route, or "torch".

    Measured (about 1 s per shape) unless there is a result for this processor, number of threads, release of torch and
    list of routes. Small matrices use torch's own. If other programs use the processors, shapes without a result get
    the usual routes, and if memory is out, "torch"; then the next call measures again.
    """
    shapes = set(shapes)
    wanted = _large(shapes)
    if not wanted:
        return dict.fromkeys(shapes, ALL_TORCH)
    with _lock:
        machine = _machine()
        known = _known.setdefault(machine, {})
        if wanted - known.keys():
            known.update(_read())
        other = ALL_TORCH
        if wanted - known.keys():
            with _alone():
                known.update(_read())
                missing = sorted(wanted - known.keys())
                try:
                    if missing and (measured := _measure(missing)):
                        known.update(_stored_with(measured))
                except _Busy:
                    other = _usual()
        return {shape: known.get(shape, other) if shape in wanted else ALL_TORCH for shape in shapes}


def are_measured(shapes: Iterable[Shape]) -> bool:
    """Whether `fastest` has results for them."""
    return _large(shapes) <= _known.get(_machine(), {}).keys()


def _large(shapes: Iterable[Shape]) -> set[Shape]:
    return {shape for shape in shapes if shape[0] * shape[1] >= _SMALL}


def _usual() -> Names:
    """The kernel for few rows, which is the fastest on most processors that were measured: on Linux it has threads."""
    is_known = sys.platform == "linux" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return ("kernel",) * len(ROW_LIMITS) + (TORCH,) if is_known and "kernel" in routes() else ALL_TORCH


@contextmanager
def _alone() -> Iterator[None]:
    """While no other process measures, as they would disturb each other: it waits for them."""
    with ExitStack() as stack:
        with suppress(OSError):
            lock = path().with_suffix(".lock")
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(lock, timeout=_PATIENCE_SECONDS))
        yield


def path() -> Path:
    """The file with the results for this machine. Raises `OSError` if the user has no home folder."""
    return cache_folder() / f"linears-{sha256(_machine().encode()).hexdigest()[:16]}.json"


def _machine() -> str:
    threads, names = torch.get_num_threads(), " ".join(routes())
    return f"{_MEASUREMENT}\n{processor()}\n{threads} threads\ntorch {torch.__version__}\n{names}"


def _read() -> dict[Shape, Names]:
    """The results in the file; none if it cannot be read."""
    try:
        stored = json.loads(path().read_text())
    except (OSError, ValueError):
        return {}
    known, found = (TORCH, *routes()), {}
    for text, names in stored.items() if isinstance(stored, dict) else ():
        outs, _, width = text.partition("x")
        is_valid = isinstance(names, list) and len(names) == len(_ROWS) and all(name in known for name in names)
        if is_valid and outs.isdecimal() and width.isdecimal():
            found[int(outs), int(width)] = tuple(names)
    return found


def _stored_with(measured: dict[Shape, Names]) -> dict[Shape, Names]:
    """Add results to the file. Returns what it holds then: what another process wrote in the meantime stays."""
    results = measured | _read()
    text = json.dumps({f"{outs}x{width}": names for (outs, width), names in results.items()}, indent=1)
    with suppress(OSError):  # then the results are valid for this process only
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
        once_per_machine.info("measuring matrix products on this machine, once")
        works = {(shape, rows): _works(_matrices(pool, shape, rows), rows) for shape in shapes for rows in _ROWS}
        found = against_torch(works, partial(_check_quiet, pool))
        return {shape: tuple(_fastest(found[shape, rows]) for rows in _ROWS) for shape in shapes}
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
        given = matrices()
        begun = time.perf_counter()
        for matrix in given:
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
