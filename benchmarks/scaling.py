"""How the cost of a decode step grows with the context, the rows of a batch and the beams, next to transformers.

    python benchmarks/scaling.py --out scaling-cpu.json
    python benchmarks/plot.py scaling-cpu.json

Contexts are random keys and values, which cost what computed ones do. Rows and beams stand behind a prompt that is
computed. Per point the median of a few runs in ms, and the bytes that the cache keeps; per curve the exponents that fit
its upper half: cost ~ size ** exponent. At the end one JSON line. transformers reads the prompt once per beam, which
takes minutes for many.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import transformers
import typer
from branching import THEIRS_UP_TO
from common import SHAPES, decode_ms, kept_bytes, llama, report, spread, timed
from rich.console import Console

import caches
import engine

STEPS = 16
_console = Console()
Point = dict[str, Any]


def filled(cache: Any, config: Any, tokens: int) -> Any:
    """The cache with the random keys and values of so many tokens."""
    ours = isinstance(cache, caches.Cache)
    torch.manual_seed(0)
    if ours:
        cache.begin(tokens)
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn(2, 1, config.num_key_value_heads, tokens, config.head_dim), layer)
    if ours:
        cache.commit()
    return cache


def context_point(model: Any, tokens: int) -> dict[str, Point]:
    """The step behind so many tokens. Whole calls with STEPS tokens and with one, on caches that are filled anew."""
    config, generator = model.config, engine.Generator(model)
    ids = torch.randint(3, config.vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    make: dict[str, Callable[[], Any]] = {
        "transformers": lambda: filled(transformers.DynamicCache(config=config), config, tokens),
        "dynamic": lambda: filled(caches.build("dynamic", config), config, tokens),
        "quantized, 4 bits": lambda: filled(caches.build("quantized", config, nbits=4), config, tokens),
    }
    kept: dict[str, int] = {}

    def steps(name: str, new: int) -> float:
        cache = make[name]()
        if name == "transformers":
            taken = timed(lambda: model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False))
        else:
            taken = timed(lambda: generator.generate(ids, cache=cache, trust_cache=True, max_new_tokens=new))
        kept[name] = kept_bytes(cache)[0]
        return taken

    samples: dict[str, list[float]] = {name: [] for name in make}
    for run in range(4):
        for name in make:
            one, all = steps(name, 1), steps(name, STEPS)
            if run > 0:
                samples[name].append(1000 * (all - one) / (STEPS - 1))
            gc.collect()
    return {name: {"ms": spread(taken), "bytes": kept[name]} for name, taken in samples.items()}


def rows_point(model: Any, rows: int) -> dict[str, Point]:
    """The step of a batch of so many prompts of 64 tokens."""
    ids = torch.randint(3, model.config.vocab_size, (rows, 64), generator=torch.Generator().manual_seed(0))
    return _generated(model, ids, {})


def beams_point(model: Any, beams: int) -> dict[str, Point]:
    """The step of so many beams of a prompt of 512 tokens."""
    ids = torch.randint(3, model.config.vocab_size, (1, 512), generator=torch.Generator().manual_seed(0))
    return _generated(model, ids, {"num_beams": beams} if beams > 1 else {}, beams <= THEIRS_UP_TO)


def _generated(model: Any, ids: torch.Tensor, options: dict[str, Any], both: bool = True) -> dict[str, Point]:
    generator, kept = engine.Generator(model), {}

    def theirs(new: int) -> None:
        out = model.generate(ids, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, **options)
        kept["transformers"] = kept_bytes(out.past_key_values)[0]

    def ours(new: int) -> None:
        cache = caches.build("dynamic", model.config)
        generator.generate(ids, cache=cache, max_new_tokens=new, **options)
        kept["dynamic"] = kept_bytes(cache)[0]

    works = {"transformers": theirs, "dynamic": ours} if both else {"dynamic": ours}
    found = decode_ms(works, STEPS, 3)
    return {name: {"ms": taken, "bytes": kept[name]} for name, taken in found.items()}


CURVES: dict[str, tuple[Callable[[Any, int], dict[str, Point]], list[int]]] = {
    "context": (context_point, [256, 1024, 4096, 8192, 16384, 32768]),
    "rows": (rows_point, [1, 2, 4, 8, 16, 32, 64]),
    "beams": (beams_point, [1, 2, 4, 8, 16, 32, 64]),
}


def exponents(points: dict[int, dict[str, Point]]) -> dict[str, dict[str, float]]:
    """Per engine the slopes of ms and bytes in logarithms, over the upper half of the sizes."""
    found: dict[str, dict[str, float]] = {}
    for name in next(iter(points.values())):
        sizes = sorted(size for size, point in points.items() if name in point)
        sizes = sizes[len(sizes) // 2 - 1 :]
        costs = {"ms": [points[size][name]["ms"]["median"] for size in sizes],
                 "bytes": [points[size][name]["bytes"] for size in sizes]}  # fmt: skip
        found[name] = {
            what: float(numpy.polyfit(numpy.log(sizes), numpy.log(values), 1)[0]) for what, values in costs.items()
        }
    return found


def main(
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    most: Annotated[int, typer.Option(help="leave out larger contexts, rows and beams")] = 2**15,
    model: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "small",
    threads: Annotated[int, typer.Option(help="threads of torch")] = 2,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
) -> None:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    loaded = llama(dtype=getattr(torch, dtype), **SHAPES[model] | {"max_position_embeddings": 2**17})
    curves: dict[str, Any] = {}
    for name, (measure, sizes) in CURVES.items():
        points = {}
        for size in (one for one in sizes if one <= most):
            points[size] = measure(loaded, size)
            _console.print(f"{size} {name}: " + ", ".join(
                f"{engine_name} {point['ms']['median']:.1f} ms, {point['bytes'] / 1e6:.1f} MB"
                for engine_name, point in points[size].items()))  # fmt: skip
        curves[name] = {"points": points, "exponents": exponents(points)}
        _console.print(f"exponents: {curves[name]['exponents']}")
    report("scaling", out, model=SHAPES[model], dtype=dtype, steps=STEPS, curves=curves)


if __name__ == "__main__":
    typer.run(main)
