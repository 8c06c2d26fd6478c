"""How a run speaks to the streamers of transformers, and to all that have their methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import TextStreamer

from engine.output.detokenizer import RowText, ends_of
from engine.result import StreamChunk


class StreamerAdapter(Protocol):
    """Is told what happens in this order: `begin`, then `rows` and `show` any number of times, then `end`."""

    def begin(self) -> None:
        """The run begins, with rows as the prompt has them."""

    def select_rows(self, index: list[int]) -> None:
        """Row i becomes row `index[i]`."""

    def show(self, pieces: Sequence[StreamChunk]) -> None:
        """This has come."""

    def end(self, is_lost: bool) -> None:
        """Nothing more comes. is_lost: it has raised before, and only wants to be told of the end."""


def adapter_for(
    streamer: Any, prompts: torch.Tensor, mask: torch.Tensor, returned: int, pad_id: int, stop_strings: Sequence[str]
) -> StreamerAdapter | None:
    """prompts, mask: [rows, columns]. returned: texts per prompt."""
    if streamer is None:
        return None
    if isinstance(streamer, TextStreamer) and getattr(streamer.put, "__func__", None) is TextStreamer.put:
        rows = prompts.tolist()
        if len(rows) > 1:  # alone, a row shows its pads, as in transformers
            rows = [ids[real].tolist() for ids, real in zip(prompts, mask != 0, strict=True)]
        return _Texts(streamer, rows, stop_strings, ends_of(prompts, stop_strings))
    return _Columns(streamer, prompts.repeat_interleave(returned, dim=0), len(prompts), pad_id)


class _Columns:
    """Gives a streamer the prompt [rows, columns], then columns of token ids [rows], as transformers does.

    A column is whole when each row has a token for it or has ended: then the pad id stands in.
    """

    def __init__(self, streamer: Any, prompt: torch.Tensor, rows: int, pad_id: int):
        self._streamer, self._prompt, self._pad_id = streamer, prompt, pad_id
        self._waiting: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows

    def begin(self) -> None:
        self._streamer.put(self._prompt.cpu())

    def select_rows(self, index: list[int]) -> None:
        self._waiting = [list(self._waiting[row]) for row in index]
        self._ended = [self._ended[row] for row in index]

    def show(self, pieces: Sequence[StreamChunk]) -> None:
        for piece in pieces:
            self._waiting[piece.row] += piece.tokens
            self._ended[piece.row] |= piece.finish_reason is not None
        while all(tokens or ended for tokens, ended in zip(self._waiting, self._ended, strict=True)) and self._put():
            pass

    def _put(self) -> bool:
        """Put a column, if there is a token for it."""
        if not any(self._waiting):
            return False
        column = [tokens.pop(0) if tokens else self._pad_id for tokens in self._waiting]
        self._streamer.put(torch.tensor(column))
        return True

    def end(self, is_lost: bool) -> None:
        try:
            while not is_lost and self._put():
                pass
        finally:
            self._streamer.end()


class _Texts:
    """Gives a text streamer the first row's text while it comes, then that of the others, each on a line of its own.

    It decodes as the streamer says, but not in its `put`, which takes one row only and shows halves of stop strings.
    prompts: the ids of each row that show. ends: the last of all its ids, see `RowText`.
    """

    def __init__(
        self, streamer: TextStreamer, prompts: list[list[int]], stop_strings: Sequence[str], ends: list[list[int]]
    ):
        self._streamer, self._prompts = streamer, prompts
        self._texts = [RowText(streamer.tokenizer, stop_strings, streamer.decode_kwargs, end) for end in ends]
        self._begun = [""] * len(prompts)  # the text of each row's prompt
        self._waiting = [""] * len(prompts)
        self._ended = [False] * len(prompts)
        self._row = 0  # the one that is shown while it comes

    def begin(self) -> None:
        if not self._streamer.skip_prompt:
            self._begun = [text.begin(ids) for text, ids in zip(self._texts, self._prompts, strict=True)]
        self._say(self._begun[0])

    def select_rows(self, index: list[int]) -> None:
        self._texts = [self._texts[row].copy() for row in index]
        self._begun = [self._begun[row] for row in index]
        self._waiting = [self._waiting[row] for row in index]
        self._ended = [self._ended[row] for row in index]

    def show(self, pieces: Sequence[StreamChunk]) -> None:
        for piece in pieces:
            self._waiting[piece.row] += "".join(map(self._texts[piece.row].push, piece.tokens))
            if piece.finish_reason is not None:
                self._end_row(piece.row)
        self._hand_over()

    def _end_row(self, row: int) -> None:
        self._waiting[row] += self._texts[row].flush()
        self._ended[row] = True

    def _hand_over(self) -> None:
        while True:
            text, self._waiting[self._row] = self._waiting[self._row], ""
            self._say(text)
            if not self._ended[self._row] or self._row + 1 == len(self._texts):
                return
            self._row += 1
            self._say("\n" + self._begun[self._row])

    def _say(self, text: str) -> None:
        if text:
            self._streamer.on_finalized_text(text)

    def end(self, is_lost: bool) -> None:
        try:
            for row in [] if is_lost else range(len(self._texts)):
                self._end_row(row)
            if not is_lost:
                self._hand_over()
        finally:
            self._streamer.end()  # its own `put` has left nothing behind: only says that this is the end
