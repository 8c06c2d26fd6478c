"""`DecodingLoop`: performs the operations of a strategy's flow, and owns the tokens and the records of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from transformers.utils import ModelOutput

from caches import CacheError, EngineCache
from caches.platform.device_state import Peak, rewinding
from caches.platform.out_of_memory import Exhausted, recovering
from caches.platform.torch_api import write_count
from caches.platform.warn_once import warn_once
from engine.decoding.guided_session import GuidedSession
from engine.decoding.logits_check import LogitsCheck
from engine.decoding.model_session import ModelSession
from engine.decoding.records import Checkpoints, Records
from engine.decoding.run_clock import RunClock
from engine.decoding.stopping import Stopping
from engine.decoding.token_buffer import Tokens
from engine.errors import EngineError
from engine.output.stream_buffer import StreamBuffer
from engine.parallel.ranks import ONE_PROCESS, OneProcess
from engine.request.inputs.encoder import encoder_records
from engine.request.request import Request
from engine.result import Fallback, Generation, Stats, StreamChunk
from strategies import Crop, Emit, Finish, Flow, Forward, Hypothesis, Report, Rows

T = TypeVar("T")
_logger = logging.getLogger("engine")


class DecodingLoop:
    """One run. session: of the model. draft: of the model that proposes tokens, if there is one. clock: of the call.

    tokenizer: None when no text is wanted. legacy: return the cache as tuples. fallbacks: those applied so far.
    ranks: those that run the same loop.
    """

    def __init__(
        self,
        request: Request,
        session: ModelSession | GuidedSession,
        stream_buffer: StreamBuffer,
        clock: RunClock,
        *,
        tokenizer: Any,
        legacy: bool,
        draft: ModelSession | None = None,
        fallbacks: Sequence[Fallback] = (),
        ranks: OneProcess = ONE_PROCESS,
    ):
        self._request, self._session, self.stream_buffer, self.clock = request, session, stream_buffer, clock
        self._draft, self._tokenizer, self._legacy, self._fallbacks = draft, tokenizer, legacy, fallbacks
        self.ranks = ranks
        prompt = request.prompt.ids
        self._device = prompt.device
        self._cached_tokens = int(request.mask[:, : session.cache.total_tokens].sum())
        self._prompt_tokens = int(request.mask.sum()) - self._cached_tokens + request.source_tokens
        self._stopping = Stopping(request, ranks)
        self._last_column = request.lengths.ids
        mask = request.mask[:, request.lengths.first_id :]
        self._tokens = Tokens(prompt, mask, request.lengths.ids, request.pad_id)
        self._logits_check = LogitsCheck(request, self._tokens, session, self._stopping)
        self._best: Callable[[], list[Hypothesis] | None] | None = None  # of a flow that gives its texts at its end
        self._records = Records(request.config, self._device, request.top_logprobs)
        self._finish_fields: dict[str, Any] = {}  # of the `Generation`
        self._checkpoints = Checkpoints(self._records, self._device, request.generator, request.strategy.samples)
        self._new_tokens = 0
        self.given_up = False  # there is no result
        self._peak = Peak(self._device)

    def begin(self, alone: bool = True) -> Flow:
        """The strategy's flow, whose operations `perform` carries out. alone: whether no steps are joined with others:
        then tokens that a constraint determines are fed at once."""
        self.clock.begin()
        self._stopping.begin()
        records = self._records.has_scores
        # Not kept: it refers to this object.
        task = replace(self._request.task, process=self._process, attempt=self._attempt, records_scores=records)
        task = task if alone else replace(task, forced=None)
        return self._request.strategy.flow(task)

    @property
    def done(self) -> bool:
        """Whether all rows have ended."""
        return self._stopping.done

    @property
    def cache_name(self) -> str:
        return self._session.cache.name

    def break_off(self) -> list[StreamChunk]:
        """Prepare the result of a run that stops early: the chunks that were not shown."""
        with _logging_failure("the check which rows the last tokens end has failed"):  # may fail as it did before
            self._read_unread()
        self.discard_unread()
        best, self._best = self._best, None
        texts = None  # where memory is out, the result is the rows of the prompt
        with recovering():
            texts = None if best is None else best()
        if texts is not None:
            self._return_to([text.row for text in texts])
            self._take([replace(text, row=row) for row, text in enumerate(texts)])
        else:
            index = self.stream_buffer.undo_index()
            if index is not None:
                self._return_to(index)
        self.stream_buffer.end_all()
        with _logging_failure("the streamer did not take the last tokens"):
            return self.stream_buffer.release()
        return self.stream_buffer.release()

    def _return_to(self, rows: list[int]) -> None:
        """Select the rows of the result. Where the cache has no memory for that it is emptied."""
        index = torch.tensor(rows, device="cpu")
        with recovering(CacheError, Exhausted) as outcome:
            select = self._row_selection(index)
            self._session.select_rows(index)
        if (reason := outcome.failure) is not None:
            _logger.warning("the cache is emptied, because its rows could not follow those of the result: %s", reason)
            self._session.discard_cache()  # this makes room
            select = self._row_selection(index)
        select()

    # Together with other runs: see `engine.serving`.

    @property
    def rows(self) -> int:
        """Rows that the model computes, once every prompt has all its rows."""
        return self._request.rows

    @property
    def fed(self) -> int:
        """Columns given to the model so far."""
        return self._session.fed

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on the device that computes."""
        return self._session.cache.device_bytes

    @property
    def cache_bytes_by_place(self) -> dict[str, int]:
        """Bytes of the cache by where they are: "device", "host", "disk", ..."""
        cache = self._session.cache
        return getattr(cache, "bytes_by_place", {"device": cache.device_bytes})

    @property
    def is_routed(self) -> bool:
        """Whether linear layers are routed: see `ForwardOptions`."""
        return self._session.executor.routed

    @property
    def is_compiled(self) -> bool:
        """Whether compiled steps are used."""
        return self._session.executor.is_compiled

    def why_alone(self, forward: Forward) -> str | None:
        """Why this forward cannot be computed together with those of other runs; None where it can."""
        if forward.model != "main" or forward.tokens.shape[1] > 1:
            return "it feeds several tokens, or feeds them to a draft"
        if self._request.output_flags:
            return "it returns what layers record"
        return self._session.why_alone

    def prepare(self, forward: Forward) -> tuple[EngineCache, torch.Tensor]:
        """Before a joined step: the cache, and the tokens [rows, 1] that are fed to it."""
        self._session.attempt(lambda: self._tokens.reserve(1))
        tokens = self._session.prepare(forward.tokens)
        return self._session.cache, tokens

    def abort_joined(self) -> None:
        """See `ModelSession`."""
        self._session.abort_joined()

    def read_piece(self, forward: Forward, max_tokens: int) -> Forward | None:
        """Read at most `max_tokens` of the prompt: what is left of it. None where `forward` is to be performed."""
        is_plain = forward.model == "main" and not (forward.hidden or forward.all_logits)
        if not is_plain or forward.tokens.shape[1] <= 1 or self.clock.has_first_token:
            return None
        remaining = self._session.read_piece(forward.tokens, max_tokens)
        return None if remaining is None else forward._replace(tokens=remaining)

    def park(self) -> None:
        """Free the memory of the cache until the next forward."""
        self._session.park()

    def perform(self, operation: Emit | Crop | Rows | Report | Finish) -> tuple[Any, list[StreamChunk]]:
        """Carry out one operation of the flow, not a `Forward`: its result, and what there is to show."""
        match operation:
            case Emit(tokens, scores):
                chunks = self._emit(tokens, scores)
                return self._tokens.ids, chunks
            case Crop(tokens, "main"):
                self._session.commit(rejected=tokens)
                self._records.reject_logits(tokens)
                return None, []
            case Crop(tokens):
                assert self._draft is not None
                self._draft.crop(tokens)
                return None, []
            case Rows(index):
                chunks = self.read_all()
                self._logits_check.before_rows()
                self._reorder(index.cpu())
                return None, chunks
            case Report(final, best):
                self._best = best
                if self.stream_buffer.watched:
                    self.stream_buffer.hold(final(), self._stopping.is_end, self._stopping.why)
                return None, self.stream_buffer.release()
            case Finish():
                return None, self._finish(operation)

    def forward(self, forward: Forward, computed: ModelOutput | None = None) -> Any:
        """Carry out a `Forward`: its result. computed: the outputs, where it was part of a joined step."""
        fed: int | None = self._session.fed
        if fed and not self.clock.has_first_token:  # these tokens are the first, though a search emits them at its end
            self.clock.first_token()
        tokens = forward.tokens.shape[1] if forward.all_logits else 1
        session = self._session if forward.model == "main" else self._draft
        assert session is not None  # a strategy that needs one was given one
        if forward.model != "main":
            fed = None
        elif computed is None and not self._tokens.has_room(tokens):
            self._session.attempt(lambda: self._tokens.reserve(tokens))  # here it can recover when memory is out
        outputs, states = session.forward(forward.tokens, forward.hidden, forward.all_logits, computed)
        self._peak.record()
        logits = session.attempt(lambda: outputs.logits[:, -tokens:].to(self._device, torch.float32, copy=True))
        self._logits_check.record(logits, outputs.logits.dtype, fed)
        if forward.model == "main":
            self._records.add_forward(outputs, tokens)
        logits = logits if forward.all_logits else logits[:, 0]
        return (logits, states) if forward.hidden else logits

    def _process(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `Task`: the scores as they are without processors. Not repeated where one has written into them."""
        if not self._request.processing.names:
            return scores
        writes = None if scores.is_inference() else write_count(scores)

        def is_unchanged() -> bool:
            return writes is not None and write_count(scores) == writes

        # Processors draw from torch's global generator, not from that of the call's seed.
        work = self._rewinding(lambda: self._logits_check.process(ids, scores), None)
        return self._session.attempt(work, is_unchanged)

    def _attempt(self, work: Callable[[], T]) -> T:
        """See `Task`."""
        return self._session.attempt(self._rewinding(work, self._request.generator))

    def _rewinding(self, work: Callable[[], T], generator: torch.Generator | None) -> Callable[[], T]:
        """`work`, which draws the same random numbers when it is repeated."""
        if not (self._request.strategy.samples or self._request.processing.names):
            return work
        return rewinding(work, self._device, generator)

    def _emit(self, tokens: torch.Tensor, scores: tuple[torch.Tensor, ...]) -> list[StreamChunk]:
        for column in range(tokens.shape[1]):
            if self._stopping.done:
                break
            self._logits_check.before_write()
            self._tokens.write(tokens[:, column])
            if self._records.has_scores:
                self._records.add_scores(scores[column : column + 1])
            if self._tokens.late:
                self._checkpoints.add()
            # The first token is waited for, so that its time is right, and no column comes after the last.
            at_once = not self._tokens.late or not self.clock.has_first_token
            at_once = at_once or self._tokens.written == self._last_column
            while self._tokens.unread > (0 if at_once else 1):
                self._read_column()
        return self.stream_buffer.release()

    def _finish(self, end: Finish) -> list[StreamChunk]:
        """Take the tokens of all rows from a flow that ends its texts by itself."""
        rows = zip(end.tokens.tolist(), end.lengths, strict=True)
        # A search may find fewer texts than are wanted: the others are empty and have no finish reason.
        texts = [Hypothesis(tokens[:length], length > 0, row) for row, (tokens, length) in enumerate(rows)]
        self._best = lambda: texts
        self._take(texts)
        if self._records.has_scores and any(end.lengths) and not end.scores:
            warn_once(
                f"{self._request.strategy.name} hands no scores to Finish: with output_scores=True there are none"
            )
        self._records.add_scores(end.scores)
        self._finish_fields = {"sequences_scores": end.sequences_scores, "beam_indices": end.beam_indices}
        return self.stream_buffer.release()

    def _take(self, texts: list[Hypothesis]) -> None:
        """Write these texts, one for each row, after the prompt: the run ends with them."""
        lengths = [len(text.tokens) for text in texts]
        padding = [[self._request.pad_id] * (max(lengths) - length) for length in lengths]
        tokens = [text.tokens + fill for text, fill in zip(texts, padding, strict=True)]
        self._tokens.write_rows(torch.tensor(tokens, dtype=torch.long, device=self._device), lengths)
        self._best = None
        self._new_tokens = sum(lengths)
        self.stream_buffer.hold(texts, self._stopping.is_end, self._stopping.why)
        self._stopping.reasons = self.stream_buffer.reasons

    def read_all(self) -> list[StreamChunk]:
        self._read_unread()
        return self.stream_buffer.release()

    def _read_unread(self) -> None:
        while self._tokens.unread and not self._stopping.done:
            self._read_column()

    def _read_column(self) -> None:
        """Read the first unread column, and find the rows that end with it."""
        running = self._stopping.running
        self._logits_check.before_read()
        tokens = self._tokens.next()
        self.ranks.note(tokens)
        if self._tokens.late:
            self._checkpoints.read()
        if not self.clock.has_first_token:
            self.clock.first_token()
        self._new_tokens += sum(running)
        ends = self._stopping.ends(tokens, lambda: self._tokens.ids[:, : self._tokens.read])
        logprobs = self._records.logprobs(self._tokens.read - self._tokens.prompt - 1, tokens)
        self.stream_buffer.push(tokens, running, ends, logprobs)
        try:
            self._stopping.check(self._tokens.read, ends, self.stream_buffer.texts, self._read_by_criteria)
        finally:
            for row, reason in enumerate(self._stopping.reasons):
                if reason is not None and running[row]:
                    self._tokens.end_row(row)
                    self.stream_buffer.end(row, reason)

    def discard_unread(self) -> None:
        """Return to the state after the column read last."""
        if self._tokens.unread:
            self._tokens.discard_unread()
            self._checkpoints.roll_back()

    def _read_by_criteria(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        return self._tokens.ids[:, : self._tokens.read], self._records.scores(self._tokens.unread)

    def _reorder(self, index: torch.Tensor) -> None:
        select = self._row_selection(index)
        self._session.select_rows(index)
        select()
        # Failures below end the run, and its partial result needs neither of these.
        if self._draft is not None:
            self._draft.select_rows(index)
        self._request.processing.select_rows(index)

    def _row_selection(self, index: torch.Tensor) -> Callable[[], None]:
        """A function that makes row i row `index[i]` in all but the sessions, and cannot fail."""
        select_tokens = self._tokens.row_selection(index)
        select_records = self._records.row_selection(index, len(self._tokens.ids))
        best = None if self._best is None else _followed(self._best, index.tolist())

        def select() -> None:
            select_tokens()
            self._best = best
            select_records()
            self._stopping.select_rows(index)
            self.stream_buffer.select_rows(index)

        return select

    def close(self) -> None:
        if self.clock.has_ended:
            return
        self.discard_unread()
        if self._request.drafts.verifications:  # the text may end before the tokens that were verified
            self._records.keep_logits(self._tokens.written - self._tokens.prompt)
        self._draft = None
        try:
            self._session.close(self._tokens.log())
        finally:
            self.clock.end()
            with _logging_failure("the streamer could not be ended"):  # it has ended before, unless the run was stopped
                self.stream_buffer.close()

    def give_up(self) -> None:
        """End without a result, because texts and rows may not fit together. The cache is emptied."""
        self.given_up = True
        if not self.clock.has_ended:
            self.clock.end()
            self._session.discard_cache()
            with suppress(Exception):  # the streamer
                self.stream_buffer.close()

    def result(self) -> Generation:
        """What was generated. Ends the run. Raises `EngineError` after `give_up`."""
        if self.given_up:
            raise EngineError(
                "the run has no result: it was interrupted once more while its partial result was made, so its texts "
                "and its rows may not fit together"
            )
        self.close()
        records = self._records.fields()
        if "encoder_outputs" not in self._request.prompt.model_kwargs:  # GPT-2 returns an empty tuple of these
            records.pop("cross_attentions", None)
        text = self._text()
        return Generation(
            sequences=self._tokens.ids.contiguous(),
            tokens=self._tokens.new(),
            text=text,
            parsed=self._parsed(text),
            logprobs=None if self._request.top_logprobs is None else self.stream_buffer.logprobs,
            finish_reasons=list(self._stopping.reasons),
            stats=self._stats(),
            cache=self._session.cache.handle,
            legacy=self._legacy,
            **self._finish_fields,
            **records,
            **encoder_records(self._request.prompt.model_kwargs, self._request.output_flags),
        )

    def _text(self) -> list[str] | None:
        if self._tokenizer is None:
            return None
        texts, decode = self.stream_buffer.flushed(), self._tokenizer.decode
        if texts is not None:
            return texts
        return [decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False) for row in self._tokens.new()]

    def _parsed(self, text: list[str] | None) -> list[Any] | None:
        """What texts mean that a constraint has given a form; None where none has."""
        if self._request.grammar is None or text is None:
            return None
        return self._request.grammar.parsed(text, [reason == "eos" for reason in self._stopping.reasons])

    def _stats(self) -> Stats:
        drafts = self._request.drafts
        return Stats(
            cache=self.cache_name,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            new_tokens=self._new_tokens,
            **self.clock.rates(self._prompt_tokens, self._new_tokens - len(self._tokens.ids)),
            total_s=self.clock.total_s,
            cache_bytes=self._session.cache.bytes,
            peak_bytes=self._peak.bytes,
            drafted_tokens=drafts.drafted if drafts.verifications else None,
            accepted_tokens=drafts.accepted if drafts.verifications else None,
            verifications=drafts.verifications or None,
            fallbacks=tuple(self._fallbacks),
            linears=self._session.executor.linears,
            compiled=self._session.executor.compiled,
        )


def _followed(best: Callable[[], list[Hypothesis] | None], index: list[int]) -> Callable[[], list[Hypothesis] | None]:
    """`best` after row i became row `index[i]`; None where a text has lost the row that goes on from it."""

    def texts() -> list[Hypothesis] | None:
        hypotheses = best()
        if hypotheses is None or not all(text.row in index for text in hypotheses):
            return None
        return [replace(text, row=index.index(text.row)) for text in hypotheses]

    return texts


@contextmanager
def _logging_failure(warning: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        _logger.warning(warning, exc_info=True)
