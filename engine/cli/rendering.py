"""How the command line shows what was generated: as text, as JSON, and what was measured."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from textwrap import indent
from typing import TYPE_CHECKING

from engine.tables import Column, aligned

if TYPE_CHECKING:
    from engine.result import Generation, StreamChunk


def as_text(result: Generation) -> str:
    """The text, or all of them with their rows' numbers in front and their further lines below their first."""
    assert result.text is not None  # a model given as a path comes with its tokenizer
    if len(result.text) == 1:
        return result.text[0]
    labels = [f"[{row}] " for row in range(len(result.text))]
    return "\n".join(
        label + indent(text, " " * len(label)).removeprefix(" " * len(label))
        for label, text in zip(labels, result.text, strict=True)
    )


def as_json(result: Generation) -> str:
    """One object: `rows`, each with `text`, `tokens` and `finish_reason`, and `stats`, with the fields of `Stats`."""
    assert result.text is not None
    parts = zip(result.text, result.tokens, result.finish_reasons, strict=True)
    rows = [{"text": text, "tokens": tokens, "finish_reason": reason} for text, tokens, reason in parts]
    return json.dumps({"rows": rows, "stats": asdict(result.stats)})


def piece_as_json(piece: StreamChunk) -> str:
    """One object with the fields of `StreamChunk`: `row`, `tokens`, `text`, `finish_reason`."""
    return json.dumps(asdict(piece))


def stats(result: Generation, width: int) -> str:
    """What was measured, and why texts ended, line by line."""
    found, ended = result.stats, Counter(reason or "stopped" for reason in result.finish_reasons)
    reasons = ", ".join(reason if len(result.tokens) == 1 else f"{reason} ({n})" for reason, n in ended.items())
    facts = [("cache", found.cache), ("tokens", f"{found.prompt_tokens} read, {found.new_tokens} new")]
    facts += [("ended by", reasons)]
    if found.ttft_s is not None:
        facts += [("time to first token", f"{1000 * found.ttft_s:.1f} ms")]
    if found.decode_tokens_per_s is not None:
        facts += [("speed", f"{found.decode_tokens_per_s:.1f} tokens/s")]
    if found.drafted_tokens:
        facts += [("proposed", f"{found.drafted_tokens} tokens, {found.accepted_tokens} accepted")]
    facts += [("cache size", f"{found.cache_bytes:,} bytes")]
    facts += [("out of memory", str(fallback)) for fallback in found.fallbacks]
    return aligned([Column(), Column(wraps=True)], facts, width)
