"""Tables of plain text: as wide as they may be, and nothing in them is cut."""

from __future__ import annotations

import pytest

from engine.tables import Column, aligned, blocks, fits, wrapped

COLUMNS = [Column("name"), Column("bytes per\ntoken"), Column("what it is", wraps=True)]
ROWS = [
    ["offloaded_quantized", "1,920", "Codes in host memory: what is fetched for a layer is its codes."],
    ["none", "0", "Nothing."],
]
WORDS = [word for row in ROWS for cell in row for word in cell.split()]


@pytest.mark.parametrize("width", [60, 66, 80, 160])
def test_a_table_that_fits(width):
    shown = aligned(COLUMNS, ROWS, width)
    assert fits(COLUMNS, ROWS, width)
    assert max(map(len, shown.splitlines())) <= width
    assert sorted([*WORDS, "name", "bytes", "per", "token", "what", "it", "is"]) == sorted(shown.split())
    begins = {
        line.index(word) for line in shown.splitlines() for word in ("what it", "Codes", "Nothing") if word in line
    }
    assert len(begins) == 1


@pytest.mark.parametrize("width", [30, 40, 51])
def test_blocks_where_it_does_not(width):
    shown = blocks(COLUMNS, ROWS, width)
    assert not fits(COLUMNS, ROWS, width)
    assert max(map(len, shown.splitlines())) <= width
    assert set(WORDS) <= set(shown.split())
    assert shown.count("bytes per token  ") == 2


def test_a_word_is_longer_than_the_line():
    assert wrapped("a_word_of_many_letters and-more", 10) == "a_word_of_many_letters\nand-more"


def test_cells_of_several_lines():
    assert aligned([Column("a"), Column("b")], [["1\n2", "3"]], 80) == "a  b\n1  3\n2"
