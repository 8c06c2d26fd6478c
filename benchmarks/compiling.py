"""Compiled layers: how fast steps are, when they are ready, what calls take meanwhile, how fast processes load them.

    python benchmarks/compiling.py --out compiling-cpu.json

Begins with an empty cache folder. Each case runs in a process of its own; the model is "small" with random weights. 100
calls of mixed prompts, strategies and rows are made three times: the last time counts the packages that are built.
Prints tables, and one JSON line.
"""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import transformers
import typer
from common import SHAPES, llama, report, spread, timed
from rich.console import Console
from rich.table import Table

import engine

NEW, PROMPT = 32, 64
STEPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the generator, of the call
    "greedy": ({}, {}),
    "greedy, `static`": ({"cache": "static"}, {}),
    "greedy, `quantized`": ({"cache": "quantized"}, {}),
    "greedy, `sink`": ({}, {"cache": "sink", "cache_config": {"window_length": PROMPT}}),
    "greedy, 4-bit weights": ({"weights": "int4"}, {}),
    "4 beams": ({}, {"num_beams": 4}),
    "16 beams": ({}, {"num_beams": 16}),
    "40 beams": ({}, {"num_beams": 40}),
    "16 samples": ({}, {"do_sample": True, "num_return_sequences": 16}),
}
BATCH = 8
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 50},
    "beams": {"num_beams": 4},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "lookup": {"prompt_lookup_num_tokens": 4},
}
_console = Console()


def ids_of(rows: int, tokens: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def generator_of(shape: str, threads: int, compile: str, seed: int = 0, **options: Any) -> engine.Generator:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    model = llama(**SHAPES[shape])
    if seed:
        with torch.no_grad():
            for weights in model.parameters():
                weights.normal_(std=0.02, generator=torch.Generator().manual_seed(seed))
    return engine.Generator(model, config=engine.EngineConfig(compile=compile, **options))


def step_ms(shape: str, threads: int, name: str, runs: int) -> dict[str, Any]:
    """ms per step without and with compiled layers, in turns: a long call minus a short one."""
    config, arguments = STEPS.get(name, ({}, {}))
    generators = {
        kind: generator_of(shape, threads, compile, **config)
        for kind, compile in (("without", "off"), ("with", "auto"))
    }
    vocabulary = SHAPES[shape]["vocab_size"]
    ids, prompts = ids_of(1, PROMPT, vocabulary), list(ids_of(BATCH, PROMPT, vocabulary))

    def call(one: engine.Generator, new: int) -> str:
        if name in STEPS:
            return one.generate(ids, max_new_tokens=new, **arguments).stats.compiled
        return [each.result() for each in one.generate_many(prompts, max_new_tokens=new)][-1].stats.compiled

    for rows in (1, 4, BATCH) if name not in STEPS else ():  # those of a batch that begins and ends
        generators["with"].warmup(ids_of(rows, PROMPT, vocabulary))
    generators["with"].warmup(ids, **arguments)
    for one in generators.values():
        state = call(one, 4)
    if state.startswith("off"):
        raise RuntimeError(f"{name}: the layers are not compiled: {state}")
    taken: dict[str, list[float]] = {kind: [] for kind in generators}
    for _ in range(runs):
        for kind, one in generators.items():
            short, long = (timed(lambda: call(one, new)) for new in (2, 2 + NEW))  # noqa: B023
            taken[kind].append(1000 * (long - short) / NEW)
    return {kind: spread(samples) for kind, samples in taken.items()}


def first_call(shape: str, threads: int, compile: str, seed: int) -> dict[str, Any]:
    """Seconds of a process's first call of 8 tokens, and of making its generator."""
    made: list[engine.Generator] = []
    made_s = timed(lambda: made.append(generator_of(shape, threads, compile, seed)))
    model_s = timed(lambda: llama(**SHAPES[shape]))
    ids, outs = ids_of(1, PROMPT, SHAPES[shape]["vocab_size"]), []
    call_s = timed(lambda: outs.append(made[0].generate(ids, max_new_tokens=8)))
    return {"generator_s": made_s - model_s, "call_s": call_s, "compiled": outs[0].stats.compiled}


def while_built(shape: str, threads: int) -> dict[str, Any]:
    """Calls from the first one on, until they are computed with compiled layers; then in turns with calls without."""
    eager, generator = generator_of(shape, threads, "off"), generator_of(shape, threads, "auto")
    ids = ids_of(1, PROMPT, SHAPES[shape]["vocab_size"])

    def ms_per_token(one: engine.Generator) -> tuple[float, str]:
        outs: list[Any] = []
        whole = timed(lambda: outs.append(one.generate(ids, max_new_tokens=NEW)))
        return 1000 * whole / NEW, outs[0].stats.compiled

    ms_per_token(eager)
    meanwhile, begun = [], time.perf_counter()
    while True:
        ms, compiled = ms_per_token(generator)
        if not compiled.startswith("off"):
            break
        if "another process" not in compiled:
            raise RuntimeError(f"the layers are not compiled: {compiled}")
        meanwhile.append(ms)
    ready_s = time.perf_counter() - begun
    turns = [(ms_per_token(generator)[0], ms_per_token(eager)[0]) for _ in range(7)]
    after, off = map(list, zip(*turns, strict=True))
    taken = {"without": off, "meanwhile": meanwhile, "with": after}
    return {"ready_s": ready_s, "ms_per_token": {name: spread(samples) for name, samples in taken.items()}}


def waited_for(shape: str, threads: int, rows: int) -> float:
    """Seconds of `warmup`."""
    generator = generator_of(shape, threads, "auto")
    ids = ids_of(rows, PROMPT, SHAPES[shape]["vocab_size"])
    return timed(lambda: generator.warmup(ids))


def mixed_calls(shape: str, threads: int, calls: int) -> dict[str, Any]:
    """Calls of other lengths, strategies and rows: what they began to compile, and with what they were computed."""
    generator, vocabulary = generator_of(shape, threads, "auto"), SHAPES[shape]["vocab_size"]
    chance, started, states = random.Random(), 0, Counter()
    popen = subprocess.Popen

    def counted(command: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal started
        started += 1
        return popen(command, *arguments, **options)

    def one_time() -> None:
        chance.seed(0)
        states.clear()
        for _ in range(calls):
            name, rows = chance.choice(list(STRATEGIES)), chance.choice((1, 2, 3, 4))
            rows = 1 if name == "lookup" else rows
            ids = ids_of(rows, chance.randint(8, 512), vocabulary)
            out = generator.generate(ids, max_new_tokens=chance.randint(8, 24), **STRATEGIES[name])
            states[f"{name}: {'eager' if out.stats.compiled.startswith('off') else 'compiled'}"] += 1

    for _ in range(2):  # what only one step of the first time records is asked for in the second one
        one_time()
        generator.warmup(ids_of(1, PROMPT, vocabulary))  # waits
    before = set(layers())
    with patch.object(subprocess, "Popen", counted):
        one_time()
    return {"calls": calls, "builds_started": started, "packages_built": len(set(layers()) - before), "by": states}


def layers() -> list[Path]:
    return sorted(Path(os.environ["KVENGINE_CACHE"]).glob("layers/*.pt2"))


def main(
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    runs: Annotated[int, typer.Option(help="processes per case of loading")] = 5,
    threads: Annotated[int, typer.Option(help="threads of torch")] = 2,
    calls: Annotated[int, typer.Option(help="mixed calls")] = 100,
    model: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "small",
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVENGINE_CACHE"] = folder

        def alone(work: Callable[..., Any], *arguments: Any) -> Any:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                return pool.submit(work, model, threads, *arguments).result()

        with _console.status("matrix products"):
            fresh = alone(first_call, "off", 0)
        with _console.status("calls while layers are compiled"):
            built = alone(while_built)
        packages = layers()
        with _console.status("compiling, waited for"):
            waited = {4: alone(waited_for, 4)}
            for package in packages:
                package.unlink()
            waited[1] = alone(waited_for, 1)
        taken: dict[str, list[dict[str, Any]]] = {"off": [], "auto": []}
        for run in range(runs):
            for compile, found in taken.items():
                with _console.status(f"loading, process {run + 1} of {runs}"):
                    found.append(alone(first_call, compile, run + 1))
        is_loaded = all(not one["compiled"].startswith("off") for one in taken["auto"])
        with _console.status(f"{calls} mixed calls"):
            mixed = alone(mixed_calls, calls)
        sizes = [package.stat().st_size for package in layers()]
        steps = {}
        for name in (*STEPS, f"a batch of {BATCH} prompts"):
            with _console.status(f"steps: {name}"):
                steps[name] = alone(step_ms, name, runs)
    first = {name: spread([one["call_s"] for one in found]) for name, found in taken.items()}
    table = Table("", "")
    table.add_row("first generator on a machine: matrix products", f"{fresh['generator_s']:.1f} s")
    table.add_row("layers ready, waited for, 1 row", f"{waited[1]:.1f} s")
    table.add_row("layers ready, waited for, 4 rows", f"{waited[4]:.1f} s")
    table.add_row("layers ready, beside calls", f"{built['ready_s']:.1f} s")
    for name, ms in built["ms_per_token"].items():
        shown = f"{ms['median']:.1f} ({ms['least']:.1f} to {ms['most']:.1f})"
        table.add_row(f"ms per token, prompt included, {name}", shown)
    for name, seconds in first.items():
        table.add_row(f"first call of another process, other weights: {name}", f"{seconds['median']:.3f} s")
    table.add_row("packages built in mixed calls", f"{mixed['packages_built']} in {calls}")
    _console.print(table)
    table = Table("ms per step", "without", "with", "x")
    for name, found in steps.items():
        medians = [found[kind]["median"] for kind in ("without", "with")]
        table.add_row(name, *(f"{ms:.1f}" for ms in medians), f"{medians[0] / medians[1]:.2f}")
    _console.print(table)
    report("compiling", out, model=SHAPES[model], fresh=fresh, built=built, waited_s=waited, steps_ms=steps,
           first_call_s=first, other_weights_loaded=is_loaded, mixed=mixed, package_bytes=sizes)  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
