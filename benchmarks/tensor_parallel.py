"""Tensor parallel: model "small" in one process of one thread, of two, and in two processes of one thread each.

Of the processes: ms per token, bytes of weights and of the cache in each, and per token the collective operations on
tensors, which are those of transformers, and the exchanges of the engine, through memory that the ranks share.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import SHAPES, decode_ms, report
from serve import save_model
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

import engine
from engine.parallel.ranks import ranks_of

HERE = Path(__file__)
SIZES = {"1 process, 1 thread": (1, 1), "1 process, 2 threads": (1, 2), "2 processes, 1 thread each": (2, 1)}


def measured(folder: str, tp: int, new: int, runs: int) -> dict[str, Any]:
    gen = engine.Generator(folder, config=engine.EngineConfig(tp=tp))
    ids = torch.randint(1, 1000, (1, 64), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def generate(tokens: int) -> engine.Generation:
        return gen.generate(inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

    found = decode_ms({"engine": generate}, new, runs)["engine"]
    out, counts = (
        generate(new),
        [operations(lambda tokens=tokens: generate(tokens), gen.model) for tokens in (2, 2 + new)],
    )
    weights = [getattr(parameter, "_local_tensor", parameter) for parameter in gen.model.parameters()]
    return {
        "ms": found,
        "weight_bytes": sum(weight.nbytes for weight in weights),
        "cache_bytes": out.stats.cache_bytes,
        "tokens": out.tokens[0],
        "operations": {name: (counts[1][name] - counts[0][name]) / new for name in ("of tensors", "of the engine")},
    }


class Counting(TorchDispatchMode):
    """Counts collective operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_collective = operation.namespace in ("c10d", "_c10d_functional")
        self.count += is_collective and not re.search("wait|wrap", operation.__name__)
        return operation(*args, **kwargs or {})


def operations(work: Any, model: Any) -> Counter[str]:
    """How many collective operations on tensors there are in `work()`, and exchanges of the engine."""
    before = ranks_of(model).exchanges
    with Counting() as counted:
        work()
    return Counter({"of tensors": counted.count, "of the engine": ranks_of(model).exchanges - before})


def case(folder: str, tp: int, threads: int, new: int, runs: int) -> dict[str, Any]:
    """What rank 0 measures."""
    out = Path(folder) / "found.json"
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(tp)] if tp > 1 else []
    arguments = [str(HERE), "--part", folder, "--tp", str(tp), "--new", str(new), "--runs", str(runs)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, *launch, *arguments], env=environment, check=True)
    return json.loads(out.read_text())


def main(
    model: str = "small",
    new: int = 32,
    runs: int = 5,
    threads: Annotated[int, typer.Option(help="not used: each case has its own")] = 1,
    out: Path | None = None,
    part: Annotated[str | None, typer.Option(help="measure this one, in a process of `tp`")] = None,
    tp: int = 1,
) -> None:
    if part is not None:
        found = measured(part, tp, new, runs)
        if os.environ.get("RANK", "0") == "0":
            (Path(part) / "found.json").write_text(json.dumps(found))
        if tp > 1:
            distributed.destroy_process_group()
        return
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(SHAPES[model], Path(folder))
        for name, (size, own_threads) in SIZES.items():
            cases[name] = case(folder, size, own_threads, new, runs)
    texts = {tuple(found.pop("tokens")) for found in cases.values()}
    report("tensor_parallel", out, model=model, new_tokens=new, cases=cases, same_texts=len(texts) == 1)


if __name__ == "__main__":
    typer.run(main)
