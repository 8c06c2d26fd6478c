"""Proposed tokens: assisted decoding and prompt lookup next to greedy search, ours and transformers'.

    python benchmarks/assisted.py --out assisted-cpu.json

A random draft would never be right. So the draft is the lower layers of the target, and what the target's upper layers
add is scaled down: by how much decides how often the draft is right, which is measured and printed. Prompt lookup gets
a text that repeats itself: that of a target of which no layer adds anything, where a token decides the next one alone.
Whole calls are timed, the prompt included, and the engines take turns. Prints per scenario the floor first: what a
token takes if every forward only reads its weights once, at the bandwidth measured here. Then a table, and at the end
one JSON line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from common import SHAPES, llama, picked, report, spread, timed
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

import engine
from engine.measuring.decoding import bandwidth

_console = Console()


@dataclass(frozen=True)
class Scenario:
    """added: how much of what the target's upper layers add is left; for lookup, of what all add. tokens: proposed at a
    time. lookup: what is proposed comes from the text, which the target itself has begun, not from a draft.
    """

    added: float
    tokens: int = 5
    prompt: int = 256
    new: int = 96
    rows: int = 1
    lookup: bool = False


SCENARIOS = {
    "the draft is always right": Scenario(0.0),
    "it is mostly right": Scenario(0.02),
    "it is right at times": Scenario(0.05),
    "it is rarely right": Scenario(0.1),
    "it is never right": Scenario(1.0),
    "it is right at times, 4 rows": Scenario(0.05, rows=4),
    "lookup in a text that repeats itself": Scenario(0.0, tokens=10, lookup=True),
    "lookup in a text that does not": Scenario(1.0, tokens=10, lookup=True),
}


def pair(shape: dict[str, int], lower: int, added: float) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and a draft that shares its embeddings and its first `lower` layers."""
    target, draft = llama(**shape), llama(**shape | {"num_hidden_layers": lower})
    draft.lm_head, draft.model.norm = target.lm_head, target.model.norm
    draft.model.embed_tokens, draft.model.layers = target.model.embed_tokens, target.model.layers[:lower]
    with torch.no_grad():
        for layer in target.model.layers[lower:]:
            layer.self_attn.o_proj.weight *= added
            layer.mlp.down_proj.weight *= added
    # transformers reads them off the draft.
    draft.generation_config.assistant_confidence_threshold = 0.0
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return target, draft


def prompt_of(scenario: Scenario, model: PreTrainedModel) -> torch.Tensor:
    seeded, given = torch.Generator().manual_seed(0), 1 if scenario.lookup else scenario.prompt
    ids = torch.randint(3, model.config.vocab_size, (scenario.rows, given), generator=seeded)
    return engine.generate(model, ids, max_length=scenario.prompt).sequences if scenario.lookup else ids


def engines_for(scenario: Scenario, shape: dict[str, int], lower: int) -> dict[str, Callable[[], Any]]:
    """What each engine generates; those of transformers propose to one row only."""
    target, draft = pair(shape, 0 if scenario.lookup else lower, scenario.added)
    ids, generator = prompt_of(scenario, target), engine.Generator(target)
    given = {"max_new_tokens": scenario.new, "do_sample": False}
    proposed: dict[str, Any] = {"prompt_lookup_num_tokens": scenario.tokens}
    if not scenario.lookup:
        draft.generation_config.num_assistant_tokens = scenario.tokens
        proposed = {"assistant_model": draft}
    theirs = given | {"attention_mask": torch.ones_like(ids)}
    engines: dict[str, Callable[[], Any]] = {
        "proposed": lambda: generator.generate(ids, **given, **proposed),
        "greedy": lambda: generator.generate(ids, **given),
        "transformers, greedy": lambda: target.generate(ids, **theirs),
    }
    if scenario.rows == 1:
        engines["transformers, proposed"] = lambda: target.generate(ids, **theirs, **proposed)
    return engines


def measure(scenario: Scenario, shape: dict[str, int], lower: int, runs: int) -> dict[str, Any]:
    engines = engines_for(scenario, shape, lower)
    outs = {name: work() for name, work in engines.items()}
    texts = {name: getattr(out, "sequences", out) for name, out in outs.items()}
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(runs):
        for name, work in engines.items():
            taken[name].append(timed(work))
    found = {name: {"whole_s": spread(samples)} for name, samples in taken.items()}
    ours, stats = found["proposed"]["whole_s"]["median"], outs["proposed"].stats
    return {
        **vars(scenario), "lower_layers": lower, "engines": found,
        "acceptance": stats.accepted_tokens / max(1, stats.drafted_tokens or 0),
        "tokens_per_verification": stats.new_tokens / scenario.rows / max(1, stats.verifications or 0),
        "times": {name: row["whole_s"]["median"] / ours for name, row in found.items() if name != "proposed"},
        "same_text": all(torch.equal(text, texts["proposed"]) for text in texts.values()),
    }  # fmt: skip


def floors_ms(scenario: Scenario, shape: dict[str, int], lower: int, speed: float) -> tuple[float, float]:
    """Of a token: of the target alone, and where all that is proposed is right."""
    whole, part = (
        sum(p.nbytes for name, p in one.named_parameters() if "embed_tokens" not in name)
        for one in pair(shape, lower, 1.0)
    )
    tokens, drafting = scenario.tokens, 0 if scenario.lookup else scenario.tokens * part
    return 1000 * whole / speed, 1000 * (whole + drafting) / (tokens + 1) / speed


def table_of(case: dict[str, Any]) -> Table:
    table = Table("engine", "whole call, s", "least", "most", "as long as ours")
    for name, row in case["engines"].items():
        times = case["times"].get(name)
        table.add_row(name, *(f"{s:.2f}" for s in row["whole_s"].values()), "" if times is None else f"{times:.2f} x")
    return table


def main(
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    scenarios: Annotated[str, typer.Option(help="names with ; between, or 'all'")] = "all",
    quick: Annotated[bool, typer.Option(help="short prompts and texts, to try it")] = False,
    runs: Annotated[int, typer.Option(help="runs per engine")] = 3,
    model: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "small",
    lower: Annotated[int, typer.Option(help="layers of the draft")] = 2,
    threads: Annotated[int, typer.Option(help="threads of torch")] = 2,
) -> None:
    chosen = picked(SCENARIOS, scenarios)
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    speed, cases, shape = bandwidth(seconds=3), {}, SHAPES[model]
    lower = min(lower, shape["num_hidden_layers"] - 1)
    for name, scenario in chosen.items():
        scenario = replace(scenario, prompt=40, new=12) if quick else scenario
        alone, helped = floors_ms(scenario, shape, lower, speed)
        _console.print(
            f"\n{name}: prompt {scenario.prompt}, {scenario.new} new, {scenario.rows} rows; the floor of a token is "
            f"{alone:.1f} ms, with proposals {helped:.1f} ms, at {speed / 1e9:.1f} GB/s"
        )
        with _console.status(name):
            case = measure(scenario, shape, lower, runs)
        case["floors_ms"] = {"alone": alone, "with proposals": helped}
        _console.print(table_of(case))
        _console.print(
            f"{case['acceptance']:.0%} accepted, {case['tokens_per_verification']:.2f} tokens per verification, same "
            f"text: {case['same_text']}"
        )
        cases[name] = case
    report("assisted", out, model=shape, dtype="float32", quick=quick, runs=runs,
           bandwidth_gb_per_s=speed / 1e9, cases=cases)  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
