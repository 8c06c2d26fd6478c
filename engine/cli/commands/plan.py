"""`engine plan`: the memory that a run will take, as a table or as JSON."""

from __future__ import annotations

from typing import Any

import typer

from engine.cli import options, output
from engine.cli.libraries import start_libraries
from engine.cli.progress import Work
from engine.cli.values import assignments, one_model, size


@options.takes({None: options.PLAN})
def plan(path: str | None, model: str | None, free_gib: float | None, as_json: bool, **asked: Any) -> None:
    """Plan a run: the memory that each cache takes, and which one fits. No weights are loaded."""
    model = one_model(path, model)
    cache_config = assignments(asked.pop("cache_option"), "--cache-option") or None
    free_bytes = None if free_gib is None else size(free_gib, 2**30, "--free-gib")
    with Work() as work:
        start_libraries(work, model)
        import engine

        work.doing(f"planning the run with {asked['cache'] or 'every cache'}")
        planned = engine.plan(model or engine.SHIPPED_MODEL, cache_config=cache_config, free_bytes=free_bytes, **asked)
    output.say_json(planned.to_dict()) if as_json else output.say(str(planned))
    if asked["cache"] and planned.choice is None:
        raise typer.Exit(1)
