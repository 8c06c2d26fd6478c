"""Few cells that stand for many leave out nothing that they promise to keep."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

import pytest
from covering import mark_surplus, pairwise

SIDES = {"backend": ["a", "b", "c", "d"], "kind": [1, 2, 3], "options": [{"x": 1, "y": (2, 3)}, {"x": 2}]}


class Cell:
    """What `mark_surplus` asks of a test's item."""

    path = "test_these.py"

    def __init__(self, test, what, marks=(), **parameters):
        self.originalname, self.parameters, self.marked = test, parameters, None
        self.callspec = SimpleNamespace(params=parameters)
        self.marks = {"covering": pytest.mark.covering(*what.split()).mark} | {mark: mark for mark in marks}

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, name):
        self.marked = name

    @property
    def surplus(self):
        return self.marked is not None


def cells(what, tests=("one", "two", "three"), **more):
    found = [Cell(t, what, **more, **dict(zip(SIDES, v, strict=True))) for t in tests for v in product(*SIDES.values())]
    mark_surplus(found)
    return found, [cell for cell in found if not cell.surplus]


def pairs(cells, sides):
    return {frozenset([(a, str(values[a])), (b, str(values[b]))])
            for values in cells for a, b in combinations(sides, 2)}  # fmt: skip


def test_every_two_values_meet_in_some_test_of_the_module():
    every, kept = ([cell.parameters | {"test": cell.originalname} for cell in some] for some in cells("pairs"))
    assert pairs(kept, [*SIDES, "test"]) == pairs(every, [*SIDES, "test"])
    assert 12 <= len(kept) < len(every) / 3  # 4 backends with 3 kinds have to be


def test_every_test_meets_every_value():
    every, kept = ([cell.parameters | {"test": cell.originalname} for cell in some] for some in cells("values"))
    for side in SIDES:
        assert pairs(kept, [side, "test"]) == pairs(every, [side, "test"])
    assert len(kept) <= 3 * 6


def test_the_default_run_covers_values_and_the_full_one_pairs():
    every, kept = cells("values pairs")
    kept = [cell.parameters | {"test": cell.originalname} for cell in kept]
    full = [cell.parameters | {"test": cell.originalname} for cell in every if cell.marked != "product"]
    every = [cell.parameters | {"test": cell.originalname} for cell in every]
    for side in SIDES:
        assert pairs(kept, [side, "test"]) == pairs(every, [side, "test"])
    assert len(kept) <= 3 * 6
    assert pairs(full, [*SIDES, "test"]) == pairs(every, [*SIDES, "test"])
    assert len(full) < len(every) / 2


def test_the_slow_ones_cover_by_themselves():
    fast, slow = (Cell("one", "values", marks, **dict.fromkeys(SIDES, 1)) for marks in ((), ("slow",)))
    mark_surplus([fast, slow])
    assert not fast.surplus
    assert not slow.surplus


def test_what_is_not_tried_covers_nothing():
    every = [Cell("one", "values", marks, **dict.fromkeys(SIDES, 1)) for marks in (["product"], [])]
    mark_surplus(every)
    assert not every[1].surplus


def test_a_test_without_parameters_stays():
    alone = [Cell("one", "pairs"), Cell("two", "values")]
    mark_surplus(alone)
    assert not any(cell.surplus for cell in alone)


def test_cases_in_which_every_two_values_meet():
    sides = {name: list(map(str, values)) for name, values in SIDES.items()}
    every = [dict(zip(sides, values, strict=True)) for values in product(*sides.values())]
    found = pairwise(**sides)
    assert pairs(found, sides) == pairs(every, sides)
    assert 12 <= len(found) < 20
