"""`Transcript`: the texts of a run: written column by column, read on the host, ended, recorded and shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from caches.platform.out_of_memory import recovering
from caches.platform.warn_once import warn_once
from engine.decoding.logits_check import LogitsCheck
from engine.decoding.model_session import ModelSession
from engine.decoding.records import Checkpoints, Records
from engine.decoding.run_clock import RunClock
from engine.decoding.stopping import Stopping
from engine.decoding.token_buffer import Tokens
from engine.output.stream_buffer import StreamBuffer
from engine.parallel.ranks import OneProcess
from engine.request.request import Request
from engine.result import StreamChunk
from strategies import Finish, Hypothesis


class Transcript:
    """session: what is rolled back where no token can be chosen. See `DecodingLoop`."""

    def __init__(
        self,
        request: Request,
        session: ModelSession,
        stream_buffer: StreamBuffer,
        clock: RunClock,
        ranks: OneProcess,
    ):
        self._request, self.stream_buffer, self._clock, self._ranks = request, stream_buffer, clock, ranks
        prompt, lengths = request.prompt.ids, request.lengths
        self.tokens = Tokens(prompt, request.mask[:, lengths.first_id :], lengths.ids, request.pad_id)
        self.stopping = Stopping(request, ranks)
        self.logits_check = LogitsCheck(request, self.tokens, session, self.stopping)
        self.records = Records(request.config, prompt.device, request.top_logprobs)
        self._checkpoints = Checkpoints(self.records, prompt.device, request.generator, request.strategy.samples)
        self._best: Callable[[], list[Hypothesis] | None] | None = None  # of a flow that gives its texts at its end
        self.new_tokens = 0
        self.finish_fields: dict[str, Any] = {}  # of the `Generation`

    def emit(self, tokens: torch.Tensor, scores: tuple[torch.Tensor, ...]) -> list[StreamChunk]:
        for column in range(tokens.shape[1]):
            if self.stopping.done:
                break
            self.logits_check.before_write()
            self.tokens.write(tokens[:, column])
            if self.records.has_scores:
                self.records.add_scores(scores[column : column + 1])
            if self.tokens.late:
                self._checkpoints.add()
            # The first token is waited for, so that its time is right, and no column comes after the last.
            at_once = not self.tokens.late or not self._clock.has_first_token
            at_once = at_once or self.tokens.written == self._request.lengths.ids
            while self.tokens.unread > (0 if at_once else 1):
                self._read_column()
        return self.stream_buffer.release()

    def finish(self, end: Finish) -> list[StreamChunk]:
        """Take the tokens of all rows from a flow that ends its texts by itself."""
        rows = zip(end.tokens.tolist(), end.lengths, strict=True)
        # A search may find fewer texts than are wanted: the others are empty and have no finish reason.
        texts = [Hypothesis(tokens[:length], length > 0, row) for row, (tokens, length) in enumerate(rows)]
        self._best = lambda: texts
        self.take(texts)
        if self.records.has_scores and any(end.lengths) and not end.scores:
            warn_once(
                f"{self._request.strategy.name} hands no scores to Finish: with output_scores=True there are none"
            )
        self.records.add_scores(end.scores)
        self.finish_fields = {"sequences_scores": end.sequences_scores, "beam_indices": end.beam_indices}
        return self.stream_buffer.release()

    def take(self, texts: list[Hypothesis]) -> None:
        """Write these texts, one for each row, after the prompt: the run ends with them."""
        lengths = [len(text.tokens) for text in texts]
        padding = [[self._request.pad_id] * (max(lengths) - length) for length in lengths]
        tokens = [text.tokens + fill for text, fill in zip(texts, padding, strict=True)]
        self.tokens.write_rows(torch.tensor(tokens, dtype=torch.long, device=self.tokens.ids.device), lengths)
        self._best = None
        self.new_tokens = sum(lengths)
        self.stream_buffer.hold(texts, self.stopping.is_end, self.stopping.why)
        self.stopping.reasons = self.stream_buffer.reasons

    def report(
        self, final: Callable[[], list[Hypothesis]], best: Callable[[], list[Hypothesis] | None]
    ) -> list[StreamChunk]:
        """Show what of a search is final, and have what would be its result if it ended now."""
        self._best = best
        if self.stream_buffer.watched:
            self.stream_buffer.hold(final(), self.stopping.is_end, self.stopping.why)
        return self.stream_buffer.release()

    def read_all(self) -> list[StreamChunk]:
        self.read_unread()
        return self.stream_buffer.release()

    def read_unread(self) -> None:
        while self.tokens.unread and not self.stopping.done:
            self._read_column()

    def _read_column(self) -> None:
        """Read the first unread column, and find the rows that end with it."""
        running = self.stopping.running
        self.logits_check.before_read()
        tokens = self.tokens.next()
        self._ranks.note(tokens)
        if self.tokens.late:
            self._checkpoints.read()
        if not self._clock.has_first_token:
            self._clock.first_token()
        self.new_tokens += sum(running)
        ends = self.stopping.ends(tokens, lambda: self.tokens.ids[:, : self.tokens.read])
        logprobs = self.records.logprobs(self.tokens.read - self.tokens.prompt - 1, tokens)
        self.stream_buffer.push(tokens, running, ends, logprobs)
        try:
            self.stopping.check(self.tokens.read, ends, self.stream_buffer.texts, self._read_by_criteria)
        finally:
            for row, reason in enumerate(self.stopping.reasons):
                if reason is not None and running[row]:
                    self.tokens.end_row(row)
                    self.stream_buffer.end(row, reason)

    def final_rows(self) -> tuple[list[int] | None, list[Hypothesis] | None]:
        """Of a run that stops early: the rows that its result has; None for those there are. And their texts, for
        `take`, where the flow has any."""
        best, self._best = self._best, None
        texts = None  # where memory is out, the result is the rows of the prompt
        with recovering():
            texts = None if best is None else best()
        if texts is None:
            return self.stream_buffer.undo_index(), None
        return [text.row for text in texts], [replace(text, row=row) for row, text in enumerate(texts)]

    def discard_unread(self) -> None:
        """Return to the state after the column read last."""
        if self.tokens.unread:
            self.tokens.discard_unread()
            self._checkpoints.roll_back()

    def _read_by_criteria(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        return self.tokens.ids[:, : self.tokens.read], self.records.scores(self.tokens.unread)

    def row_selection(self, index: torch.Tensor) -> Callable[[], None]:
        """A function that makes row i row `index[i]` in all but the sessions, and cannot fail."""
        select_tokens = self.tokens.row_selection(index)
        select_records = self.records.row_selection(index, len(self.tokens.ids))
        best = None if self._best is None else _followed(self._best, index.tolist())

        def select() -> None:
            select_tokens()
            self._best = best
            select_records()
            self.stopping.select_rows(index)
            self.stream_buffer.select_rows(index)

        return select

    def decoded(self, tokenizer: Any) -> list[str] | None:
        """The new text of every row; None without a tokenizer."""
        if tokenizer is None:
            return None
        texts, decode = self.stream_buffer.flushed(), tokenizer.decode
        if texts is not None:
            return texts
        return [decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False) for row in self.tokens.new()]

    def parsed(self, text: list[str] | None) -> list[object] | None:
        """What texts mean that a constraint has given a form; None where none has."""
        if self._request.grammar is None or text is None:
            return None
        return self._request.grammar.parsed(text, [reason == "eos" for reason in self.stopping.reasons])


def _followed(best: Callable[[], list[Hypothesis] | None], index: list[int]) -> Callable[[], list[Hypothesis] | None]:
    """`best` after row i became row `index[i]`; None where a text has lost the row that goes on from it."""

    def texts() -> list[Hypothesis] | None:
        hypotheses = best()
        if hypotheses is None or not all(text.row in index for text in hypotheses):
            return None
        return [replace(text, row=index.index(text.row)) for text in hypotheses]

    return texts
