"""Weights in full and of 8 and 4 bits, beside transformers and llama.cpp: reading prompts, and steps of many rows.

    python benchmarks/weights.py --out weights-cpu.json

Prompts are timed until their first token is there. A step of beams is a long call minus a short one; prompts of 64
tokens come before. Engines take turns, ours with compiled layers. Texts differ: the weights do. Prints tables, and one
JSON line.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import transformers
import typer
from common import SHAPES, llama, report, spread, timed
from rich.console import Console
from rich.table import Table

import engine
from engine.kernels.linear_kernels import has_matrix_units, kernels

PROMPTS, BEAMS, BEFORE, NEW = (16, 100, 1000), (1, 4, 16, 40), 64, 16
KINDS = {"float32": "full", "int8 weights": "int8", "int4 weights": "int4"}
Work: TypeAlias = Callable[[torch.Tensor, int, int], Any]
"""(prompt, number of new tokens, beams)"""
_console = Console()


class Unnoted:
    def note(self) -> None:
        pass


def engines_for(model: Any, threads: int, folder: Path) -> tuple[dict[str, Work], dict[str, Work]]:
    """The engines for prompts and those for beams, which llama.cpp lacks."""

    def theirs(ids: torch.Tensor, new: int, beams: int) -> Any:
        return model.generate(ids, max_new_tokens=new, do_sample=False, num_beams=beams)

    def call(generator: engine.Generator, ids: torch.Tensor, new: int, beams: int) -> Any:
        return generator.generate(ids, max_new_tokens=new, num_beams=beams)

    beside: dict[str, Work] = {"transformers": theirs}
    for name, weights in KINDS.items():
        config = engine.EngineConfig(weights=weights, compile="auto")
        generator = engine.Generator(model if weights == "full" else copy.deepcopy(model), config=config)
        for beams in BEAMS:
            generator.warmup(prompt(BEFORE, model), num_beams=beams)
        beside[name] = partial(call, generator)
    return beside | llama_cpp(model, threads, folder), beside


def llama_cpp(model: Any, threads: int, folder: Path) -> dict[str, Work]:
    """llama.cpp by its types of weights; nothing where it is not installed."""
    if not (importlib.util.find_spec("llama_cpp") and importlib.util.find_spec("gguf")):
        return {}
    from llama_cpp_peer import LlamaCpp, quantize, write_gguf

    full = folder / "full.gguf"
    write_gguf(model, full)
    files = {"float32": full} | {kind: quantize(full, kind) for kind in ("Q8_0", "Q4_0")}
    peers = {kind: LlamaCpp(file, threads) for kind, file in files.items()}
    return {
        f"llama.cpp, {kind}": lambda ids, new, beams, peer=peer: peer.generate(ids, new, Unnoted())
        for kind, peer in peers.items()
    }


def prompt(tokens: int, model: Any) -> torch.Tensor:
    """Ids [1, tokens] of random tokens."""
    return torch.randint(3, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def in_turns(works: dict[str, Callable[[], float]], runs: int) -> dict[str, dict[str, float]]:
    """The ms that each returns, after a warm-up."""
    for work in works.values():
        work()
    samples: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(runs):
        for name, work in works.items():
            samples[name].append(1000 * work())
    return {name: spread(taken) for name, taken in samples.items()}


def step_s(work: Work, ids: torch.Tensor, beams: int) -> float:
    short, long = (timed(lambda: work(ids, new, beams)) for new in (2, 2 + NEW))  # noqa: B023
    return (long - short) / NEW


def show(title: str, found: dict[str, dict[str, dict[str, float]]]) -> None:
    table = Table(title, *(f"{case} (least to most)" for case in found))
    for name in next(iter(found.values())):
        cells = [taken.get(name) for taken in found.values()]
        table.add_row(name, *(f"{one['median']:.1f} ({one['least']:.1f} to {one['most']:.1f})" for one in cells if one))
    _console.print(table)


def main(
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    runs: Annotated[int, typer.Option(help="runs per engine")] = 5,
    threads: Annotated[int, typer.Option(help="threads of torch and llama.cpp")] = 2,
    model: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "small",
) -> None:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    llm = llama(**SHAPES[model])
    with tempfile.TemporaryDirectory() as folder:
        for_prompts, for_beams = engines_for(llm, threads, Path(folder))
        prompts, beams = {}, {}
        for tokens in PROMPTS:
            ids = prompt(tokens, llm)
            works = {name: partial(timed, partial(work, ids, 1, 1)) for name, work in for_prompts.items()}
            prompts[str(tokens)] = in_turns(works, runs)
        ids = prompt(BEFORE, llm)
        for rows in BEAMS:
            works = {name: partial(step_s, work, ids, rows) for name, work in for_beams.items()}
            beams[str(rows)] = in_turns(works, runs)
    show("ms to the first token of a prompt of", prompts)
    show("ms per step, beams", beams)
    units = kernels() is not None and has_matrix_units()
    report("weights", out, model=SHAPES[model], runs=runs, matrix_units=units, prompts_ms=prompts, steps_ms=beams)


if __name__ == "__main__":
    typer.run(main)
