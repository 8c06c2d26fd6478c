"""Products of one matrix of a linear layer by data type and rows: the kernel beside torch's own, in turns.

    python benchmarks/products.py --out products-cpu.json

The weights are in no cache of the processor: several matrices of the shape take turns. Prints a table, and one JSON
line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Annotated

import torch
import typer
from common import report, spread, timed
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from caches.platform.native import DTYPES
from engine.kernels.linear_routes import routes

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
_BYTES = 2**27  # of all matrices of one data type
_console = Console()


def works(weights: list[torch.Tensor], rows: int) -> dict[str, Callable[[], torch.Tensor]]:
    """What computes the product with the next of the matrices, by name."""
    turn, input = cycle(weights), torch.randn(rows, weights[0].shape[1]).to(weights[0].dtype)
    products = {"kernel": routes()["kernel"], "torch": functional.linear}
    return {name: lambda product=product: product(input, next(turn), None) for name, product in products.items()}


def measured(weights: list[torch.Tensor], rows: int, runs: int) -> dict[str, dict[str, float]]:
    """ms of one product, after a warm-up."""
    samples: dict[str, list[float]] = {"kernel": [], "torch": []}
    for run in range(runs + 1):
        for name, work in works(weights, rows).items():
            seconds = timed(lambda work=work: [work() for _ in weights])
            if run > 0:
                samples[name].append(1000 * seconds / len(weights))
    return {name: spread(taken) for name, taken in samples.items()}


def main(
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    outs: Annotated[int, typer.Option(help="outputs of the matrix")] = 8192,
    width: Annotated[int, typer.Option(help="inputs of the matrix")] = 2048,
    runs: Annotated[int, typer.Option(help="runs of each product")] = 7,
    threads: Annotated[int, typer.Option(help="threads of torch")] = 2,
) -> None:
    torch.set_num_threads(threads)
    draw = partial(torch.randn, outs, width, generator=torch.Generator().manual_seed(0))
    found: dict[str, dict[int, dict[str, dict[str, float]]]] = {}
    table = Table("rows", *(f"{dtype}"[6:] + f", {name}" for dtype in DTYPES for name in ("kernel", "torch")))
    for dtype in DTYPES:
        count = max(2, _BYTES // (outs * width * dtype.itemsize))
        weights = [draw().to(dtype) for _ in range(count)]
        found[str(dtype)[6:]] = {rows: measured(weights, rows, runs) for rows in ROWS}
    for rows in ROWS:
        cases = [by_rows[rows][name].values() for by_rows in found.values() for name in ("kernel", "torch")]
        table.add_row(str(rows), *("{:.2f} ({:.2f} to {:.2f})".format(*values) for values in cases))
    _console.print(table)
    report("products", out, outs=outs, width=width, ms=found)


if __name__ == "__main__":
    typer.run(main)
