"""Random sequences of operations find what those written by hand miss."""

import pytest
from contract import each_cell
from walk import walk

pytestmark = pytest.mark.covering("values", "pairs")


@pytest.mark.parametrize("operations", [30, pytest.param(90, marks=pytest.mark.product)])
@each_cell
def test_any_sequence_of_operations(trial, rows, backend, kind, operations):
    done = []
    try:
        for operation in walk(trial, f"{backend} {kind} {rows}", operations):
            done.append(operation)
    except BaseException as failure:
        failure.args = (f"{failure}\nafter {done}",)
        raise
