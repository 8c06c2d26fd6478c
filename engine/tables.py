"""Tables: plain text for a terminal, where words are never broken, and HTML for notebooks."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import fill, wrap
from typing import Any

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


def wrapped(text: str, width: int, indent: str = "") -> str:
    """`text` as a paragraph; all lines but the first begin with `indent`."""
    return fill(text, max(width, len(indent) + 1), subsequent_indent=indent, break_long_words=False,
                break_on_hyphens=False)  # fmt: skip


def aligned(columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int) -> str:
    """The table. Only columns of running text are fitted to `width`; it may become wider."""
    return _table(columns, [[column.title for column in columns], *rows], width)


def fits(columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int) -> bool:
    """Whether `aligned` would fit into `width` with readable columns of running text."""
    least = sum(_least(column, cells) for column, cells in _by_column(columns, rows)) + _GAP * (len(columns) - 1)
    return least <= width


def blocks(columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int) -> str:
    """The table as one block per row: the first cell as a heading, then a line for each other cell."""
    names = [" ".join(column.title.split()) for column in columns[1:]]
    parts = []
    for first, *rest in rows:
        facts = [(f"  {name}", " ".join(cell.split())) for name, cell in zip(names, rest, strict=True) if cell]
        parts.append(f"{' '.join(first.split())}\n{aligned([Column(), Column(wraps=True)], facts, width)}")
    return "\n\n".join(parts)


def _by_column(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> list[tuple[Column, list[str]]]:
    table = [[column.title for column in columns], *rows]
    return [(column, [row[number] for row in table]) for number, column in enumerate(columns)]


def _least(column: Column, cells: Sequence[str]) -> int:
    widest = max((len(line) for cell in cells for line in cell.splitlines()), default=0)
    return min(widest, _READABLE) if column.wraps else widest


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> str:
    room = [_least(column, [row[number] for row in rows]) for number, column in enumerate(columns)]
    running = [number for number, column in enumerate(columns) if column.wraps]
    for number in running:  # they share the remaining width
        left = width - sum(room) - _GAP * (len(columns) - 1)
        widest = max(len(line) for row in rows for line in row[number].splitlines() or [""])
        longest_word = max((len(word) for row in rows for word in row[number].split()), default=0)
        room[number] = max(min(widest, room[number] + left), min(longest_word, width), 1)
    lines = []
    for row in rows:
        cells = [_lines(cell, size, column) for cell, size, column in zip(row, room, columns, strict=True)]
        for number in range(max(map(len, cells))):
            parts = (cell[number] if number < len(cell) else "" for cell in cells)
            lines.append((" " * _GAP).join(part.ljust(size) for part, size in zip(parts, room, strict=True)).rstrip())
    return "\n".join(lines[1:] if not any(column.title for column in columns) else lines)


def _lines(cell: str, size: int, column: Column) -> list[str]:
    if not column.wraps:
        return cell.splitlines() or [""]
    parts = [wrap(line, size, break_long_words=False, break_on_hyphens=False) for line in cell.splitlines()]
    return [line for part in parts for line in part] or [""]


def html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], below: Sequence[str]) -> str:
    """An HTML table, and lines below it; all content is escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    style = ' style="text-align: left; white-space: pre-wrap"'
    body = "".join("<tr>" + "".join(f"<td{style}>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    lines = "".join(f"<p>{escape(line)}</p>" for line in below)
    return f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{lines}</div>"
