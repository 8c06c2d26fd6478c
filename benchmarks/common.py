"""What the benchmarks share: the models, the machine they ran on, how time is taken, how bytes are counted."""

from __future__ import annotations

import json
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import typer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import caches
import configs

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "max_position_embeddings")  # fmt: skip
SHAPES = {
    "small": dict(zip(_SIZES, (32000, 768, 2048, 12, 12, 4, 8192), strict=True)),
    "1b": dict(zip(_SIZES, (32000, 2048, 5632, 22, 32, 4, 8192), strict=True)),
    "llama-3.1-8b": dict(zip(_SIZES, (128256, 4096, 14336, 32, 32, 8, 131072), strict=True)),
    "tiny": dict(zip(_SIZES, (512, 128, 128, 2, 2, 1, 8192), strict=True)),  # to try a benchmark
}


def llama(device: str = "cpu", dtype: torch.dtype = torch.float32, **shape: int) -> LlamaForCausalLM:
    """A Llama of this shape with random weights, made where it will be, that never ends by itself."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=dtype).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def picked(known: dict[str, Any], asked: str) -> dict[str, Any]:
    """What a command line asks for, in the order of what there is: names with ; between, or "all"."""
    names = list(known) if asked == "all" else [name.strip() for name in asked.split(";") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"there is no {unknown[0]!r}; there are: {'; '.join(known)}")
    return {name: thing for name, thing in known.items() if name in names}


def timed(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def spread(samples: list[float]) -> dict[str, float]:
    return {"median": statistics.median(samples), "least": min(samples), "most": max(samples)}


def decode_ms(engines: dict[str, Callable[[int], Any]], new: int, runs: int) -> dict[str, dict[str, float]]:
    """Per engine the time of one decode step: a complete call minus a call for one token, after a warm-up.

    The engines take turns, so that a slow minute hits all of them.
    """
    for work in engines.values():
        work(2)
    samples: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(runs):
        for name, work in engines.items():
            complete, first = timed(lambda: work(new)), timed(lambda: work(1))  # noqa: B023
            samples[name].append(1000 * (complete - first) / (new - 1))
    return {name: spread(taken) for name, taken in samples.items()}


def full_bytes_per_token(config: Any, item_bytes: int) -> int:
    """Of keys and values as the model computes them, in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * item_bytes


def encoded_bytes_per_token(config: Any, item_bytes: int, options: configs.QuantizedCacheConfig) -> float:
    """The same in the few bits of `options`: codes, and a scale and an offset per group. The head's width and the
    group are powers of two. fp8 has no offset."""
    scales = item_bytes * (1 if options.backend == "fp8" else 2)
    per_element = 0.0
    for name in ("keys", "values"):
        group = options.group if options.is_per_channel(name) else min(options.group, config.head_dim)
        per_element += (options.bits_of(name) / 8 + scales / group) / 2
    return full_bytes_per_token(config, 1) * per_element


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """The plain tensors in containers and in tensors that are made of others, as quantized ones are."""
    if isinstance(thing, torch.Tensor) and is_traceable_wrapper_subclass(thing):
        names, _ = thing.__tensor_flatten__()
        yield from tensors_in([getattr(thing, name) for name in names])
    elif isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (list, tuple, dict)):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from tensors_in(part)


def kept_bytes(cache: Any) -> tuple[int, int]:
    """Bytes of what a cache keeps, ours or transformers' own, and of the scratch that its layers share."""
    if isinstance(cache, caches.Cache):
        layers = sum(tensor.nbytes for layer in cache.layers for tensor in layer.tensors())
        return layers, sum(tensor.nbytes for tensor in cache.scratch.tensors())
    names = ("keys", "values", "_quantized_keys", "_quantized_values")
    parts = [getattr(layer, name, None) for layer in cache.layers for name in names]
    return sum(tensor.nbytes for tensor in tensors_in(parts)), 0


def weight_bytes(model: Any) -> int:
    """Of the parameters and buffers of a model; those that share memory count once."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]}
    return sum(tensors.values())


def report(benchmark: str, out: Path | None, **found: Any) -> None:
    """One JSON line, with the machine and the versions; also into a file."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    found = {
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
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found))


def folder_of_results() -> Path:
    """The folder for the results of this kind of processor."""
    words = re.findall(r"[a-z0-9]+", processor().lower().replace("avx-", "avx"))
    return Path(__file__).parent / "results" / "-".join(words)


def processor() -> str:
    """Maker, series and widest vectors: processors of one series differ in these."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = {name.strip(): value for name, _, value in (line.partition(":") for line in lines)}
    words = re.sub(r"\((R|TM)\)", "", found.get("model name", platform.processor())).split()
    flags = found.get("flags", "").split()
    vectors = " (AVX-512)" if "avx512f" in flags else " (AVX2)" if "avx2" in flags else ""
    return " ".join(words[:2]) + vectors
