"""`engine plan`: the memory that a run will take, as a table or as JSON."""

from __future__ import annotations

import json
from math import isfinite
from typing import Annotated, Any

import typer

from configs import CacheConfig
from engine.cli import output
from engine.cli.libraries import start_libraries
from engine.cli.progress import Work
from engine.cli.values import assignments
from engine.errors import OptionError


def plan(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder or hub id; only its configuration is read. Default: the small model of the package.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="The same as MODEL, as in the other commands.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of a prompt.", min=1)] = 1024,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", metavar="N", help="New tokens per row, at most.", min=1)
    ] = 20,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Number of prompts.", min=1)] = 1,
    num_beams: Annotated[int, typer.Option(metavar="N", help="Beams of a beam search.", min=1)] = 1,
    num_return_sequences: Annotated[
        int, typer.Option("--num-return-sequences", "--samples", metavar="N", help="Sequences per prompt.", min=1)
    ] = 1,
    do_sample: Annotated[
        bool, typer.Option("--do-sample", "--sample", help="Sample tokens, also in a beam search.")
    ] = False,
    cache: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Plan only this backend; default: all.", autocompletion=CacheConfig.names),
    ] = None,
    cache_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of that backend; may be repeated.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="Data type of the weights; default: the configuration's.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            "--device-map",
            metavar="NAME",
            help="The device to plan for: cpu, cuda:1, ... It need not be present.",
        ),
    ] = None,
    free_gib: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Free memory of the device; default: what is found.", min=0),
    ] = None,
    prefill_chunk_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of the prompt per step; default: all.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: the fields of `engine.Plan`.")] = False,
) -> None:
    """Plan a run: the memory that each cache takes, and which one fits. No weights are loaded."""
    asked = dict(locals())
    del asked["as_json"], asked["cache_option"], asked["free_gib"], asked["path"]
    if path is not None and model is not None:
        raise OptionError("the model was given twice: as MODEL and as --model: leave one of them out")
    if free_gib is not None and not isfinite(free_gib):
        raise OptionError(f"--free-gib {free_gib} is no size: give a number of GiB, 0 or more")
    model = path if model is None else model
    options: dict[str, Any] | None = assignments(cache_option, "--cache-option") or None
    free_bytes = None if free_gib is None else int(free_gib * 2**30)
    with Work() as work:
        start_libraries(work, model)
        import engine

        work.doing(f"planning the run with {cache or 'every cache'}")
        asked["model"] = engine.SHIPPED_MODEL if model is None else model
        found = engine.plan(**asked, cache_config=options, free_bytes=free_bytes)
    output.say(json.dumps(found.to_dict()) if as_json else str(found))
