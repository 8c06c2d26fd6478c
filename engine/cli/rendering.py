"""Formats results for the command line: text, JSON, and a table of statistics."""

from __future__ import annotations

import json
from collections import Counter
from textwrap import indent
from typing import TYPE_CHECKING

from engine import tables

if TYPE_CHECKING:
    from engine.result import Generation


def as_text(result: Generation) -> str:
    """The text; several texts are labelled with their rows, and their further lines are indented."""
    assert result.text is not None  # a model given as a path comes with its tokenizer
    if len(result.text) == 1:
        return result.text[0]
    labelled = ((f"[{row}] ", text) for row, text in enumerate(result.text))
    return "\n".join(label + indent(text, " " * len(label)).removeprefix(" " * len(label)) for label, text in labelled)


def as_json(value: object, encoding: str | None = "utf-8") -> str:
    """A line of JSON. Characters that the encoding lacks are written as `\\u` and a number."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(encoding or "ascii")
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def stats(result: Generation, width: int) -> str:
    """A table of the statistics and finish reasons, at most `width` characters wide."""
    ended = Counter(reason or "stopped" for reason in result.finish_reasons)
    reasons = ", ".join(reason if len(result.tokens) == 1 else f"{reason} ({n})" for reason, n in ended.items())
    facts = result.stats.facts()
    facts.insert(2, ("ended by", reasons))
    return tables.facts(facts, width)
