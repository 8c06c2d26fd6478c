"""Formats results for the command line: text, JSON, and a table of statistics."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from textwrap import indent
from typing import TYPE_CHECKING, Any

from engine import tables

if TYPE_CHECKING:
    from engine.result import Generation, StreamChunk


def as_text(result: Generation) -> str:
    """The text; several texts are labelled with their rows, and their further lines are indented."""
    assert result.text is not None  # a model given as a path comes with its tokenizer
    if len(result.text) == 1:
        return result.text[0]
    labelled = ((f"[{row}] ", text) for row, text in enumerate(result.text))
    return "\n".join(label + indent(text, " " * len(label)).removeprefix(" " * len(label)) for label, text in labelled)


def as_dict(result: Generation) -> dict[str, Any]:
    """What is printed as JSON: `rows`, each with `text`, `tokens`, `finish_reason` and `logprobs` where they were asked
    for, and `stats`, the fields of `Stats`."""
    assert result.text is not None
    parts = zip(result.text, result.tokens, result.finish_reasons, strict=True)
    names = ("text", "tokens", "finish_reason")
    rows: list[dict[str, Any]] = [dict(zip(names, part, strict=True)) for part in parts]
    for row, logprobs in zip(rows, result.logprobs or [], strict=False):
        row["logprobs"] = [asdict(one) for one in logprobs]
    return {"rows": rows, "stats": asdict(result.stats)}


def chunk_as_json(chunk: StreamChunk) -> str:
    """A JSON object with the fields of `StreamChunk`; `logprobs` where they were asked for."""
    found = asdict(chunk)
    return json.dumps(found if chunk.logprobs else {name: found[name] for name in found if name != "logprobs"})


def stats(result: Generation, width: int) -> str:
    """A table of the statistics and finish reasons, at most `width` characters wide."""
    measured, ended = result.stats, Counter(reason or "stopped" for reason in result.finish_reasons)
    reasons = ", ".join(reason if len(result.tokens) == 1 else f"{reason} ({n})" for reason, n in ended.items())
    known = f"{measured.cached_tokens} in the cache, " if measured.cached_tokens else ""
    tokens = f"{known}{measured.prompt_tokens} read, {measured.new_tokens} new"
    facts = [("cache", measured.cache), ("tokens", tokens)]
    facts += [("ended by", reasons)]
    if measured.ttft_s is not None:
        facts += [("time to first token", f"{1000 * measured.ttft_s:.1f} ms")]
    if measured.decode_tokens_per_s is not None:
        facts += [("speed", f"{measured.decode_tokens_per_s:.1f} tokens/s")]
    if measured.drafted_tokens:
        facts += [("proposed", f"{measured.drafted_tokens} tokens, {measured.accepted_tokens} accepted")]
    if measured.compiled != "off":
        facts += [("compiled", measured.compiled)]
    facts += [("cache size", f"{measured.cache_bytes:,} bytes")]
    facts += [("out of memory", str(fallback)) for fallback in measured.fallbacks]
    return tables.facts(facts, width)
