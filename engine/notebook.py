"""Short `repr`s of results and plans, and HTML tables for notebooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.result import Generation

_SHORT = 50  # characters of a text in a line
_LONG, _MOST_ROWS = 500, 20  # characters of a text in a table, and its rows
_NO_TEXT = "none: no tokenizer was given (tokenizer=..., or the model as a path)"


def generation_in_short(out: Generation) -> str:
    """A `repr` of two or three lines for a result of any size."""
    text = f"text={_NO_TEXT}" if out.text is None else f"text[0]={_cut(out.text[0], _SHORT)!r}"
    optional = [field.name for field in fields(out) if field.default is None]
    records = [name for name in optional if getattr(out, name) is not None]
    separator = ",\n  "
    lines = [_summary(out), text] + ([f"with {', '.join(records)}"] if records else [])
    return f"Generation({separator.join(lines)})"


def generation_as_html(out: Generation) -> str:
    """A table of the first rows, and the measurements."""
    texts: Sequence[str | None] = out.text or [None] * len(out.tokens)
    rows = []
    for row, text in enumerate(texts[:_MOST_ROWS]):
        tokens, reason = out.tokens[row], out.finish_reasons[row] or "unfinished"
        rows.append([row, _cut(str(tokens) if text is None else text, _LONG), len(tokens), reason])
    below = [_summary(out), *map(str, out.stats.fallbacks)]
    if len(out.tokens) > len(rows):
        below.insert(0, f"and {_count(len(out.tokens) - len(rows), 'row')} more")
    if out.text is None:
        below.append(f"text: {_NO_TEXT}")
    return html_table(["row", "text" if out.text is not None else "token ids", "tokens", "ended by"], rows, below)


def _summary(out: Generation) -> str:
    """Rows, tokens, why they ended, the cache and the speed."""
    stats, ended = out.stats, Counter(reason or "unfinished" for reason in out.finish_reasons)
    reasons = ", ".join(f"{count} {reason}" for reason, count in ended.most_common())
    speed = stats.decode_tokens_per_s
    parts = [_count(len(out.tokens), "row"), _count(stats.new_tokens, "new token"), f"ended: {reasons}"]
    parts.append(f"cache={stats.cache!r}")
    return ", ".join(parts if speed is None else [*parts, f"{speed:.1f} tokens/s"])


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], below: Sequence[str]) -> str:
    """An HTML table, and lines below it; all content is escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    style = ' style="text-align: left; white-space: pre-wrap"'
    body = "".join("<tr>" + "".join(f"<td{style}>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    lines = "".join(f"<p>{escape(line)}</p>" for line in below)
    return f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{lines}</div>"
