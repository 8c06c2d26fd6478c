"""Random sequences of operations find what those written by hand miss."""

import pytest
from contract import each_cell
from walk import walk

pytestmark = pytest.mark.covering("pairs")


@each_cell
def test_any_sequence_of_operations(trial, rows, backend, kind):
    done = []
    try:
        for operation in walk(trial, seed=f"{backend} {kind} {rows}"):
            done.append(operation)
    except BaseException as failure:
        failure.args = (f"{failure}\nafter {done}",)
        raise
