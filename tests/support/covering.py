"""Few cases that stand for a product of many: those in which every two values meet."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from typing import Any, Literal

import pytest


def graded(default: Iterable[Any], slow: Iterable[Any], nightly: Iterable[Any] = ()) -> list[Any]:
    """Values of one parameter: the first for the default run, more for the full one, the rest for the nightly one."""
    marked = ((pytest.mark.slow, slow), (pytest.mark.product, nightly))
    return [*default, *(pytest.param(value, marks=mark) for mark, values in marked for value in values)]


def pairwise(**factors: Sequence[Any]) -> list[dict[str, Any]]:
    """Few cases in which every two values of different factors meet."""
    sides = [(name, value) for name, values in factors.items() for value in values]
    missing = {frozenset(two): two for two in combinations(sides, 2) if two[0][0] != two[1][0]}
    cases = []
    while missing:
        case = dict(next(iter(missing.values())))
        for name in [name for name in factors if name not in case]:
            met = {value: sum(frozenset([(name, value), side]) in missing for side in case.items())
                   for value in factors[name]}  # fmt: skip
            case[name] = max(met, key=met.__getitem__)
        for two in combinations(case.items(), 2):
            missing.pop(frozenset(two), None)
        cases.append({name: case[name] for name in factors})
    return cases


def keep_default_cells(metafunc: pytest.Metafunc) -> None:
    """Make no items of those cells of a test that `mark_surplus` would keep out of the default run: they are many."""
    kept = [call for call in metafunc._calls if not {mark.name for mark in call.marks} & {"slow", "product"}]
    marker = metafunc.definition.get_closest_marker("covering")
    if marker and marker.args[0] == "values":
        chosen = _covering([_duties(_values(metafunc.function.__name__, call.params), "values") for call in kept])
        kept = [call for number, call in enumerate(kept) if number in chosen]
    metafunc._calls = kept or metafunc._calls[:1]


def mark_surplus(items: Iterable[pytest.Item]) -> None:
    """Of the cells of tests marked `covering`, mark as `slow` or `product` those that the default run can do without.

    `covering("values")`: every test meets every value of each of its parameters; the other cells are `product`.
    `covering("pairs")`: also every two values of different parameters meet in some test of the module.
    `covering("values", "pairs")`: the default run covers the values; what the pairs need beside is `slow`.
    """
    modules = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("covering")
        if marker and not item.get_closest_marker("product"):
            slow = item.get_closest_marker("slow") is not None  # these cover by themselves
            modules[item.path, slow].append((item, marker.args))
    for cells in modules.values():
        tests, default = defaultdict(list), set()
        values = [_values(item.originalname, item.callspec.params if hasattr(item, "callspec") else {})
                  for item, _ in cells]  # fmt: skip
        for number, (item, args) in enumerate(cells):
            tests[item.originalname if args[0] == "values" else None].append(number)
        for test, numbers in tests.items():
            chosen = _covering([_duties(values[number], "values" if test else "pairs") for number in numbers])
            default |= {numbers[place] for place in chosen}
        full = _covering([_duties(those, args[-1]) for those, (_, args) in zip(values, cells, strict=True)], default)
        for number, (item, _) in enumerate(cells):
            if number not in full:
                item.add_marker("product")
            elif number not in default:
                item.add_marker("slow")


def _covering(duties: list[set], kept: Iterable[int] = ()) -> set[int]:
    """The numbers of few cells that together have every duty: first those that add most, after the ones in `kept`."""
    chosen = {number for number, those in enumerate(duties) if not those} | set(kept)
    done = set().union(*(duties[number] for number in chosen))
    order = random.Random(0).sample(range(len(duties)), len(duties))  # else the first values would be met most often
    waiting = [(-len(duties[number]), place) for place, number in enumerate(order) if number not in chosen]
    heapify(waiting)
    while waiting:
        promised, place = heappop(waiting)
        added = len(duties[order[place]] - done)
        if added == -promised:
            chosen.add(order[place])
            done |= duties[order[place]]
        elif added:  # others have done some of it since
            heappush(waiting, (-added, place))
    return chosen


def _duties(values: list[tuple[str, Any]], what: Literal["values", "pairs"]) -> set:
    """What has to be met in some cell, and is in this one. values: its test and its parameters, in a fixed order."""
    test, *others = values
    return set(combinations(values, 2) if what == "pairs" else product([test], others))


def _values(test: str, parameters: dict[str, Any]) -> list[tuple[str, Any]]:
    """The test's name and its parameters, each with its value in one cell."""
    return [("test", test), *(one for name in sorted(parameters) for one in _flat(name, parameters[name]))]


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list, tuple)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(f"{name}.{key}", one)
    elif isinstance(value, (str, int, float, bool, type(None))):
        yield name, value
    else:
        yield name, id(value)
