"""Rows that branch from one prompt: beams, samples and candidates, next to transformers' `generate` where it has them.

    python benchmarks/branching.py --out branching-cpu.json
    python benchmarks/plot.py branching-cpu.json

Whole calls are timed, prompt included, since that a prompt is read once is half of the matter. Prints per scenario the
floor of a step first: the bytes of weights and cache that it has to read, over the bandwidth measured here, when the
prompt's part of the cache is read once for all its rows. Then a table, and at the end one JSON line.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from common import SHAPES, full_bytes_per_token, kept_bytes, llama, picked, report, spread, timed
from memory import FORGET_PEAK, forget_peak, in_a_process_of_its_own, memory_bytes
from rich.console import Console
from rich.table import Table
from transformers import LogitsProcessor

import caches
import engine
from engine.measuring.decoding import bandwidth

_console = Console()


@dataclass(frozen=True)
class Scenario:
    """options: of the call. rows: that one prompt becomes. peer: what ours is compared with, if anything.

    peak: whether the most memory that a process takes is measured too.
    """

    prompt: int
    new: int
    rows: int
    options: dict[str, Any] = field(default_factory=dict)
    peer: str | None = "transformers"
    peak: bool = False


def beams(number: int, prompt: int, new: int, **more: Any) -> Scenario:
    options = {"num_beams": number, "do_sample": False} if number > 1 else {"do_sample": False}
    return Scenario(prompt, new, number, options | more)


def contrastive(candidates: int) -> Scenario:
    return Scenario(512, 64, candidates, {"penalty_alpha": 0.6, "top_k": candidates}, peer="greedy")


_FORTY = replace(beams(40, 1000, 23, num_return_sequences=20, early_stopping=True), peak=True)
_GROUPS = {"num_beam_groups": 40, "num_return_sequences": 40, "diversity_penalty": 1.0}
SCENARIOS = {
    "16 beams": beams(16, 1000, 24),
    "40 beams, 20 texts": _FORTY,
    "40 groups of one beam": replace(beams(40, 1000, 23, **_GROUPS), peer=None),
    "16 samples": Scenario(1000, 32, 16, {"do_sample": True, "num_return_sequences": 16}),
    "contrastive, 4 candidates": contrastive(4),
    "contrastive, 8 candidates": contrastive(8),
}
COMPILED = "ours, compiled"
CURVE, THEIRS_UP_TO = (1, 2, 4, 8, 16, 32, 64), 16


@dataclass(frozen=True)
class Setting:
    model: str
    threads: int
    dtype: str


@lru_cache(maxsize=1)
def load(setting: Setting) -> Any:
    torch.set_num_threads(setting.threads)
    transformers.logging.set_verbosity_error()
    return llama(dtype=getattr(torch, setting.dtype), **SHAPES[setting.model])


class Weighs(LogitsProcessor):
    """Notes the most bytes that a cache keeps while the logits are processed: at the end beams are rows no more."""

    def __init__(self, cache: Any):
        self.cache, self.most = cache, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.most = max(self.most, kept_bytes(self.cache)[0])
        return scores


def engines_for(scenario: Scenario, model: Any, ids: torch.Tensor, compiled: bool) -> dict[str, Callable[..., Any]]:
    """Functions of the number of new tokens. Each returns what its `generate` does."""
    generator = engine.Generator(model)

    def theirs(new: int) -> Any:
        torch.manual_seed(0)
        mask = torch.ones_like(ids)
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=new, return_dict_in_generate=True, **scenario.options
        )

    def ours(generator: engine.Generator, new: int, **more: Any) -> Any:
        torch.manual_seed(0)
        return generator.generate(ids, max_new_tokens=new, **scenario.options, **more)

    found: dict[str, Callable[..., Any]] = {"ours": partial(ours, generator)}
    if compiled and scenario.peer == "transformers":
        with_packages = engine.Generator(model, config=engine.EngineConfig(compile="auto"))
        with_packages.warmup(ids, **scenario.options)
        state = ours(with_packages, 4).stats.compiled
        if state.startswith("off"):
            raise RuntimeError(f"the layers are not compiled: {state}")
        found[COMPILED] = partial(ours, with_packages)
    if scenario.peer == "transformers":
        found["transformers"] = theirs
    elif scenario.peer == "greedy":
        found["greedy"] = lambda new, **more: generator.generate(ids, max_new_tokens=new, **more)
    return found


def prompt_of(scenario: Scenario, model: Any) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(0)
    return torch.randint(3, model.config.vocab_size, (1, scenario.prompt), generator=seeded)


def bytes_and_text(name: str, work: Callable[..., Any], scenario: Scenario, model: Any) -> tuple[int, torch.Tensor]:
    """One run that is not timed: the most bytes that the cache kept, and the texts."""
    if name == "transformers":
        out = work(scenario.new)
        return kept_bytes(out.past_key_values)[0], out.sequences
    live = caches.build("dynamic", model.config)
    live.reserve(scenario.prompt + scenario.new - 1)
    weighs = Weighs(live)
    out = work(scenario.new, cache=live, logits_processor=[weighs])
    return weighs.most, out.sequences


def measure(scenario: Scenario, setting: Setting, speed: float, runs: int, compiled: bool) -> dict[str, Any]:
    """Per engine seconds of whole calls, ms of a step (a whole call minus one for one token), and bytes."""
    model = load(setting)
    engines = engines_for(scenario, model, prompt_of(scenario, model), compiled)
    weighed = {name: bytes_and_text(name, work, scenario, model) for name, work in engines.items()}
    taken: dict[str, dict[str, list[float]]] = {name: {"whole_s": [], "step_ms": []} for name in engines}
    for _ in range(runs):  # they take turns, so that a slow minute hits all of them
        for name, work in engines.items():
            whole = timed(lambda: work(scenario.new))  # noqa: B023
            first = timed(lambda: work(1))  # noqa: B023
            taken[name]["whole_s"].append(whole)
            taken[name]["step_ms"].append(1000 * (whole - first) / (scenario.new - 1))
    found: dict[str, Any] = {
        name: {what: spread(samples) for what, samples in parts.items()} | {"cache_bytes": weighed[name][0]}
        for name, parts in taken.items()
    }
    texts = [text for _, text in weighed.values()] if "transformers" in engines else None
    return {
        "prompt": scenario.prompt, "new": scenario.new, "rows": scenario.rows, "options": scenario.options,
        "floor_ms": floor_ms(scenario, setting, speed), "engines": found,
        "times_peer": times_peer(found, scenario.peer, "ours"),
        "times_peer_compiled": times_peer(found, scenario.peer, COMPILED),
        "same_text": None if texts is None else all(torch.equal(text, texts[-1]) for text in texts),
    }  # fmt: skip


def times_peer(engines: dict[str, Any], peer: str | None, name: str) -> float | None:
    if peer is None or name not in engines:
        return None
    return engines[peer]["whole_s"]["median"] / engines[name]["whole_s"]["median"]


def floor_ms(scenario: Scenario, setting: Setting, speed: float) -> float:
    """Of a step in the middle of the text."""
    model = load(setting)
    weights = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
    tokens = scenario.prompt + scenario.rows * scenario.new // 2
    return 1000 * (weights + full_bytes_per_token(model.config, model.dtype.itemsize) * tokens) / speed


def peak_of(scenario: Scenario, setting: Setting, name: str) -> int:
    """The most memory that one engine takes beyond the model, in bytes. For a process of its own."""
    model = load(setting)
    ids, compiled = prompt_of(scenario, model), name == COMPILED
    engines_for(scenario, model, ids[:, :32], compiled)[name](2)  # loads libraries, chooses kernels
    gc.collect()
    forget_peak("cpu")
    before = memory_bytes("cpu", peak=False)
    engines_for(scenario, model, ids, compiled)[name](scenario.new)
    return memory_bytes("cpu", peak=True) - before


def table_of(case: dict[str, Any]) -> Table:
    table = Table("engine", "whole call, s", "least", "most", "ms per step", "of the floor", "cache MB", "peak MB")
    for name, row in case["engines"].items():
        step = row["step_ms"]["median"]
        peak = row.get("peak_bytes")
        table.add_row(name, *(f"{value:.2f}" for value in row["whole_s"].values()), f"{step:.1f}",
                      f"{case['floor_ms'] / step:.0%}", f"{row['cache_bytes'] / 1e6:.1f}",
                      "-" if peak is None else f"{peak / 1e6:.0f}")  # fmt: skip
    return table


def shrunk(scenario: Scenario) -> Scenario:
    """To try it."""
    return replace(scenario, prompt=scenario.prompt // 20, new=5)


def main(
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    scenarios: Annotated[str, typer.Option(help="names with ; between, or 'all'")] = "all",
    curve: Annotated[bool, typer.Option(help="also the curve over numbers of beams")] = True,
    compiled: Annotated[bool, typer.Option(help="also with compiled layers")] = True,
    peak: Annotated[
        bool, typer.Option(help="also peak memory, in processes of their own, where it is a matter")
    ] = True,
    quick: Annotated[bool, typer.Option(help="short prompts and texts, to try it")] = False,
    runs: Annotated[int, typer.Option(help="runs per engine")] = 3,
    model: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "small",
    threads: Annotated[int, typer.Option(help="threads of torch")] = 2,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
) -> None:
    chosen = picked(SCENARIOS, scenarios)
    setting = Setting(model, threads, dtype)
    torch.set_num_threads(threads)
    chosen |= {f"{number} beams, curve": curve_point(number) for number in CURVE if curve}
    speed, cases = bandwidth(seconds=3), {}
    for name, scenario in chosen.items():
        scenario = shrunk(scenario) if quick else scenario
        _console.print(
            f"\n{name}: prompt {scenario.prompt}, {scenario.new} new, {scenario.rows} rows; the floor of a step is "
            f"{floor_ms(scenario, setting, speed):.1f} ms at {speed / 1e9:.1f} GB/s"
        )
        with _console.status(name):
            case = measure(scenario, setting, speed, runs, compiled and name in SCENARIOS)
            for engine_name in case["engines"] if peak and scenario.peak and FORGET_PEAK.exists() else ():
                most = in_a_process_of_its_own(peak_of, scenario, setting, engine_name)
                case["engines"][engine_name]["peak_bytes"] = most
        _console.print(table_of(case))
        if case["times_peer"] is not None:
            times = [case[each] for each in ("times_peer", "times_peer_compiled") if case[each] is not None]
            said = "" if case["same_text"] is None else f", same text: {case['same_text']}"
            _console.print(f"{', '.join(f'{each:.2f}' for each in times)} x {scenario.peer}{said}")
        cases[name] = case
    along = {number: cases.pop(f"{number} beams, curve") for number in CURVE if curve}
    report("branching", out, model=SHAPES[model], dtype=dtype, quick=quick, runs=runs,
           bandwidth_gb_per_s=speed / 1e9, cases=cases, curve=along)  # fmt: skip


def curve_point(number: int) -> Scenario:
    scenario = beams(number, 1000, 24)
    return scenario if number <= THEIRS_UP_TO else replace(scenario, peer=None)


if __name__ == "__main__":
    typer.run(main)
