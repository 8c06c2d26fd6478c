"""Runs whose scores take most of the memory, beside `model.generate` under the same limits, in processes of their own.

    python tests/support/scored.py '{"times": [0.6, 1, 2], "runs": 3}'

The limits are multiples of the least with which `model.generate` comes to its end, RLIMIT_DATA beyond what the process
has. One JSON line: for each of them the seconds of both in turns, how they ended, the fallbacks taken, and what
`engine.plan` says. Linux only.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
from limits import Limit, in_a_fork
from starved import build, theirs, told

import engine

SHAPE = dict(vocab_size=128_000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=512)  # fmt: skip
ROWS, TOKENS, NEW = 32, 16, 12


def planned(model: Any) -> dict[str, Any]:
    """Whether the plan says that the run fits into what is free now."""
    found = engine.plan(model, cache="dynamic", prompt_tokens=TOKENS, max_new_tokens=NEW, batch_size=ROWS)
    [dynamic] = found.backends
    return {"fits": dynamic.fits, "need": sum(dynamic.need_bytes.values()), "free": found.free_bytes["device"]}


def run(generator: engine.Generator, ids: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    try:
        out = generator.generate(ids, **options)
    except engine.OutOfMemoryError as stopped:
        return {"died": str(stopped)} | told(stopped.partial)
    return told(out)


def timed(work: Any, *arguments: Any) -> dict[str, Any]:
    begun = time.perf_counter()
    found = work(*arguments)
    return found | {"seconds": time.perf_counter() - begun}


def compare(margin: int, runs: int, model: Any, ids: torch.Tensor, linears: str) -> dict[str, Any]:
    """Both under one limit, `runs` times in turns."""
    options = {"max_new_tokens": NEW}
    ours = partial(run, engine.Generator(model, config=engine.EngineConfig(linears=linears)))
    limit = Limit("VmData", margin)
    found: dict[str, list] = {"ours": [], "theirs": []}
    for _ in range(runs):
        found["theirs"].append(in_a_fork(partial(timed, theirs, model, ids, options), limit))
        found["ours"].append(in_a_fork(partial(timed, ours, ids, options), limit))
    last_ours, last_theirs = found["ours"][-1], found["theirs"][-1]
    seconds = {who: [one.get("seconds") for one in all_of_it] for who, all_of_it in found.items()}
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["theirs"], strict=True) if a and b]
    return {
        "margin_mb": margin / 1e6,
        "plan": in_a_fork(partial(planned, model), limit),
        "seconds": seconds,
        "ratio": statistics.median(ratios) if ratios else None,
        "fallbacks": last_ours.get("fallbacks"),
        "died": {"ours": last_ours.get("died"), "theirs": last_theirs.get("died")},
        "same": last_ours.get("tokens") == last_theirs.get("tokens"),
    }


def least_of_theirs(model: Any, ids: torch.Tensor) -> int:
    """The least limit with which `model.generate` comes to its end, to 1 MB."""
    low, high = 0, 400_000_000
    while high - low > 1_000_000:
        middle = (low + high) // 2
        died = "died" in in_a_fork(partial(theirs, model, ids, {"max_new_tokens": NEW}), Limit("VmData", middle))
        low, high = (middle, high) if died else (low, middle)
    return high


def main(times: list[float], runs: int = 1, linears: str = "default") -> None:
    torch.set_num_threads(1)
    model = build(SHAPE)
    ids = torch.randint(3, 2000, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    for cache in ("dynamic", "offloaded"):  # what is loaded or measured once per process
        engine.generate(model, ids[:2], cache=cache, max_new_tokens=2)
    model.generate(ids[:2], max_new_tokens=2, do_sample=False)
    planned(model)
    least = least_of_theirs(model, ids)
    print(json.dumps([compare(int(time * least), runs, model, ids, linears) for time in times]))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
