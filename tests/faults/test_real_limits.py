"""Memory does run out: in processes with limits, and on a GPU of which only a share may be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from places import ROOT, SUPPORT
from starved import build

import engine

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits what a process has for itself")
# The C library keeps memory that is free, which counts too: here larger tensors are given back at once.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "100000"}


def output_of(script: str, *arguments: str, **environment: str) -> str:
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, SUPPORT / script, *arguments]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Limits drawn at random; `make limits` has 300 of them.

FEW = (23,)  # that end soon
BATCHES = [range(begin, begin + 12) for begin in range(0, 24, 12)]


@only_linux
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "seeds",
    [FEW, *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in BATCHES)],
    ids=lambda seeds: f"from-{seeds[0]}",
)
def test_a_run_under_a_limit_ends_with_its_text_or_an_error(seeds):
    said = output_of("limits.py", "--start-s", "60", "--seed", *map(str, seeds))  # not a timed test
    assert said.count("seed ") == len(seeds)


# Beside `model.generate`, which dies.

NEVER = 1999  # a token that nothing says: how long the text gets is not known, so room is made as it comes
CASES = {
    # Keys and values of the prompt alone do not fit.
    "a long prompt": dict(rows=2, tokens=1000, margin_bytes=40_000_000, options=dict(max_new_tokens=8)),
    # They fit, and in the middle of the text there is no room for more.
    "a long text": dict(rows=4, tokens=250, margin_bytes=63_000_000,
                        options=dict(max_new_tokens=280, eos_token_id=NEVER)),
    "forty beams": dict(rows=1, tokens=200, margin_bytes=50_000_000,
                        options=dict(max_new_tokens=40, num_beams=40, num_return_sequences=20, early_stopping=True)),
}  # fmt: skip


def starved(**case) -> dict:
    return json.loads(output_of("starved.py", json.dumps(case), **GIVES_BACK).splitlines()[-1])


@only_linux
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_text_is_finished_where_transformers_dies(case):
    found = starved(**CASES[case])
    free, ours = found["free"], found["ours"]
    print(found["theirs"]["died"], ours.get("died"), *ours["fallbacks"], sep="\n")
    assert free["fallbacks"] == []
    assert ours["tokens"] == free["tokens"]
    assert ours["names"][-1] == "offload"
    assert (ours["seen"][-1] > CASES[case]["tokens"]) == (case != "a long prompt")
    said = {token for tokens in free["tokens"] for token in tokens}
    assert len(said) > 15  # a text that says the same all the time would prove little


@only_linux
@pytest.mark.slow
def test_without_a_way_out_there_is_what_was_generated():
    case = CASES["a long text"]
    found = starved(**case | {"options": case["options"] | {"on_oom": ["release", "chunk"]}, "peer": False})
    begun, whole = found["ours"]["tokens"], found["free"]["tokens"]
    assert "memory was out" in found["ours"]["died"]
    assert len(begun[0]) < len(whole[0])
    assert begun == [tokens[: len(begun[0])] for tokens in whole]


# Where scores take most of the memory: 32 rows and 128,000 words.

TIMES = [0.6, 1.02, 1.1, 1.25, 1.5, 2, 3]


@pytest.fixture(scope="module")
def scored() -> list[dict]:
    return json.loads(output_of("scored.py", json.dumps({"times": TIMES, "runs": 3}), **GIVES_BACK).splitlines()[-1])


@only_linux
@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, len(TIMES)))
def test_where_transformers_survives_so_do_we_in_its_time(number, scored):
    case = scored[number]
    print(case)
    assert case["died"] == {"ours": None, "theirs": None}
    assert case["fallbacks"] == []
    assert case["same"]
    assert case["ratio"] <= 3  # the script measures it; here the machine may be busy


@only_linux
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TIMES)))
def test_the_plan_says_what_the_run_does(number, scored):
    case = scored[number]
    plan, undisturbed = case["plan"], case["fallbacks"] == [] and case["died"]["ours"] is None
    print(case)
    if plan["fits"]:
        assert undisturbed
    elif plan["need"] > plan["free"]:  # not only less than a tenth to spare
        assert not undisturbed


@pytest.mark.cuda
def test_forty_beams_in_a_share_of_a_gpu():
    """With the share that transformers' prompt of forty equal rows does not fit in."""
    shape = dict(vocab_size=2000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=24,
                 num_attention_heads=16, max_position_embeddings=4096)  # fmt: skip
    model = build(shape).to("cuda")
    ids = torch.randint(3, 2000, (1, 1000), generator=torch.Generator().manual_seed(0)).cuda()
    beams = dict(max_new_tokens=23, num_beams=40, num_return_sequences=20, early_stopping=True)
    free = engine.generate(model, ids, **beams)
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    # What forty beams have of their own does not fit, the layers at work do.
    share = torch.cuda.memory_allocated() + free.stats.cache_bytes // 2
    del free.__dict__["cache"]
    torch.cuda.set_per_process_memory_fraction(share / whole)
    try:
        ours = engine.generate(model, ids, **beams)
        with pytest.raises(torch.OutOfMemoryError):
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **beams)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert ours.stats.fallbacks[-1].name == "offload"
    assert ours.stats.cache == "offloaded"
    assert ours.tokens == free.tokens
