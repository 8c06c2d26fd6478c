"""Adapters that call transformers' streamers, and any object with their methods `put` and `end`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from transformers import TextStreamer

from caches.platform.undo import on_failure
from engine.chat_template import special_tokens
from engine.output.detokenizer import RowText
from engine.output.stop_strings import ends_of
from engine.result import StreamChunk


def ending(streamer: Any) -> on_failure:
    """End the streamer, if there is one, on any error: a thread that reads from it would wait for ever."""

    def end() -> None:
        with suppress(Exception):
            streamer.end()

    return on_failure(end)


class StreamerAdapter(Protocol):
    """Order of calls: `begin`, then `select_rows` and `show` any number of times, then `end`."""

    def begin(self) -> None:
        """The run begins. Rows are those of the prompts."""

    def select_rows(self, index: list[int]) -> None:
        """Row i becomes row `index[i]`."""

    def show(self, chunks: Sequence[StreamChunk]) -> None:
        """New tokens, of any rows."""

    def end(self, is_lost: bool) -> None:
        """The run ends. is_lost: an earlier call raised, so only the streamer's `end` is called."""


def adapter_for(
    streamer: object,
    prompts: torch.Tensor,
    mask: torch.Tensor,
    returned: int,
    pad_id: int,
    stops: tuple[tuple[str, ...], int],
    has_form: list[bool],
) -> StreamerAdapter | None:
    """The adapter for `streamer`; None without one. prompts, mask: [rows, columns]. returned: texts per prompt.
    stops, has_form: as of `StreamBuffer`."""
    if streamer is None:
        return None
    if isinstance(streamer, TextStreamer) and getattr(streamer.put, "__func__", None) is TextStreamer.put:
        rows = prompts.tolist()
        if len(rows) > 1:  # a single row shows its pad tokens, as in transformers
            rows = [ids[real].tolist() for ids, real in zip(prompts, mask != 0, strict=True)]
        stop_strings, begin = stops
        return _TextAdapter(streamer, rows, stop_strings, ends_of(prompts[:, begin:], stop_strings), has_form)
    return _IdsAdapter(streamer, prompts.repeat_interleave(returned, dim=0), len(prompts), pad_id)


class _IdsAdapter:
    """Puts the prompt [rows, columns], then token ids [rows] column by column, as transformers does.

    A column is put once every row has a token for it or has ended; rows that ended get the pad id.
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

    def show(self, chunks: Sequence[StreamChunk]) -> None:
        for chunk in chunks:
            self._waiting[chunk.row] += chunk.tokens
            self._ended[chunk.row] |= chunk.finish_reason is not None
        while all(tokens or ended for tokens, ended in zip(self._waiting, self._ended, strict=True)) and self._put():
            pass

    def _put(self) -> bool:
        """Put the next column; False if no row has a token for it."""
        if not any(self._waiting):
            return False
        column = [tokens.pop(0) if tokens else self._pad_id for tokens in self._waiting]
        self._streamer.put(torch.tensor(column, device="cpu"))
        return True

    def end(self, is_lost: bool) -> None:
        try:
            while not is_lost and self._put():
                pass
        finally:
            self._streamer.end()


class _TextAdapter:
    """Streams the first row's text to a `TextStreamer`, then the text of each other row on a line of its own.

    It decodes with the streamer's arguments, but not in its `put`, which takes one row and shows parts of stop strings.
    prompts: the ids of each row's prompt that are shown. ends: see `ends_of`. has_form: for each row whether a
    constraint gives it a form.
    """

    def __init__(
        self,
        streamer: TextStreamer,
        prompts: list[list[int]],
        stop_strings: Sequence[str],
        ends: list[list[int]],
        has_form: list[bool],
    ):
        self._streamer, self._prompts, self._has_form = streamer, prompts, has_form
        self._special = special_tokens(streamer.tokenizer) if any(has_form) else {}
        self._texts = [
            RowText(streamer.tokenizer, stop_strings, streamer.decode_kwargs, end, keeps_space=form)
            for end, form in zip(ends, has_form, strict=True)
        ]
        self._prompt_texts = [""] * len(prompts)
        self._waiting = [""] * len(prompts)
        self._ended = [False] * len(prompts)
        self._row = 0  # the row that is being streamed

    def begin(self) -> None:
        if not self._streamer.skip_prompt:
            self._prompt_texts = [text.begin(ids) for text, ids in zip(self._texts, self._prompts, strict=True)]
        self._stream(self._prompt_texts[0])

    def select_rows(self, index: list[int]) -> None:
        self._texts = [self._texts[row].copy() for row in index]
        self._has_form = [self._has_form[row] for row in index]
        self._prompt_texts = [self._prompt_texts[row] for row in index]
        self._waiting = [self._waiting[row] for row in index]
        self._ended = [self._ended[row] for row in index]

    def show(self, chunks: Sequence[StreamChunk]) -> None:
        for chunk in chunks:
            tokens = chunk.tokens
            if chunk.finish_reason == "eos" and self._has_form[chunk.row] and tokens[-1] not in self._special:
                tokens = tokens[:-1]  # no part of the form
            self._waiting[chunk.row] += "".join(map(self._texts[chunk.row].push, tokens))
            if chunk.finish_reason is not None:
                self._end_row(chunk.row)
        self._stream_waiting()

    def _end_row(self, row: int) -> None:
        self._waiting[row] += self._texts[row].flush()
        self._ended[row] = True

    def _stream_waiting(self) -> None:
        while True:
            text, self._waiting[self._row] = self._waiting[self._row], ""
            self._stream(text)
            if not self._ended[self._row] or self._row + 1 == len(self._texts):
                return
            self._row += 1
            self._stream("\n" + self._prompt_texts[self._row])

    def _stream(self, text: str) -> None:
        if text:
            self._streamer.on_finalized_text(text)

    def end(self, is_lost: bool) -> None:
        try:
            for row in [] if is_lost else range(len(self._texts)):
                self._end_row(row)
            if not is_lost:
                self._stream_waiting()
        finally:
            self._streamer.end()  # its cache is empty, because `put` was never called
