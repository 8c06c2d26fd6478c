"""The first 2,000 of the random failures, most of them as slow tests: `make torture` goes on to 20,000."""

import pytest
from torture import BATCH, starve, torture_all

BATCHES = [0, 1, *(pytest.param(batch, marks=pytest.mark.slow) for batch in range(2, 20))]


@pytest.mark.parametrize("batch", BATCHES)
def test_random_failures_change_no_token(batch):
    taken = torture_all(range(batch * BATCH, (batch + 1) * BATCH))
    assert taken["recovered"] > BATCH / 2
    assert taken["release"] > BATCH / 3


@pytest.mark.parametrize("batch", BATCHES[:6])
def test_a_tensor_without_memory_changes_no_token(batch):
    recovered = [starve(seed) for seed in range(batch * 40, (batch + 1) * 40)]
    assert sum(recovered) > len(recovered) / 2
