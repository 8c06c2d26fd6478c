"""`engine plan`: what a run will take, as a table or as JSON. See `engine.cli`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from configs import CacheConfig
from engine.progress import Work


def plan(
    model: Annotated[
        str | None, typer.Argument(help="Local path or hub id, of which only the configuration is read.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 1024,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", min=1)] = 64,
    batch_size: Annotated[int, typer.Option(help="Prompts at a time.", min=1)] = 1,
    num_beams: Annotated[int, typer.Option(help="Beams of a search.", min=1)] = 1,
    num_return_sequences: Annotated[int, typer.Option("--samples", help="Texts per prompt.", min=1)] = 1,
    do_sample: Annotated[bool, typer.Option("--sample", help="Draw tokens, also in a search.")] = False,
    cache: Annotated[
        str | None, typer.Option(help="Only this backend; default: all of them.", autocompletion=CacheConfig.names)
    ] = None,
    cache_option: Annotated[
        list[str] | None, typer.Option(help="An option of that backend, NAME=VALUE; may be repeated.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Data type of the weights; default: what the configuration says.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where the model would go: cpu, cuda:1, ...")] = None,
    free_gib: Annotated[
        float | None, typer.Option(help="Memory that is free on the device; default: what is found.", min=0)
    ] = None,
    prefill_chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens of the prompt that are read at once; default: all.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: its fields are those of `engine.Plan`.")] = False,
) -> None:
    """Say what a run will take and which cache fits, before anything runs. No weights are loaded."""
    with Work() as work:
        work.starts_libraries()
        from transformers.utils import logging

        import engine
        from engine.cli import assignments

        logging.set_verbosity_error()
        work.doing("rehearsing the run with every cache" if cache is None else f"rehearsing the run with {cache}")
        options: dict[str, Any] | None = assignments(cache_option, "--cache-option") or None
        found = engine.plan(
            model or engine.SHIPPED_MODEL,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            cache=cache,
            cache_config=options,
            batch_size=batch_size,
            num_beams=num_beams,
            num_return_sequences=num_return_sequences,
            do_sample=do_sample,
            dtype=dtype,
            device=device,
            free_bytes=None if free_gib is None else int(free_gib * 2**30),
            prefill_chunk_tokens=prefill_chunk_tokens,
        )
    print(json.dumps(found.to_dict()) if as_json else found)
