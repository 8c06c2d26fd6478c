"""What a stream shows, compared with its result."""

from __future__ import annotations


def check(pieces, out):
    """They are the result, piece by piece; a row ends once and then says nothing more."""
    rows = len(out.sequences)
    by_row = [[piece for piece in pieces if piece.row == row] for row in range(rows)]
    assert [[token for piece in row for token in piece.tokens] for row in by_row] == out.tokens
    for row, reason in zip(by_row, out.finish_reasons, strict=True):
        assert [piece.finish_reason for piece in row] == [None] * (len(row) - 1) + [reason]
    if out.text is None:
        assert all(piece.text is None for piece in pieces)
    else:
        assert ["".join(piece.text for piece in row) for row in by_row] == out.text


class Columns:
    """A streamer of one's own: what it was given, and how often it was ended."""

    def __init__(self):
        self.given, self.ends = [], 0

    def put(self, value):
        assert not self.ends
        self.given.append(value)

    def end(self):
        self.ends += 1
