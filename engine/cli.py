"""The command line: `engine generate`.

Exit codes: 0 done, 1 something failed while generating, 2 a wrong option or prompt, 130 interrupted with Ctrl-C.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

import caches
from engine.errors import EngineError, Interrupted
from engine.generator import Generator
from engine.loading import SHIPPED_MODEL
from engine.result import Generation, Stats

app = typer.Typer(no_args_is_help=True, add_completion=True, rich_markup_mode=None)
_messages = Console(stderr=True, highlight=False)


@app.callback()
def _engine() -> None:
    """Generate text with a key-value cache chosen by name."""


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; - or nothing reads standard input.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Local path or hub id; default: the small model of the package.")
    ] = None,
    cache: Annotated[str, typer.Option(help=f"Cache backend: {', '.join(caches.names())}.")] = "dynamic",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float | None, typer.Option(help="Sample at this temperature; 0 is greedy.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most probable tokens that add up to this.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for sampling.", min=0, max=2**63)] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text while it comes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with text, tokens and stats.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and cache size to standard error.")] = False,
) -> None:
    """Continue PROMPT. Greedy, unless --temperature or --top-p asks for sampling."""
    if stream and as_json:
        raise typer.BadParameter("--stream prints text and --json prints one object at the end: choose one")
    if prompt in (None, "-"):
        if sys.stdin.isatty():
            raise typer.BadParameter("there is no PROMPT: give one, or pipe it into standard input")
        prompt = _standard_input()
    samples = top_p is not None or bool(temperature)
    if top_p is not None and temperature == 0:
        raise typer.BadParameter("--temperature 0 is greedy, so --top-p cannot apply: leave one of them out")

    logging.disable_progress_bar()
    if seed is not None:
        torch.manual_seed(seed)
    options: dict[str, object] = {"cache": cache, "max_new_tokens": max_new_tokens, "do_sample": samples}
    if samples:
        options |= {"temperature": temperature, "top_p": top_p}
    generator = Generator(model or SHIPPED_MODEL)
    if stream:
        pieces = generator.stream(prompt, **options)
        for piece in pieces:
            print(piece.text, end="", flush=True)
        print()
        result = pieces.result()
    else:
        result = generator.generate(prompt, **options)
        print(_as_json(result) if as_json else _text(result))
    if stats:
        _print_stats(cache, result.stats)


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is no text in UTF-8: {error.reason} at byte {error.start}") from error


def _text(result: Generation) -> str:
    assert result.text is not None  # a model given as a path comes with its tokenizer
    return result.text[0]


def _as_json(result: Generation) -> str:
    prompt_columns = result.sequences.shape[1] - result.stats.new_tokens
    return json.dumps(
        {
            "text": _text(result),
            "tokens": result.sequences[0, prompt_columns:].tolist(),
            "finish_reason": result.finish_reasons[0],
            "stats": asdict(result.stats),
        }
    )


def _print_stats(cache: str, stats: Stats) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("cache", cache)
    table.add_row("tokens", f"{stats.prompt_tokens} read, {stats.new_tokens} new")
    if stats.ttft_s is not None:
        table.add_row("time to first token", f"{1000 * stats.ttft_s:.1f} ms")
    if stats.decode_tokens_per_s is not None:
        table.add_row("speed", f"{stats.decode_tokens_per_s:.1f} tokens/s")
    table.add_row("cache size", f"{stats.cache_bytes:,} bytes")
    _messages.print(table)


def main() -> None:
    """Entry point: errors become one line and an exit code."""
    try:
        app()
    except Interrupted as error:
        _fail(str(error), 1)
    except (EngineError, caches.CacheError) as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str, code: int) -> None:
    _messages.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
