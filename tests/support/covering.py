"""Few cases that stand for a product of many: those in which every two values meet."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, Literal

import pytest


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


def mark_surplus(items: Iterable[pytest.Item]) -> None:
    """Mark as `product` the cells that tests marked `covering` can do without.

    `covering("values")`: every test meets every value of each of its parameters.
    `covering("pairs")`: also every two values of different parameters meet in some test of the module.
    """
    modules = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("covering")
        if marker and not item.get_closest_marker("product"):
            slow = item.get_closest_marker("slow") is not None  # these cover by themselves
            modules[item.path, slow].append((item, _duties(item, *marker.args)))
    for cells in modules.values():
        random.Random(0).shuffle(cells)  # else the first values of a parameter would be met most often
        done: set[frozenset] = set()
        kept = set()
        for least in range(max(len(duties) for _, duties in cells), 0, -1):  # first the cells that say most
            for item, duties in cells:
                if item not in kept and len(duties - done) >= least:
                    kept.add(item)
                    done |= duties
        for item, duties in cells:
            if duties and item not in kept:
                item.add_marker("product")


def _duties(item: pytest.Item, what: Literal["values", "pairs"]) -> set[frozenset]:
    """What has to be met in some cell, and is in this one."""
    test, *values = _values(item)
    return set(map(frozenset, combinations([test, *values], 2) if what == "pairs" else product([test], values)))


def _values(item: pytest.Item) -> list[tuple[str, Any]]:
    """The names of a test's parameters, each with its value here."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return [("test", item.originalname), *(one for name in parameters for one in _flat(name, parameters[name]))]


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list, tuple)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(f"{name}.{key}", one)
    elif isinstance(value, (str, int, float, bool, type(None))):
        yield name, value
    else:
        yield name, id(value)
