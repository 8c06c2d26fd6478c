"""Plain text for a terminal: tables as wide as they may be, nothing is cut, words stay whole; durations."""

from __future__ import annotations

import re

import pytest

from engine.cli import output
from engine.cli.rendering import WordWrap
from engine.tables import Column, aligned, blocks, duration, fits, wrapped

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


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.00123, "1.23 ms"), (0.0281, "28.1 ms"), (0.9, "900.0 ms"), (1.25, "1.2 s"), (55.4601, "55.5 s"),
        (60, "1 min 0 s"), (7384.6, "123 min 5 s"),
    ],
)  # fmt: skip
def test_a_duration_has_the_unit_of_its_size(seconds, shown):
    assert duration(seconds) == shown


def screen(written: str, width: int) -> list[str]:
    """The lines that a terminal shows, which goes on in the next one where a line is full."""
    lines, column = [""], 0
    for number, text in re.findall("\x1b\\[(\\d*)[DK]|([^\x1b])", written, flags=re.S):
        if text == "\n":
            lines, column = [*lines, ""], 0
        elif text:
            if column == width:
                lines, column = [*lines, ""], 0
            lines[-1], column = lines[-1][:column] + text, column + 1
        elif number:
            column -= int(number)
        else:
            lines[-1] = lines[-1][:column]
    return [line.rstrip() for line in lines]


TEXT = """Paris is known for a_word_that_is_longer_than_any_line, then for its museums and x.

```python
the_code = "is shown as it is, however long"
```
* a list   with spaces"""


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("width", [16, 20, 33, 80])
def test_a_text_that_comes_in_pieces_has_whole_words_on_a_terminal(width, size):
    wrap = WordWrap(width)
    written = "".join(wrap.shown(TEXT[begin : begin + size]) for begin in range(0, len(TEXT), size))
    shown = screen(written, width)
    assert max(map(len, shown)) <= width
    before, code, after = TEXT.split("```")
    begin, end = (number for number, line in enumerate(shown) if line.startswith("```"))
    assert "".join(shown[begin + 1 : end]).replace(" ", "") == code.removeprefix("python\n").strip().replace(" ", "")
    for text, lines in ((before, shown[:begin]), (after, shown[end + 1 :])):
        whole = {word for word in text.split() if len(word) < width}
        assert whole <= {word for line in lines for word in line.split()}
        assert "".join(" ".join(lines).split()) == "".join(text.split())


def test_wide_characters_have_two_cells():
    assert WordWrap(8).shown("abc 東京都") == "abc 東\x1b[2D\x1b[K\n東京都"


def test_messages_have_whole_words_on_a_terminal(monkeypatch, capsys):
    message = "there is no cache named 'statik': choose one of them"
    output.complain(message)
    assert capsys.readouterr().err == f"error: {message}\n"
    monkeypatch.setattr(output, "_is_watched", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    for write, text in ((output.complain, f"error: {message}"), (output.tell, message), (output.remark, message)):
        write(message)
        shown = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().err)
        assert max(map(len, shown.splitlines())) <= 30
        assert shown.split() == text.split()
