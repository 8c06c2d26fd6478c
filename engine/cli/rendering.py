"""Formats results for the command line: text, JSON, and a table of statistics."""

from __future__ import annotations

import json
from collections import Counter
from textwrap import indent
from typing import TYPE_CHECKING

from rich.cells import cell_len

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


class WordWrap:
    """A text that comes in pieces, for a terminal: a word that would cross the edge goes to the next line.

    What is shown of it already is erased. Code between lines with ``` is left to the terminal: a copy of it has no line
    breaks that are not in the text. width: of the terminal, in cells.
    """

    def __init__(self, width: int):
        self._width = width
        self._line, self._word = "", ""  # of the text, as far as it came
        self._column = 0
        self._is_code = False

    def shown(self, piece: str) -> str:
        """What to write for the next piece."""
        return "".join(map(self._written, piece))

    def _written(self, character: str) -> str:
        if character == "\n":
            self._is_code ^= self._line.lstrip().startswith("```")
            self._line, self._word, self._column = "", "", 0
            return character
        cells = 8 - self._column % 8 if character == "\t" else cell_len(character)
        self._line += character
        self._word = "" if character.isspace() else self._word + character
        self._column += cells
        if self._column < self._width or self._is_code:  # the last cell stays free: the cursor would not leave it
            return character
        if character.isspace():
            self._column = 0
            return "\n"
        word_cells = cell_len(self._word)
        if word_cells < min(self._column, self._width):
            self._column, erased = word_cells, word_cells - cells
            back = f"\x1b[{erased}D\x1b[K" if erased else ""
            return f"{back}\n{self._word}"
        if self._column > self._width:  # a word longer than a line, which the terminal goes on with in the next one
            self._column = cells
        return character
