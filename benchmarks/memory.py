"""Bytes and ms per token of a long context, per backend, next to transformers' own cache of the same kind.

    python benchmarks/memory.py --peak --contexts 1024,4096 --out memory-cpu.json
    python benchmarks/memory.py --peak --contexts 16384 --only "..." --out memory-long-cpu.json
    python benchmarks/memory.py --device cuda --out memory-cuda.json

The prompt is read in pieces; then every decode step is timed by itself, one of each backend in turn, so that what else
the machine does slows all alike. Prints per context the floor first: the bytes of weights and cache that a step has to
read, over the bandwidth measured here. Then a table, and at the end one JSON line. With --peak the bytes of every
backend are counted in a process of its own, and the most memory that it took beyond the model is reported.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from common import (
    SHAPES,
    encoded_bytes_per_token,
    full_bytes_per_token,
    kept_bytes,
    llama,
    picked,
    report,
    spread,
    timed,
)
from rich.console import Console
from rich.table import Table

import caches
import configs
import engine
from caches.platform.host_allocator import keep_freed_memory
from engine.measuring.decoding import bandwidth

PIECE = 512  # tokens of the prompt that are read at once
_console = Console()


@dataclass(frozen=True)
class Setting:
    model: str
    device: str
    dtype: str
    new: int
    window: int
    threads: int
    peak: bool


@dataclass(frozen=True)
class Row:
    """A backend with its options. peer: the row of transformers' cache of the same kind. theirs: this is one.

    linears: see `EngineConfig`.
    """

    cache: str
    options: dict[str, Any] = field(default_factory=dict)
    peer: str | None = None
    lossless: bool = False
    theirs: bool = False


def rows_for(setting: Setting) -> dict[str, Row]:
    """By name; transformers' own first, its default before all: the others are compared with them."""
    theirs_away = () if setting.device == "cpu" else ("offloaded", "offloaded_static")
    hqq = {"backend": "hqq", "nbits": 4}
    quantized = {"quanto, 4 bits": {"nbits": 4}, "quanto, 2 bits": {"nbits": 2}, "hqq, 4 bits": hqq}
    attention = (
        {"fused": {"fused": True}, "unpacked": {"fused": False}} if setting.device == "cpu" else {"unpacked": {}}
    )
    return {
        "transformers dynamic": Row("dynamic", lossless=True, theirs=True),
        "transformers static": Row("static", lossless=True, theirs=True),
        **{f"transformers {name}": Row(name, lossless=True, theirs=True) for name in theirs_away},
        "transformers quanto, 4 bits": Row("quantized", {"backend": "quanto", "nbits": 4}, theirs=True),
        "transformers quanto, 2 bits": Row("quantized", {"backend": "quanto", "nbits": 2}, theirs=True),
        "transformers hqq, 4 bits": Row("quantized", hqq | {"axis_key": 1, "axis_value": 1}, theirs=True),
        "dynamic": Row("dynamic", peer="transformers dynamic", lossless=True),
        "static": Row("static", peer="transformers static", lossless=True),
        "offloaded": Row("offloaded", peer="transformers offloaded", lossless=True),
        "offloaded_static": Row("offloaded_static", peer="transformers offloaded_static", lossless=True),
        "offloaded, on disk": Row("offloaded", {"residency": "disk"}, lossless=True),
        **{
            f"quantized: {name}, {attends}": Row("quantized", options | more, peer=f"transformers {name}")
            for name, options in quantized.items()
            for attends, more in attention.items()
        },
        "quantized: kivi, 4 bits": Row("quantized", {"backend": "kivi", "nbits": 4}),
        "quantized: fp8": Row("quantized", {"backend": "fp8"}),
        "offloaded_quantized": Row("offloaded_quantized", peer="transformers quanto, 4 bits"),
        f"sink, window {setting.window}": Row("sink", {"window_length": setting.window}),
        f"sliding_window, {setting.window}": Row("sliding_window", {"window_length": setting.window}),
    }


@lru_cache(maxsize=1)
def load(setting: Setting) -> Any:
    keep_freed_memory()  # the peers too
    torch.set_num_threads(setting.threads)
    transformers.logging.set_verbosity_error()
    # Longer contexts than the shape says: random weights know no better.
    shape = SHAPES[setting.model] | {"max_position_embeddings": 2**17}
    return llama(setting.device, getattr(torch, setting.dtype), **shape)


@dataclass(frozen=True)
class Live:
    """A generation that stands at its next step. cache: as it is when all steps are done."""

    tokens: Iterator[int]
    cache: Callable[[], Any]


def begin(row: Row, model: Any, ids: torch.Tensor, new: int) -> Live:
    if row.theirs:
        cache = their_cache(row, model.config, ids.shape[1] + new - 1)  # the last token is never fed
        return Live(their_tokens(model, ids, new, cache), lambda: cache)
    generator = engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=PIECE))
    stream = generator.stream(ids, max_new_tokens=new, cache=row.cache, cache_config=dict(row.options))
    return Live((token for piece in stream for token in piece.tokens), lambda: stream.result().cache)


def their_cache(row: Row, config: Any, tokens: int) -> Any:
    if row.cache == "quantized":
        return transformers.QuantizedCache(config=config, **row.options)
    away = {"offloading": True} if "offloaded" in row.cache else {}
    if "static" in row.cache:
        return transformers.StaticCache(config=config, max_cache_len=tokens, **away)
    return transformers.DynamicCache(config=config, **away)


@torch.inference_mode()
def their_tokens(model: Any, ids: torch.Tensor, new: int, cache: Any) -> Iterator[int]:
    """Nothing but the model and its cache: less than a step of their `generate`."""
    for piece in ids.split(PIECE, dim=1):
        out = model(piece, past_key_values=cache, logits_to_keep=1)
    for step in range(new):
        token = out.logits[:, -1:].argmax(dim=-1)
        yield int(token)
        if step + 1 < new:
            out = model(token, past_key_values=cache)


STATUS, FORGET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # of Linux


def memory_bytes(device: str, peak: bool) -> int:
    """Of the device, or resident of this process: at most since `forget_peak`, or now."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    return status_bytes("VmHWM:" if peak else "VmRSS:")


def status_bytes(name: str) -> int:
    """What this process has, as /proc/self/status names it."""
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith(name)]
    return 1024 * int(line.split()[1])


def forget_peak(device: str) -> None:
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        FORGET_PEAK.write_text("5")


def prompt(context: int, model: Any) -> torch.Tensor:
    ids = torch.randint(3, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    return ids.to(model.device)


def measure(row: Row, context: int, setting: Setting) -> dict[str, Any]:
    """The text and the bytes of one backend at one context; the peak with `setting.peak` only."""
    model = load(setting)
    ids = prompt(context, model)
    list(begin(row, model, ids[:, :160], 2).tokens)  # loads libraries, chooses kernels
    gc.collect()
    if setting.peak:
        forget_peak(setting.device)
    before = memory_bytes(setting.device, peak=False) if setting.peak else 0
    live = begin(row, model, ids, setting.new + 1)
    tokens = list(live.tokens)
    peak = memory_bytes(setting.device, peak=True) - before if setting.peak else None
    kept, scratch = kept_bytes(live.cache())
    return {"tokens": tokens, "kept_bytes": kept, "scratch_bytes": scratch, "peak_bytes": peak}


def steps_ms(rows: dict[str, Row], context: int, setting: Setting) -> dict[str, dict[str, float]]:
    """Of all backends, a step of each in turn: what else the machine does slows all of them."""
    model = load(setting)
    ids = prompt(context, model)
    # The first token comes from the prompt, the second warms up, and of the last one nothing more is computed.
    lives = {name: begin(row, model, ids, setting.new + 3) for name, row in rows.items()}
    for live in lives.values():
        next(live.tokens), next(live.tokens)
    taken = [{name: 1000 * timed(partial(next, live.tokens)) for name, live in lives.items()}
             for _ in range(setting.new)]  # fmt: skip
    return {name: spread([step[name] for step in taken]) for name in rows}


def predicted_bytes(row: Row, tokens: int, setting: Setting) -> float:
    """What the backend should keep of so many tokens, by arithmetic, without room for more."""
    config, item_bytes = transformers.LlamaConfig(**SHAPES[setting.model]), getattr(torch, setting.dtype).itemsize
    full = full_bytes_per_token(config, item_bytes)
    if "window_length" in row.options:
        return full * min(tokens, row.options["window_length"])
    if "quantized" not in row.cache:
        return full * tokens
    options = configs.QuantizedCacheConfig.from_dict(row.options)
    # transformers quantizes the complete prompt, this engine keeps the most recent tokens of it.
    in_full = min(tokens, setting.new if row.theirs else options.residual_length)
    return full * in_full + encoded_bytes_per_token(config, item_bytes, options) * (tokens - in_full)


def weight_bytes(setting: Setting) -> int:
    """What a step reads of the model."""
    config = transformers.LlamaConfig(**SHAPES[setting.model])
    with torch.device("meta"):
        bare = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setting.dtype))
    return sum(p.nbytes for name, p in bare.named_parameters() if "embed_tokens" not in name)


def measure_context(context: int, rows: dict[str, Row], setting: Setting, run: Callable[..., Any]) -> dict[str, Any]:
    speed, weights, tokens = run(bandwidth, setting.device), weight_bytes(setting), context + setting.new
    full = predicted_bytes(Row("dynamic"), tokens, setting)
    floor_ms = 1000 * (weights + full) / speed
    _console.print(
        f"\ncontext {context}, {setting.new} steps: a step reads {weights / 1e6:.0f} MB of weights and "
        f"{full / 1e6:.0f} MB of keys and values in full; at {speed / 1e9:.1f} GB/s that is {floor_ms:.1f} ms"
    )
    with _console.status(f"context {context}: ms per token"):
        ms = run(steps_ms, rows, context, setting)
    found: dict[str, dict[str, Any]] = {}
    texts: dict[str, list[int]] = {}
    for name, row in rows.items():
        with _console.status(f"context {context}: {name}"):
            taken = run(measure, row, context, setting)
        texts[name], predicted = taken.pop("tokens"), predicted_bytes(row, tokens, setting)
        found[name] = taken | {
            "ms": ms[name],
            "predicted_bytes_per_token": predicted / tokens,
            "bytes_per_token": taken["kept_bytes"] / tokens,
            "of_full": taken["kept_bytes"] / full,
            "of_full_with_scratch": (taken["kept_bytes"] + taken["scratch_bytes"]) / full,
            "floor_ms": 1000 * (weights + predicted) / speed,
            "times_peer": ms[row.peer]["median"] / ms[name]["median"] if row.peer in found else None,
            "same_text": texts[name] == next(iter(texts.values())) if row.lossless else None,
        }
    _console.print(table_of(found))
    return {"context": context, "bandwidth_gb_per_s": speed / 1e9, "floor_ms": floor_ms, "rows": found}


def can_be_built(row: Row, setting: Setting) -> bool:
    """Ours; a library or a compiler may be missing."""
    if not row.theirs:
        room = {"max_cache_len": 1} if "static" in row.cache else {}
        try:
            caches.build(row.cache, transformers.LlamaConfig(**SHAPES[setting.model]), **row.options, **room)
        except (configs.ConfigError, caches.UnknownCacheError) as error:
            _console.print(f"left out: {row.cache} with {row.options}: {error}")
            return False
    return True


def table_of(found: dict[str, dict[str, Any]]) -> Table:
    table = Table("cache", "bytes per token, predicted", "measured", "of full", "with scratch", "ms per token", "least",
                  "most", "of the floor", "x transformers", "peak MB", "same text")  # fmt: skip
    for name, row in found.items():
        table.add_row(
            name, *(f"{row[key]:,.0f}" for key in ("predicted_bytes_per_token", "bytes_per_token")),
            *(f"{row[key]:.1%}" for key in ("of_full", "of_full_with_scratch")),
            *(f"{value:.1f}" for value in row["ms"].values()), f"{row['floor_ms'] / row['ms']['median']:.0%}",
            "-" if row["times_peer"] is None else f"{row['times_peer']:.2f}",
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}",
            "-" if row["same_text"] is None else str(row["same_text"]),
        )  # fmt: skip
    return table


def in_a_process_of_its_own(work: Callable[..., Any], *arguments: Any, start: str = "spawn") -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context(start)) as pool:
        return pool.submit(work, *arguments).result()


def here(work: Callable[..., Any], *arguments: Any) -> Any:
    return work(*arguments)


def main(
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    contexts: Annotated[str, typer.Option(help="tokens of the prompts, with commas between")] = "1024,4096,16384",
    only: Annotated[str, typer.Option(help="rows next to the first, names with ; between, or 'all'")] = "all",
    new: Annotated[int, typer.Option(help="decode steps that are timed")] = 32,
    window: Annotated[int, typer.Option(help="of the backends that keep one")] = 1024,
    peak: Annotated[bool, typer.Option(help="a process per backend, and its peak memory")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    model: Annotated[str | None, typer.Option(help=f"one of {', '.join(SHAPES)}; default by the device")] = None,
    threads: Annotated[int, typer.Option(help="threads of torch")] = 2,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default by the device")] = None,
) -> None:
    on_cpu = device == "cpu"
    model = model or ("small" if on_cpu else "llama-3.1-8b")
    dtype = dtype or ("float32" if on_cpu else "bfloat16")
    if peak and on_cpu and not FORGET_PEAK.exists():
        raise typer.BadParameter("--peak asks Linux for the memory of a process: leave it out on other systems")
    torch.set_num_threads(threads)
    setting = Setting(model, device, dtype, new, window, threads, peak)
    known = rows_for(setting)
    first = next(iter(known))  # whose text the others' is compared with
    rows = picked(known, f"{first}; {only}" if only != "all" else only)
    skipped = [name for name, row in rows.items() if not can_be_built(row, setting)]
    for name in skipped:
        rows.pop(name)
    if on_cpu:
        _console.print("left out: transformers' offloaded caches, which need CUDA")
    run = in_a_process_of_its_own if peak else here
    cases = [measure_context(int(context), rows, setting, run) for context in contexts.split(",")]
    machine = {} if on_cpu else {"processor": torch.cuda.get_device_name(device)}
    report("memory", out, model=SHAPES[model], dtype=dtype, device=device, new_tokens=new, window=window,
           left_out=skipped, cases=cases, **machine)  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
