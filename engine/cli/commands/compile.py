"""`engine compile`: compiles the layers of a model ahead of the calls that use them."""

from __future__ import annotations

import time

import typer

from engine.cli import options, output
from engine.cli.libraries import load_generator, start_libraries
from engine.cli.progress import Work
from engine.tables import counted, duration


@options.takes({None: options.COMPILE})
def compile(path: str | None, rows: int, dtype: str | None) -> None:
    """Compile the decode step of a model's layers, for calls with EngineConfig(compile="auto") or --compile auto."""
    with Work() as work:
        start_libraries(work, path)
        import torch

        from configs import EngineConfig
        from engine.prompt import without_padding

        generator = load_generator(work, path, EngineConfig(compile="auto", dtype=dtype or "auto"))
        work.doing("compiling one layer of each kind")
        begun = time.perf_counter()
        prompt = without_padding(torch.ones(rows, 2, dtype=torch.long))
        compiled = generator.warmup(prompt, do_sample=False)
    output.say(f"Compiled: {compiled}, for {counted(rows, 'row')}, in {duration(time.perf_counter() - begun)}.")
    if compiled.startswith("off"):
        raise typer.Exit(1)
