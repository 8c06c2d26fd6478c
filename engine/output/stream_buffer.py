"""Buffers new tokens and text per row, and passes them on as chunks for an iterator and to a streamer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from engine.errors import EngineError
from engine.output.detokenizer import RowText
from engine.output.hf_streamers import StreamerAdapter
from engine.output.stop_strings import ends_of
from engine.result import StreamChunk, TokenLogprob
from strategies import Hypothesis

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class _Row:
    """One row. prompt: [columns]. text: None without a tokenizer. shown: the number of `tokens` in earlier chunks.
    delta: the text that is in no chunk yet. reason: the finish reason; None while the row runs. logprobs: of `tokens`;
    empty where none are wanted. has_form: whether a constraint gives the text a form.
    """

    prompt: torch.Tensor
    text: RowText | None
    has_form: bool = False
    tokens: list[int] = field(default_factory=list)
    shown: int = 0
    delta: str = ""
    reason: str | None = None
    has_ended: bool = False  # its last chunk was made
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, tokens: list[int], has_end: bool) -> None:
        """has_end: whether the last of the tokens ends the text. It is no part of a form, special or not."""
        self.tokens += tokens
        if self.text is not None:
            self.delta += "".join(map(self.text.push, tokens[:-1] if has_end and self.has_form else tokens))

    def flush(self) -> None:
        """The row gets no more tokens: withheld text is final."""
        if self.text is not None:
            self.delta += self.text.flush()

    def copy(self) -> _Row:
        text = None if self.text is None else self.text.copy()
        tokens, logprobs = list(self.tokens), list(self.logprobs)
        return replace(self, text=text, tokens=tokens, logprobs=logprobs)


class StreamBuffer:
    """Tokens and text of all rows of a run.

    prompts: [rows, columns]. tokenizer: None if no text is wanted. stops: the stop strings, and the first column in
    which they may begin. adapter: of the streamer, if there is one. has_form:
    for each row whether a constraint gives it a form, to which its first space belongs. watched: whether chunks or the
    streamer need tokens before the end of the run.
    """

    def __init__(
        self,
        prompts: torch.Tensor,
        tokenizer: PreTrainedTokenizerBase,
        stops: tuple[tuple[str, ...], int],
        adapter: StreamerAdapter | None,
        has_form: list[bool],
        watched: bool,
    ):
        self.watched = watched or adapter is not None
        self._rows: list[_Row] = []
        stop_strings, begin = stops
        for prompt, prompt_end, form in zip(prompts, ends_of(prompts[:, begin:], stop_strings), has_form, strict=True):
            text = None
            if tokenizer is not None:
                text = RowText(tokenizer, stop_strings, prompt=prompt_end, keeps_space=form)
            self._rows.append(_Row(prompt, text, form))
        self._prompts, self._holds = len(prompts), False
        self._moved: list[int] | None = None  # the row's index when tokens were last pushed
        self._chunks: list[StreamChunk] = []
        self._adapter, self._is_lost = adapter, False  # a streamer that raised only gets `end`

    def begin(self) -> None:
        self._call_adapter(lambda adapter: adapter.begin())

    @property
    def texts(self) -> list[RowText] | None:
        texts = [row.text for row in self._rows if row.text is not None]
        return texts or None

    @property
    def logprobs(self) -> list[list[TokenLogprob]]:
        return [row.logprobs for row in self._rows]

    @property
    def reasons(self) -> list[str | None]:
        return [row.reason for row in self._rows]

    # Rows

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes row `index[i]`, on the CPU. Applied when tokens are pushed."""
        rows = index.tolist()
        self._moved = rows if self._moved is None else [self._moved[row] for row in rows]

    def undo_index(self) -> list[int] | None:
        """The row index that undoes all `select_rows` since the last `push`.

        None if no row was moved, or if a row was lost and cannot be restored.
        """
        if self._moved is None:
            return None
        all_rows = range(len(self._rows))
        return [self._moved.index(row) for row in all_rows] if set(all_rows) <= set(self._moved) else None

    def _apply_reorder(self) -> None:
        if self._moved is not None:
            self._reorder(self._moved)
            self._moved = None

    def _reorder(self, index: list[int]) -> None:
        if index == list(range(len(self._rows))):
            return
        self._rows = [self._rows[row].copy() for row in index]
        if self._adapter is not None:
            self._adapter.select_rows(index)

    # Tokens

    def push(
        self,
        tokens: list[int],
        running: list[bool],
        ends: list[bool],
        logprobs: list[TokenLogprob] | None = None,
    ) -> None:
        """Add a token to each running row. tokens, running, ends (whether the token ends the row), logprobs: one entry
        per row."""
        self._apply_reorder()
        for number, (row, token, runs) in enumerate(zip(self._rows, tokens, running, strict=True)):
            if runs:
                row.add([token], ends[number])
                row.logprobs += [] if logprobs is None else [logprobs[number]]

    def hold(
        self,
        texts: list[Hypothesis],
        is_end: Callable[[torch.Tensor, int], bool],
        reason_of: Callable[[torch.Tensor, bool, RowText | None], str],
    ) -> None:
        """Set the texts that the run will return, as far as a search knows them: one row per text from now on.

        is_end: (ids of an ended text with its prompt, the number of the prompt) -> whether the last one is an end
        token. reason_of: (the ids, that, its text) -> finish reason. Raises `EngineError` if a text does not begin with
        the tokens that its row has shown.
        """
        if not self._holds:  # until now there was a row per beam
            came_from = range(len(self._rows)) if self._moved is None else self._moved
            self._reorder([came_from[text.row] for text in texts])
            self._holds = True
        self._moved = None
        for number, (row, text) in enumerate(zip(self._rows, texts, strict=True)):
            pushed = len(row.tokens)
            if text.tokens[:pushed] != row.tokens:
                raise EngineError(
                    f"row {number} was shown with tokens {row.tokens}, but its text begins with {text.tokens[:pushed]}"
                    ": a strategy may only show what is final"
                )
            if not text.ended or row.reason is not None:
                row.add(text.tokens[pushed:], has_end=False)
                continue
            ids = torch.cat([row.prompt, row.prompt.new_tensor(text.tokens)])
            has_end = is_end(ids, number * self._prompts // len(texts))
            row.add(text.tokens[pushed:], has_end)
            row.flush()
            row.reason = reason_of(ids, has_end, row.text)

    def end(self, number: int, reason: str) -> None:
        """End row `number` with a finish reason."""
        self._rows[number].flush()
        self._rows[number].reason = reason

    def end_all(self) -> None:
        """End all rows."""
        self._apply_reorder()
        for row in self._rows:
            row.flush()

    def flushed(self) -> list[str] | None:
        """End all rows and return their complete texts; None without a tokenizer."""
        self.end_all()
        texts = self.texts
        return None if texts is None else [text.text for text in texts]

    def release(self) -> list[StreamChunk]:
        """Chunks with what is new since the last call; none where `watched` is False.

        The streamer gets them last, because it may raise.
        """
        if not self.watched:
            return []
        new_chunks = []
        for number, row in enumerate(self._rows):
            ends = row.reason is not None and not row.has_ended
            if row.shown < len(row.tokens) or row.delta or ends:
                text = None if row.text is None else row.delta
                logprobs = tuple(row.logprobs[row.shown :])
                new_chunks.append(StreamChunk(number, tuple(row.tokens[row.shown :]), text, row.reason, logprobs))
                row.shown, row.delta, row.has_ended = len(row.tokens), "", row.reason is not None
        self._chunks += new_chunks
        self._call_adapter(lambda adapter: adapter.show(new_chunks))
        chunks, self._chunks = self._chunks, []
        return chunks

    def close(self) -> None:
        """Call the streamer's `end`, in the first call only."""
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            adapter.end(self._is_lost)

    def _call_adapter(self, call: Callable[[StreamerAdapter], None]) -> None:
        if self._adapter is not None and not self._is_lost:
            self._is_lost = True
            call(self._adapter)
            self._is_lost = False
