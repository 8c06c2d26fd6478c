"""What the benchmarks share: the reference model, the machine they ran on, and how time is taken."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = dict(
    vocab_size=32000,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    max_position_embeddings=8192,
)


def llama(**shape: int) -> LlamaForCausalLM:
    """A Llama of this shape with random weights, float32, that never ends by itself."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def timed(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def bandwidth() -> float:
    """Bytes per second that summing a large tensor reads."""
    data = torch.ones(2**28 // 4)
    return data.nbytes / min(timed(data.sum) for _ in range(5))


def spread(samples: list[float]) -> dict[str, float]:
    return {"median": statistics.median(samples), "least": min(samples), "most": max(samples)}


def decode_ms(engines: dict[str, Callable[[int], Any]], new: int, runs: int) -> dict[str, dict[str, float]]:
    """Per engine the time of one decode step: a whole call minus a call for one token, after a warm-up.

    The engines take turns, so that a slow minute hits all of them.
    """
    for work in engines.values():
        work(2)
    samples: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(runs):
        for name, work in engines.items():
            whole, first = timed(lambda: work(new)), timed(lambda: work(1))  # noqa: B023
            samples[name].append(1000 * (whole - first) / (new - 1))
    return {name: spread(taken) for name, taken in samples.items()}


def report(benchmark: str, out: Path | None, **found: Any) -> None:
    """One JSON line, with the machine and the versions; also into a file."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    whole = {
        "benchmark": benchmark,
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
        **found,
    }
    if out is not None:
        out.write_text(json.dumps(whole, indent=2) + "\n")
    print(json.dumps(whole))


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
