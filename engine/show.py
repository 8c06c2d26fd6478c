"""How the command line shows what it found: texts, JSON and tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from configs import PlacedCacheConfig

if TYPE_CHECKING:
    from engine.result import Generation, Piece, Stats


def as_text(result: Generation) -> str:
    """The text, or all of them with their rows' numbers in front."""
    assert result.text is not None  # a model given as a path comes with its tokenizer
    if len(result.text) == 1:
        return result.text[0]
    return "\n".join(f"[{row}] {text}" for row, text in enumerate(result.text))


def as_json(result: Generation) -> str:
    """One object: `rows`, each with `text`, `tokens` and `finish_reason`, and `stats`, with the fields of `Stats`."""
    assert result.text is not None
    parts = zip(result.text, result.tokens, result.finish_reasons, strict=True)
    rows = [{"text": text, "tokens": tokens, "finish_reason": reason} for text, tokens, reason in parts]
    return json.dumps({"rows": rows, "stats": asdict(result.stats)})


def piece_as_json(piece: Piece) -> str:
    """One object with the fields of `Piece`: `row`, `tokens`, `text`, `finish_reason`."""
    return json.dumps(asdict(piece))


def stats_table(stats: Stats) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("cache", stats.cache)
    table.add_row("tokens", f"{stats.prompt_tokens} read, {stats.new_tokens} new")
    if stats.ttft_s is not None:
        table.add_row("time to first token", f"{1000 * stats.ttft_s:.1f} ms")
    if stats.decode_tokens_per_s is not None:
        table.add_row("speed", f"{stats.decode_tokens_per_s:.1f} tokens/s")
    table.add_row("cache size", f"{stats.cache_bytes:,} bytes")
    return table


def caches_table(report: dict[str, Any]) -> Table:
    """The report of `engine caches`, a line per backend that is for the model, with the options of its own."""
    others = ("what it is", "options", "per token", f"{report['tokens']:,} tokens")
    table = Table(Column("cache", no_wrap=True), *others, box=None, pad_edge=False)
    common = PlacedCacheConfig.option_names()
    for cache in report["caches"]:
        if "refused" in cache:
            continue
        options = ", ".join(name for name in cache["options"] if name not in common)
        sizes = f"{cache['bytes_per_token']:,.0f} bytes", f"{cache['bytes'] / 1e6:,.1f} MB"
        table.add_row(cache["name"], cache["summary"], options or "-", *sizes)
    return table


def caches_refused(report: dict[str, Any]) -> str:
    """The backends that are for other models; of a single one, why."""
    refused = [cache for cache in report["caches"] if "refused" in cache]
    if len(report["caches"]) == 1:
        return "".join(f"{cache['name']}: {cache['refused']}" for cache in refused)
    names = ", ".join(cache["name"] for cache in refused)
    return f"For other models: {names} (`engine caches NAME` says why)" if refused else ""
