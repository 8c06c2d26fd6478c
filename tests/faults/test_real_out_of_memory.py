"""Memory does run out: in a process with a limit, and on a GPU of which only a share may be used."""

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

TESTS = SUPPORT
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
    # The C library keeps memory that is free, which counts too: here larger tensors are given back at once.
    alone = {"MALLOC_MMAP_THRESHOLD_": "100000"}
    environment = os.environ | alone | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, TESTS / "starved.py", json.dumps(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits what a process has for itself")
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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits what a process has for itself")
def test_without_a_way_out_there_is_what_was_generated():
    case = CASES["a long text"]
    found = starved(**case | {"options": case["options"] | {"on_oom": ["release", "chunk"]}, "peer": False})
    begun, whole = found["ours"]["tokens"], found["free"]["tokens"]
    assert "memory was out" in found["ours"]["died"]
    assert len(begun[0]) < len(whole[0])
    assert begun == [tokens[: len(begun[0])] for tokens in whole]


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
