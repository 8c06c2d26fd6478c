"""The first of the random failures; the full run has 300 of them, `make nightly` goes on to 20,000."""

import pytest
from covering import graded
from torture import BATCH, starve, torture, torture_all

FEW = 24
FEWER = 12  # every tensor is counted in these, which takes long


def check_failures(seeds):
    taken = torture_all(seeds)
    assert taken["recovered"] > len(seeds) / 2
    assert taken["release"] > len(seeds) / 3


def check_starved(seeds):
    recovered = [starve(seed) for seed in seeds]
    assert sum(recovered) > len(recovered) / 2


def test_random_failures_change_no_token():
    check_failures(range(FEW))


@pytest.mark.parametrize("seed", [62, 1749])
def test_a_cache_that_fails_within_its_first_prompt_goes_on(seed):
    assert torture(seed)[-1] == "gave up"  # which gives the cache, with what it has read, to a second call


def test_a_tensor_without_memory_changes_no_token():
    check_starved(range(FEWER))


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(3))
def test_more_failures(batch):
    check_failures(range(batch * BATCH, (batch + 1) * BATCH))


@pytest.mark.parametrize("batch", graded((), [0], [1, 2]))
def test_more_tensors(batch):
    check_starved(range(batch * 40, (batch + 1) * 40))
