"""What `engine.plan` says of runs, beside the most memory that they take.

    python benchmarks/planned.py --model smollm2 --runs 30 --out planned-cpu.json
    python benchmarks/planned.py --model smollm2 --seed 17

Every seed draws a run: cache, strategy, rows, lengths, weights, chunks of the prompt. It has a process of its own, with
a model that is loaded and warm; what comes on top of that is measured. Prints a table, and one JSON line. Linux only.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from common import report
from memory import forget_peak, in_a_process_of_its_own, memory_bytes
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
            rows=draw.choice([1, 1, 2, 4]),
            prompt_tokens=draw.randint(50, 1500),
            new_tokens=8 if cache == "none" else draw.choice([8, 16, 32]),
            weights=draw.choice(WEIGHTS_CHOICES),
            chunk_tokens=draw.choice([None, None, 128, 512]) if cache != "none" else None,
        )


def measured(run: Run, model: str, threads: int) -> dict[str, Any]:
    """Bytes, planned and measured: of the weights, and of what the run takes beside them."""
    torch.set_num_threads(threads)
    engine.generate(engine.SHIPPED_MODEL, [[5, 6, 7]], max_new_tokens=4)  # loads libraries
    unloaded = _resident()
    config = engine.EngineConfig(weights=run.weights, prefill_chunk_tokens=run.chunk_tokens)
    generator = engine.Generator(engine.SHIPPED_MODEL if model == "shipped" else model, config=config)
    generator.model.generation_config.eos_token_id, generator.model.generation_config.pad_token_id = None, 0
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(3, generator.model.config.vocab_size, (run.rows, run.prompt_tokens), generator=seeded)
    options = run.strategy | {"cache": run.cache, "cache_config": run.cache_config or None, "seed": 0}
    loaded = _resident()
    generator.generate(ids[:1, :16], **options, max_new_tokens=4)  # tries the model, chooses kernels
    before = _resident()
    forget_peak("cpu")
    out = generator.generate(ids, **options, max_new_tokens=run.new_tokens)
    peak = memory_bytes("cpu", peak=True) - before
    plan = engine.plan(
        generator.model, cache=run.cache, cache_config=run.cache_config or None, prompt_tokens=run.prompt_tokens,
        max_new_tokens=run.new_tokens, batch_size=run.rows, prefill_chunk_tokens=run.chunk_tokens, **run.strategy,
    )  # fmt: skip
    backend = plan.backends[0]
    return {
        "weights": {"planned": plan.weight_bytes, "measured": loaded - unloaded},
        "run": {"planned": sum(backend.need_bytes.values()), "measured": peak},
        "cache": {"planned": sum(backend.cache_bytes.values()), "measured": out.stats.cache_bytes},
        "working": backend.working_bytes,
        "logits": plan.logits_bytes,
    }


def _resident() -> int:
    gc.collect()
    give_back_freed_memory()
    return memory_bytes("cpu", peak=False)


def main(
    model: Annotated[str, typer.Option(help="path, name or hub id; 'shipped': the model in the package")] = "shipped",
    runs: Annotated[int, typer.Option(help="seeds 0, 1, ...")] = 30,
    seed: Annotated[list[int] | None, typer.Option(help="these instead; may be repeated")] = None,
    threads: Annotated[int, typer.Option(help="threads of torch")] = 1,
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
) -> None:
    table = Table("seed", "run", "MB of cache", "measured", "work", "logits", "all planned", "measured", "ratio",
                  "weights", "measured", "with weights")  # fmt: skip
    cases = []
    for number in seed or range(runs):
        run = Run.drawn(number)
        found = in_a_process_of_its_own(measured, run, model, threads)
        cases.append({"seed": number, **asdict(run), **found})
        table.add_row(str(number), title(run), *columns(found))
        print(number, title(run), *columns(found), sep=" | ", flush=True)
    _console.print(table)
    report("planned", out, model=model, cases=cases)


def title(run: Run) -> str:
    options = ", ".join(str(value) for value in [*run.cache_config.values(), *run.strategy.items()])
    chunk = f", chunks of {run.chunk_tokens}" if run.chunk_tokens else ""
    return f"{run.cache} {options}: {run.rows} x {run.prompt_tokens} + {run.new_tokens}, {run.weights}{chunk}"


def columns(found: dict[str, Any]) -> list[str]:
    cache, whole, weights = found["cache"], found["run"], found["weights"]
    both = [whole[name] + weights[name] for name in ("planned", "measured")]
    sizes = [cache["planned"], cache["measured"], found["working"], found["logits"], whole["planned"],
             whole["measured"]]  # fmt: skip
    return [
        *(f"{size / 1e6:.1f}" for size in sizes),
        f"{whole['planned'] / whole['measured']:.2f}",
        *(f"{weights[name] / 1e6:.1f}" for name in ("planned", "measured")),
        f"{both[0] / both[1]:.2f}",
    ]


if __name__ == "__main__":
    typer.run(main)
