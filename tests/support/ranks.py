"""Programs of several processes that compute one model together, and what came of them.

    python tests/support/ranks.py memory 200       200 runs of which one rank is out of memory at random moments
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZE = 2
NAMES = ("llama", "mistral", "gemma2", "jamba")


def start(program: str, folder: Path, *arguments: str, size: int = SIZE) -> list[subprocess.Popen]:
    """The processes of `program`, a function of this file, which write what they find into `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common["PYTHONPATH"] = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, program, "--folder", str(folder), *arguments]
    return [
        subprocess.Popen(command, env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]


def found(program: str, *arguments: str, timeout: float = 600) -> list[Any]:
    """What each rank of `program` has found."""
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder))
        ranks = start(program, Path(folder), *arguments)
        try:
            codes = [rank.wait(timeout) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert codes == [0] * SIZE
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(SIZE)]


def save_models(folder: Path) -> None:
    from references import tiny

    for name in NAMES:
        tiny(name)[0].save_pretrained(folder / name)


# What runs in each rank.


def split(folder: Path, name: str) -> Any:
    import engine
    from engine.model.loading import load

    return load(folder / name, _NO_TOKENIZER, engine.EngineConfig(tp=SIZE))[0]


_NO_TOKENIZER = object()  # none is loaded


def compare(folder: Path) -> Any:
    """Every strategy on every cache: texts that differ from those of one process, refusals, and bytes of caches."""
    from random_models import model as _  # noqa: F401
    from references import draft_of, tiny
    from strategy_cases import OPTIONS, REFUSALS

    import caches
    import engine
    import strategies
    from helpers import needed

    different, refused, shares, equal = [], [], {}, 0
    for name in NAMES:
        (whole, inputs), parts = tiny(name, pads=4, rows=2), split(folder, name)
        for cache in caches.names():
            for strategy in strategies.names():
                def generate(model: Any) -> Any:
                    draft = {"assistant_model": draft_of(name)} if strategy == "assisted" else {}
                    import torch
                    torch.manual_seed(4)
                    chosen = strategies.build(strategy, **OPTIONS.get(strategy, {}))
                    return engine.generate(
                        model, inputs, cache=cache, cache_config=needed(cache), strategy=chosen, max_new_tokens=10, **draft
                    )
                cell = [name, cache, strategy]
                try:
                    expected = generate(whole)
                except REFUSALS as error:
                    try:
                        generate(parts)
                        different.append([*cell, "not refused", str(error)])
                    except REFUSALS:
                        refused.append(cell)
                    continue
                got = generate(parts)
                if got.tokens == expected.tokens:
                    equal += 1
                else:
                    different.append([*cell, expected.tokens, got.tokens])
                shares.setdefault(f"{name} {cache}", got.stats.cache_bytes / max(1, expected.stats.cache_bytes))
    return {"different": different, "refused": refused, "shares": shares, "equal": equal}


PROGRAMS: dict[str, Callable[..., Any]] = {"compare": compare}

if __name__ == "__main__":
    program, _, folder, *more = sys.argv[1:]
    import torch

    torch.set_num_threads(1)
    result = PROGRAMS[program](Path(folder), *more)
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
