"""Tables: plain text for a terminal, where words are never broken, and HTML for notebooks."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from textwrap import fill, wrap

_GAP = 2  # columns between columns
_READABLE = 24  # characters: the narrowest column of running text


@dataclass(frozen=True)
class Column:
    """title: may have several lines. wraps: cells are running text, wrapped to the remaining width."""

    title: str = ""
    wraps: bool = False


def terminal_width(unknown: int) -> int:
    """The terminal's width in characters, or `$COLUMNS`. unknown: the width if there is no terminal."""
    return shutil.get_terminal_size((unknown, 24)).columns


def wrapped(text: str, width: int) -> str:
    """`text` as a paragraph."""
    return fill(text, max(width, 1), break_long_words=False, break_on_hyphens=False)


def aligned(columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int) -> str:
    """The table. Only columns of running text are fitted to `width`; it may become wider."""
    table = [[column.title for column in columns], *rows]
    room = _least(columns, table)
    for number in (number for number, column in enumerate(columns) if column.wraps):  # they share the remaining width
        remaining = width - sum(room) - _GAP * (len(columns) - 1)
        widest = max(len(line) for row in table for line in row[number].splitlines() or [""])
        longest_word = max((len(word) for row in table for word in row[number].split()), default=0)
        room[number] = max(min(widest, room[number] + remaining), min(longest_word, width), 1)
    lines = []
    for row in table if any(column.title for column in columns) else table[1:]:
        cells = [_lines(cell, size, column) for cell, size, column in zip(row, room, columns, strict=True)]
        for line_cells in zip_longest(*cells, fillvalue=""):
            lines.append(
                (" " * _GAP).join(cell.ljust(size) for cell, size in zip(line_cells, room, strict=True)).rstrip()
            )
    return "\n".join(lines)


def facts(pairs: Iterable[tuple[str, str]], width: int) -> str:
    """Names, and next to them their texts, wrapped to `width`."""
    return aligned([Column(), Column(wraps=True)], pairs, width)


def counted(number: int, noun: str) -> str:
    """The number and its noun, in the plural where it is not 1."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def lengths(prompt_tokens: int, new_tokens: int) -> str:
    """The tokens of a run, as subject of a sentence."""
    return f"{counted(prompt_tokens, 'prompt token')} and {counted(new_tokens, 'new one')}"


def outside(token: int, vocabulary: int) -> str:
    """That an id is no token of a vocabulary."""
    return f"token id {token} is outside the model's vocabulary of {vocabulary} tokens (0 to {vocabulary - 1})"


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def duration(seconds: float) -> str:
    """In milliseconds, in seconds from one second on, in minutes and seconds from one minute on."""
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds >= 0.01 else 2}f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, last_seconds = divmod(round(seconds), 60)
    return f"{minutes} min {last_seconds} s"


def fits(columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int) -> bool:
    """Whether `aligned` would fit into `width` with readable columns of running text."""
    return sum(_least(columns, [[column.title for column in columns], *rows])) + _GAP * (len(columns) - 1) <= width


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> str:
    """As `aligned`, or as `blocks` where that would be too wide."""
    return (aligned if fits(columns, rows, width) else blocks)(columns, rows, width)


def _least(columns: Sequence[Column], table: Sequence[Sequence[str]]) -> list[int]:
    """The least width of every column."""
    widest = [max(len(line) for row in table for line in row[n].splitlines() or [""]) for n in range(len(columns))]
    return [min(size, _READABLE) if column.wraps else size for column, size in zip(columns, widest, strict=True)]


def blocks(columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int) -> str:
    """The table as one block per row: the first cell as a heading, then a line for each other cell."""
    names = [" ".join(column.title.split()) for column in columns[1:]]
    paragraphs = []
    for heading, *cells in rows:
        pairs = [(f"  {name}", " ".join(cell.split())) for name, cell in zip(names, cells, strict=True) if cell]
        paragraphs.append(f"{' '.join(heading.split())}\n{facts(pairs, width)}")
    return "\n\n".join(paragraphs)


def _lines(cell: str, size: int, column: Column) -> list[str]:
    if not column.wraps:
        return cell.splitlines() or [""]
    paragraphs = [wrap(line, size, break_long_words=False, break_on_hyphens=False) for line in cell.splitlines()]
    return [line for paragraph in paragraphs for line in paragraph] or [""]


def html_table(columns: Sequence[str], rows: Iterable[Sequence[object]], below: Sequence[str]) -> str:
    """An HTML table, and lines below it; all content is escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    style = ' style="text-align: left; white-space: pre-wrap"'
    body = "".join("<tr>" + "".join(f"<td{style}>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    lines = "".join(f"<p>{escape(line)}</p>" for line in below)
    return f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{lines}</div>"
