"""What leaves a run while it goes on: pieces of its rows for an iterator, and what a streamer is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.errors import EngineError
from engine.output.detokenizer import RowText, ends_of
from engine.output.hf_streamers import StreamerAdapter
from engine.result import StreamChunk
from strategies import Hypothesis


@dataclass
class _Row:
    """prompt: [columns]. text: None where none is wanted. shown: how many of the `tokens` were in a piece. delta: the
    text that was in none.
    """

    prompt: torch.Tensor
    text: RowText | None
    tokens: list[int] = field(default_factory=list)
    shown: int = 0
    delta: str = ""
    reason: str | None = None
    has_ended: bool = False  # its last piece was made

    def add(self, tokens: list[int]) -> None:
        self.tokens += tokens
        if self.text is not None:
            self.delta += "".join(map(self.text.push, tokens))

    def flush(self) -> None:
        """No more tokens come: what was held back of the text is final."""
        if self.text is not None:
            self.delta += self.text.flush()

    def copy(self) -> _Row:
        text = None if self.text is None else self.text.copy()
        return _Row(self.prompt, text, list(self.tokens), self.shown, self.delta, self.reason, self.has_ended)


class StreamBuffer:
    """prompts: [rows, columns]. tokenizer: None when no text is wanted. listener: the streamer, if there is one.

    watched: whether anything is shown before the end.
    """

    def __init__(
        self,
        prompts: torch.Tensor,
        tokenizer: Any,
        stop_strings: tuple[str, ...],
        listener: StreamerAdapter | None,
        watched: bool,
    ):
        self.watched = watched or listener is not None
        ends = ends_of(prompts, stop_strings)
        texts = [None if tokenizer is None else RowText(tokenizer, stop_strings, prompt=end) for end in ends]
        self._rows = [_Row(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        self._holds = False
        self._moved: list[int] | None = None  # where each row was when tokens came last
        self._pieces: list[StreamChunk] = []
        self._listener, self._is_lost = listener, False  # what has raised once is only told the end

    def begin(self) -> None:
        self._tell(lambda listener: listener.begin())

    @property
    def texts(self) -> list[RowText] | None:
        texts = [row.text for row in self._rows if row.text is not None]
        return texts or None

    @property
    def reasons(self) -> list[str | None]:
        return [row.reason for row in self._rows]

    # Rows

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes row `index[i]`, an index on the CPU: carried out when tokens come, which may never be."""
        rows = index.tolist()
        self._moved = rows if self._moved is None else [self._moved[row] for row in rows]

    def way_back(self) -> list[int] | None:
        """The index that makes of all rows those that tokens came for last; None where they are the same."""
        if self._moved is None:
            return None
        wanted = range(len(self._rows))
        return [self._moved.index(row) for row in wanted] if set(wanted) <= set(self._moved) else None

    def _settle(self) -> None:
        if self._moved is not None:
            self._reorder(self._moved)
            self._moved = None

    def _reorder(self, index: list[int]) -> None:
        if index == list(range(len(self._rows))):
            return
        self._rows = [self._rows[row].copy() for row in index]
        if self._listener is not None:
            self._listener.select_rows(index)

    # Tokens

    def push(self, tokens: list[int], running: list[bool]) -> None:
        """A column of tokens, of which those of running rows count."""
        self._settle()
        for row, token, runs in zip(self._rows, tokens, running, strict=True):
            if runs:
                row.add([token])

    def hold(self, texts: list[Hypothesis], why: Callable[[torch.Tensor, RowText | None], str]) -> None:
        """All that is known of the texts to be returned, whatever rows they are searched with.

        why: for the ids of a text that has ended, prompt included, and its text, why it has.
        """
        if not self._holds:  # from here on there is a row for each of them
            came_from = range(len(self._rows)) if self._moved is None else self._moved
            self._reorder([came_from[text.row] for text in texts])
            self._holds = True
        self._moved = None
        for number, (row, text) in enumerate(zip(self._rows, texts, strict=True)):
            known = len(row.tokens)
            if text.tokens[:known] != row.tokens:
                raise EngineError(
                    f"row {number} was shown with tokens {row.tokens}, but it goes on from {text.tokens[:known]}: a "
                    "strategy may only show what is final"
                )
            row.add(text.tokens[known:])
            if text.ended and row.reason is None:
                row.flush()
                row.reason = why(torch.cat([row.prompt, row.prompt.new_tensor(text.tokens)]), row.text)

    def end(self, number: int, reason: str) -> None:
        """The row gets no more tokens."""
        self._rows[number].flush()
        self._rows[number].reason = reason

    def end_all(self) -> None:
        """No row gets more tokens."""
        self._settle()
        for row in self._rows:
            row.flush()

    def flushed(self) -> list[str] | None:
        """The whole text of every row, after the last of its tokens; None where none is wanted."""
        self.end_all()
        texts = self.texts
        return None if texts is None else [text.text for text in texts]

    def release(self) -> list[StreamChunk]:
        """What has come since the last time. The streamer is told last: when it raises, all else is done."""
        new = []
        for number, row in enumerate(self._rows):
            ends = row.reason is not None and not row.has_ended
            if row.shown < len(row.tokens) or row.delta or ends:
                text = None if row.text is None else row.delta
                new.append(StreamChunk(number, tuple(row.tokens[row.shown :]), text, row.reason))
                row.shown, row.delta, row.has_ended = len(row.tokens), "", row.reason is not None
        self._pieces += new
        self._tell(lambda listener: listener.show(new))
        pieces, self._pieces = self._pieces, []
        return pieces

    def close(self) -> None:
        """The streamer gets the rest and ends: once, however often this is called and whatever it raises."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.end(self._is_lost)

    def _tell(self, what: Callable[[StreamerAdapter], None]) -> None:
        if self._listener is not None and not self._is_lost:
            self._is_lost = True
            what(self._listener)
            self._is_lost = False
