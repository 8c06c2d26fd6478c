"""How the command line shows what it found: texts, JSON and tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from configs import PlacedCacheConfig

if TYPE_CHECKING:
    from engine.planning import Plan
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
    if stats.drafted_tokens:
        table.add_row("proposed", f"{stats.drafted_tokens} tokens, {stats.accepted_tokens} accepted")
    table.add_row("cache size", f"{stats.cache_bytes:,} bytes")
    for fallback in stats.fallbacks:
        table.add_row("out of memory", str(fallback))
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


def plan_as_text(plan: Plan) -> str:
    """What `engine plan` shows: what the run takes, a line per backend, and the choice."""
    shown = StringIO()
    out = Console(file=shown, width=160, highlight=False)
    out.print(_parts_table(plan))
    out.print()
    out.print(_backends_table(plan))
    refused = [backend for backend in plan.backends if backend.refused is not None]
    if len(plan.backends) == 1:
        lines = [f"{backend.title}: {backend.refused}" for backend in refused]
    else:
        names = ", ".join(backend.title for backend in refused)
        lines = [f"Not for this run: {names} (each says why as `refused`)"] if refused else []
    return shown.getvalue() + "\n".join(["", *lines, f"Choice: {plan.choice or 'none of them'}; {plan.why}"])


def _parts_table(plan: Plan) -> Table:
    """What is the same whatever the cache."""
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = f", in {plan.rows} rows" if plan.rows != plan.batch_size else ""
    table.add_row("model", f"{plan.model}, {plan.dtype} on {plan.device}")
    table.add_row("run", f"{plan.batch_size} x {plan.prompt_tokens:,} tokens, {plan.max_new_tokens:,} new ones{rows}")
    table.add_row("weights", _megabytes(plan.weight_bytes) + (", loaded" if plan.weights_are_loaded else ""))
    table.add_row("last logits", _megabytes(plan.logits_bytes))
    known = {place: size for place, size in plan.free_bytes.items() if size is not None}
    table.add_row("free", ", ".join(f"{_megabytes(size)} ({place})" for place, size in known.items()) or "not known")
    return table


def _backends_table(plan: Plan) -> Table:
    columns = ("cache", "kept by layers", "staging", "to work with", "needs in all", "fits", "longest context",
               "largest batch")  # fmt: skip
    table = Table(*columns, box=None, pad_edge=False)
    for backend in plan.backends:
        if backend.refused is None:
            kinds = [f"{_megabytes(size)} ({kind})" for kind, size in backend.kind_bytes.items()]
            needs = [f"{_megabytes(size)} ({place})" for place, size in backend.need_bytes.items() if size]
            fits = {True: "yes", False: "no", None: "?"}[backend.fits]
            searched = [f"{n:,}" if n is not None else "?" for n in (backend.longest_context, backend.largest_batch)]
            staging = _megabytes(backend.cache_bytes.get("staging", 0))
            table.add_row(backend.title, "\n".join(kinds), staging, _megabytes(backend.working_bytes),
                          "\n".join(needs), fits, *searched)  # fmt: skip
    return table


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
