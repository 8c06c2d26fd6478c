"""Real limits of memory, drawn at random; `make limits` has 300 of them."""

import os
import subprocess
import sys

import pytest
from places import ROOT, SUPPORT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has limits that count")

FEW = (23,)  # that end soon
BATCHES = [range(begin, begin + 12) for begin in range(0, 60, 12)]


def check_limits(seeds):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SUPPORT / "limits.py", "--start-s", "60", "--seed", *map(str, seeds)]  # not a timed test
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("seed ") == len(seeds)


def test_a_run_under_a_limit_ends_with_its_text_or_an_error():
    check_limits(FEW)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seeds", BATCHES, ids=lambda seeds: f"from-{seeds[0]}")
def test_more_limits(seeds):
    check_limits(seeds)
