"""Where scores take most of the memory: 32 rows and 128,000 words, with real limits, beside `model.generate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from places import ROOT, SUPPORT

TIMES = [0.6, 1.02, 1.1, 1.25, 1.5, 2, 3]


@pytest.fixture(scope="module")
def found() -> list[dict]:
    alone = {"MALLOC_MMAP_THRESHOLD_": "100000", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SUPPORT / "scored.py", json.dumps({"times": TIMES, "runs": 3})]
    done = subprocess.run(command, env=os.environ | alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits what a process has for itself"),
]


@pytest.mark.parametrize("number", range(1, len(TIMES)))
def test_where_transformers_survives_so_do_we_in_its_time(number, found):
    case = found[number]
    print(case)
    assert case["died"] == {"ours": None, "theirs": None}
    assert case["fallbacks"] == []
    assert case["same"]
    assert case["ratio"] <= 3  # the script measures it; here the machine may be busy


@pytest.mark.parametrize("number", range(len(TIMES)))
def test_the_plan_says_what_the_run_does(number, found):
    case = found[number]
    plan, undisturbed = case["plan"], case["fallbacks"] == [] and case["died"]["ours"] is None
    print(case)
    if plan["fits"]:
        assert undisturbed
    elif plan["need"] > plan["free"]:  # not only less than a tenth to spare
        assert not undisturbed
