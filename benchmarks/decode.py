"""Greedy decoding beside transformers' `generate`: same process, model, prompt and length.

    python benchmarks/decode.py --out benchmarks/results/decode-cpu.json

Prints the floor first: the bytes of weights and cache that a step has to read, over the bandwidth measured here. Then
per case the median and spread of several runs after a warm-up, all engines taking turns, and one JSON line.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import engine

SMALL = dict(
    vocab_size=32000,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    max_position_embeddings=8192,
)


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def bandwidth() -> float:
    """Bytes per second that summing a large tensor reads."""
    data = torch.ones(2**28 // 4)
    taken = min(_timed(lambda: data.sum()) for _ in range(5))
    return data.nbytes / taken


def _timed(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure(engines: dict[str, Callable[[int], Any]], new: int, runs: int) -> dict[str, dict[str, float]]:
    """Per engine the decode time per token: a whole call minus a call for one token, in ms, median, least and most."""
    for work in engines.values():
        work(2)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(runs):
        for name, work in engines.items():  # taking turns, so that a slow minute hits all of them
            times[name].append(1000 * (_timed(lambda: work(new)) - _timed(lambda: work(1))) / (new - 1))  # noqa: B023
    return {
        name: {"ms": statistics.median(taken), "least_ms": min(taken), "most_ms": max(taken)}
        for name, taken in times.items()
    }


def main(
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    runs: Annotated[int, typer.Option(help="runs per engine")] = 5,
    threads: Annotated[int, typer.Option(help="threads of torch")] = 2,
    compiled: Annotated[bool, typer.Option(help="also the compiled decode step")] = True,
) -> None:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    console = Console()
    model = small_model()
    plain = engine.Generator(model, config=engine.EngineConfig(linears="default"))
    routed = engine.Generator(model)
    weights = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
    speed = bandwidth()
    results: list[dict[str, Any]] = []
    for prompt_tokens in (64, 4096):
        ids = torch.randint(3, 32000, (1, prompt_tokens), generator=torch.Generator().manual_seed(0))
        cache_bytes = 12 * 2 * 4 * 64 * 4 * (prompt_tokens + 32)
        floor_ms = 1000 * (weights + cache_bytes) / speed
        console.print(
            f"\nprompt {prompt_tokens}, 64 new: a step reads {weights / 1e6:.0f} MB of weights and "
            f"{cache_bytes / 1e6:.0f} MB of cache; at {speed / 1e9:.1f} GB/s that is {floor_ms:.1f} ms"
        )

        def theirs(new: int, cache: str | None = None) -> Any:
            options = {"max_new_tokens": new, "do_sample": False, "cache_implementation": cache}
            return model.generate(ids, **options)  # noqa: B023

        engines: dict[str, Callable[[int], Any]] = {
            "transformers dynamic": theirs,
            "transformers static": lambda new: theirs(new, "static"),
            "dynamic, torch's linears": lambda new: plain.generate(ids, max_new_tokens=new),  # noqa: B023
            "dynamic": lambda new: routed.generate(ids, max_new_tokens=new),  # noqa: B023
            "static": lambda new: routed.generate(ids, cache="static", max_new_tokens=new),  # noqa: B023
        }
        if compiled:
            config = engine.EngineConfig(cache="static", compile="inductor")
            graph = engine.Generator(model, config=config)
            engines["static, compiled"] = lambda new: graph.generate(ids, max_new_tokens=new)  # noqa: B023
        expected = theirs(64)
        same = torch.equal(plain.generate(ids, max_new_tokens=64).sequences, expected)
        found = measure(engines, 64, runs)
        table = Table("engine", "ms per token", "least", "most", "x transformers dynamic", "of the floor")
        peer = found["transformers dynamic"]["ms"]
        for name, taken in found.items():
            row = [f"{taken[key]:.1f}" for key in ("ms", "least_ms", "most_ms")]
            table.add_row(name, *row, f"{peer / taken['ms']:.2f}", f"{floor_ms / taken['ms']:.0%}")
        console.print(table)
        results.append({"prompt_tokens": prompt_tokens, "new_tokens": 64, "floor_ms": floor_ms, "same_text": same,
                        "engines": found})  # fmt: skip
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report = {
        "benchmark": "decode",
        "model": SMALL,
        "dtype": "float32",
        "threads": threads,
        "processor": _processor(),
        "bandwidth_gb_per_s": speed / 1e9,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
        "cases": results,
    }
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    typer.run(main)
