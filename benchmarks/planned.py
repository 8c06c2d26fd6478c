"""What `engine.plan` says of runs, beside the most memory that they take.

    python benchmarks/planned.py --model smollm2 --runs 30 --out planned-cpu.json
    python benchmarks/planned.py --model smollm2 --seed 17

Every seed draws a run: cache, strategy, rows, lengths, weights, chunks of the prompt. It has a process of its own, the
copy of one with a model that is loaded, and takes the run once before it is measured. What comes on top of that is
measured at its peak: the bytes that are allocated, which a plan is about, and the resident ones, among which are the
gaps that the allocator leaves and not the room that nothing was written to. "With weights" is what the process
allocates for the model and the run. "Kept" is what stays allocated after the first run, such as the buffers in which
MKL packs matrices: no plan has it. The cache is planned when it is largest. Prints a table, and one JSON line. Needs
Linux and g++, and one thread, because others do not survive that a process is copied.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from common import report
from memory import forget_peak, in_a_process_of_its_own, memory_bytes, status_bytes
from rich.console import Console
from rich.table import Table

import engine
from caches.platform.host_allocator import give_back_freed_memory
from configs.engine import WEIGHTS_CHOICES

_console = Console(width=160)
WINDOW = {"window_length": 512}
CACHES: list[tuple[str, dict[str, Any]]] = [
    ("dynamic", {}),
    ("static", {}),
    ("offloaded", {"residency": "host"}),
    ("offloaded_static", {"residency": "host"}),
    ("quantized", {"nbits": 4}),
    ("quantized", {"backend": "kivi", "nbits": 2}),
    ("quantized", {"backend": "hqq", "nbits": 8}),
    ("offloaded_quantized", {"nbits": 4}),
    ("sliding_window", WINDOW),
    ("sink", WINDOW),
    ("quantized_sink", WINDOW),
    ("none", {}),
]
STRATEGIES: list[dict[str, Any]] = [
    {}, {}, {"do_sample": True}, {"num_beams": 4}, {"num_beams": 3, "do_sample": True},
    {"do_sample": True, "num_return_sequences": 4},
]  # fmt: skip


@dataclass(frozen=True)
class Run:
    cache: str
    cache_config: dict[str, Any]
    strategy: dict[str, Any]
    rows: int
    prompt_tokens: int
    new_tokens: int
    weights: str
    chunk_tokens: int | None

    @classmethod
    def drawn(cls, seed: int) -> Run:
        draw = Random(f"plan {seed}")
        cache, cache_config = CACHES[seed % len(CACHES)]
        return cls(
            cache=cache,
            cache_config=cache_config,
            strategy=draw.choice(STRATEGIES) if cache != "none" else {},
            rows=draw.choice([1, 1, 2, 4]) if cache != "none" else 1,
            prompt_tokens=draw.randint(50, 1500),
            new_tokens=4 if cache == "none" else draw.choice([8, 16, 32]),
            weights=draw.choice(WEIGHTS_CHOICES),
            chunk_tokens=draw.choice([None, None, 128, 512]) if cache != "none" else None,
        )


def measured(weights: str, runs: dict[int, Run], model: str) -> dict[int, dict[str, Any]]:
    """By seed: bytes, planned and measured, of the weights and of what the run takes beside them."""
    torch.set_num_threads(1)
    engine.generate(engine.SHIPPED_MODEL, [[5, 6, 7]], max_new_tokens=4)  # loads libraries
    unloaded, unloaded_resident = counted().allocated_bytes(), resident()
    engine.generate(loaded(model, weights), [[5, 6, 7]], max_new_tokens=4)
    of_weights = {
        "resident": resident() - unloaded_resident,
        "measured": counted().allocated_bytes() - unloaded,
    }
    shortest = {"cache": "dynamic", "prompt_tokens": 8, "max_new_tokens": 8}
    planned = engine.plan(path_of(model), **shortest, device="cpu", weights=weights)
    of_weights["planned"] = planned.weight_bytes
    found = {}
    for seed, run in runs.items():
        found[seed] = {"weights": of_weights, **in_a_process_of_its_own(taken_by, run, model, start="fork")}
        print(seed, title(run), *columns(found[seed]), sep=" | ", flush=True)
    return found


@lru_cache(maxsize=1)
def loaded(model: str, weights: str) -> Any:
    """The model, which never ends by itself; a process that is copied has it."""
    loaded_model = engine.Generator(path_of(model), config=engine.EngineConfig(weights=weights)).model
    loaded_model.generation_config.eos_token_id, loaded_model.generation_config.pad_token_id = None, 0
    return loaded_model


def path_of(model: str) -> str | Path:
    return engine.SHIPPED_MODEL if model == "shipped" else model


def taken_by(run: Run, name: str) -> dict[str, Any]:
    model = loaded(name, run.weights)
    generator = engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=run.chunk_tokens))
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (run.rows, run.prompt_tokens), generator=seeded)
    options = run.strategy | {"cache": run.cache, "cache_config": run.cache_config or None, "seed": 0}
    gc.collect()
    allocated_at_first = counted().allocated_bytes()
    generator.generate(ids, **options, max_new_tokens=run.new_tokens)
    before, of_files = resident(), status_bytes("RssFile:")
    allocated = counted().allocated_bytes()
    stays = allocated - allocated_at_first
    forget_peak("cpu")
    counted().forget_peak()
    out = generator.generate(ids, **options, max_new_tokens=run.new_tokens)
    allocated = counted().peak_bytes() - allocated
    of_files = status_bytes("RssFile:") - of_files  # pages of libraries, which come as they are used
    peak = memory_bytes("cpu", peak=True) - before - of_files
    plan = engine.plan(
        model, cache=run.cache, cache_config=run.cache_config or None, prompt_tokens=run.prompt_tokens,
        max_new_tokens=run.new_tokens, batch_size=run.rows, prefill_chunk_tokens=run.chunk_tokens, **run.strategy,
    )  # fmt: skip
    backend = plan.backends[0]
    return {
        "run": {"planned": sum(backend.need_bytes.values()), "measured": allocated, "resident": peak, "kept": stays},
        "cache": {"planned": sum(backend.cache_bytes.values()), "at_the_end": out.stats.cache_bytes},
        "working": backend.working_bytes,
        "logits": plan.logits_bytes,
    }


@cache
def counted() -> ctypes.CDLL:
    """The functions of counted_malloc.cpp in this process, in place of the C library's."""
    functions = ctypes.CDLL(os.environ["LD_PRELOAD"])
    functions.allocated_bytes.restype = functions.peak_bytes.restype = ctypes.c_int64
    return functions


def resident() -> int:
    gc.collect()
    give_back_freed_memory()
    return memory_bytes("cpu", peak=False)


def main(
    model: Annotated[str, typer.Option(help="path, name or hub id; 'shipped': the model in the package")] = "shipped",
    runs: Annotated[int, typer.Option(help="seeds 0, 1, ...")] = 30,
    seed: Annotated[list[int] | None, typer.Option(help="these instead; may be repeated")] = None,
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
) -> None:
    drawn = {number: Run.drawn(number) for number in seed or range(runs)}
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        library, source = Path(folder) / "counted_malloc.so", Path(__file__).with_name("counted_malloc.cpp")
        subprocess.run(["g++", "-O2", "-std=c++20", "-shared", "-fPIC", source, "-o", library], check=True)
        os.environ["LD_PRELOAD"] = str(library)  # of the processes that are started from here on
        for weights in WEIGHTS_CHOICES:
            if those := {number: run for number, run in drawn.items() if run.weights == weights}:
                found |= in_a_process_of_its_own(measured, weights, those, model)
    table = Table("seed", "run", "MB of cache", "at the end", "work", "logits", "all planned", "measured", "ratio",
                  "resident", "kept", "weights", "measured", "with weights")  # fmt: skip
    for number, run in drawn.items():
        table.add_row(str(number), title(run), *columns(found[number]))
    _console.print(table)
    cases = [{"seed": number, **asdict(run), **found[number]} for number, run in drawn.items()]
    report("planned", out, model=model, cases=cases)


def title(run: Run) -> str:
    options = ", ".join(str(value) for value in [*run.cache_config.values(), *run.strategy.items()])
    chunk = f", chunks of {run.chunk_tokens}" if run.chunk_tokens else ""
    return f"{run.cache} {options}: {run.rows} x {run.prompt_tokens} + {run.new_tokens}, {run.weights}{chunk}"


def columns(found: dict[str, Any]) -> list[str]:
    cache, whole, weights = found["cache"], found["run"], found["weights"]
    both = [whole[name] + weights[name] for name in ("planned", "measured")]
    sizes = [cache["planned"], cache["at_the_end"], found["working"], found["logits"], whole["planned"],
             whole["measured"]]  # fmt: skip
    return [
        *(f"{size / 1e6:.1f}" for size in sizes),
        f"{whole['planned'] / whole['measured']:.2f}",
        *(f"{whole[name] / 1e6:.1f}" for name in ("resident", "kept")),
        *(f"{weights[name] / 1e6:.1f}" for name in ("planned", "measured")),
        f"{both[0] / both[1]:.2f}",
    ]


if __name__ == "__main__":
    typer.run(main)
