"""`engine plan`: the memory that a run will take, as a table or as JSON."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

from configs import CacheConfig
from engine.cli import options, output
from engine.cli.libraries import start_libraries
from engine.cli.progress import Work
from engine.cli.values import assignments
from engine.errors import OptionError


@options.takes(
    {
        None: {
            "path": options.argument(
                str,
                "MODEL",
                "Folder or hub id; only its configuration is read. Default: the small model of the package.",
            ),
            "model": options.option(str, "PATH", "The same as MODEL, as in the other commands."),
            "prompt_tokens": options.option(int, "N", "Tokens of a prompt.", default=1024, min=1),
            "max_new_tokens": options.option(
                int, "N", "New tokens per row, at most.", "--max-new-tokens", "-n", default=20, min=1
            ),
            "batch_size": options.option(int, "N", "Number of prompts.", default=1, min=1),
            "num_beams": options.option(int, "N", "Beams of a beam search.", default=1, min=1),
            "num_return_sequences": options.option(
                int, "N", "Sequences per prompt.", "--num-return-sequences", "--samples", default=1, min=1
            ),
            "do_sample": options.flag("Sample tokens, also in a beam search.", "--do-sample", "--sample"),
            "cache": options.option(
                str, "NAME", "Plan only this backend; default: all.", autocompletion=CacheConfig.names
            ),
            "cache_option": options.CACHE["cache_option"],
            "dtype": options.MODEL["dtype"],
            "device": options.option(
                str,
                "NAME",
                "The device to plan for: cpu, cuda:1, ... It need not be present.",
                "--device",
                "--device-map",
            ),
            "free_gib": options.option(float, "GIB", "Free memory of the device; default: what is found.", min=0),
            "prefill_chunk_tokens": options.option(int, "N", "Tokens of the prompt per step; default: all.", min=1),
            "as_json": options.flag("Print JSON: the fields of `engine.Plan`.", "--json"),
        }
    }
)
def plan(
    path: str | None,
    model: str | None,
    cache_option: list[str] | None,
    free_gib: float | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Plan a run: the memory that each cache takes, and which one fits. No weights are loaded."""
    if path is not None and model is not None:
        raise OptionError("the model was given twice: as MODEL and as --model: leave one of them out")
    if free_gib is not None and not isfinite(free_gib):
        raise OptionError(f"--free-gib {free_gib} is no size: give a number of GiB, 0 or more")
    model = path if model is None else model
    cache_config = assignments(cache_option, "--cache-option") or None
    free_bytes = None if free_gib is None else int(free_gib * 2**30)
    with Work() as work:
        start_libraries(work, model)
        import engine

        work.doing(f"planning the run with {asked['cache'] or 'every cache'}")
        found = engine.plan(model or engine.SHIPPED_MODEL, cache_config=cache_config, free_bytes=free_bytes, **asked)
    output.say(json.dumps(found.to_dict()) if as_json else str(found))
