"""`DecodingLoop`: performs the operations of a strategy's flow: forwards of the model, and texts in a transcript."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import torch
from transformers.utils import ModelOutput

from caches import CacheError
from caches.platform.device_state import Peak, rewinding
from caches.platform.out_of_memory import Exhausted, recovering
from caches.platform.torch_api import write_count
from engine.decoding.model_session import ModelSession
from engine.decoding.run_clock import RunClock
from engine.decoding.transcript import Transcript
from engine.errors import EngineError
from engine.output.stream_buffer import StreamBuffer
from engine.parallel.ranks import ONE_PROCESS, OneProcess
from engine.request.inputs.encoder import encoder_records
from engine.request.request import Request
from engine.result import Fallback, Generation, Stats, StreamChunk
from strategies import Crop, Emit, Finish, Flow, Forward, Report, Rows

T = TypeVar("T")
ForwardResult: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]
"""Logits [rows, (tokens,) vocabulary], with the last hidden states where they were asked for."""
_logger = logging.getLogger("engine")


class DecodingLoop:
    """One run. session: of the model. draft: of the model that proposes tokens, if there is one. clock: of the call.

    tokenizer: None when no text is wanted. legacy: return the cache as tuples. fallbacks: those applied so far.
    ranks: those that run the same loop.
    """

    def __init__(
        self,
        request: Request,
        session: ModelSession,
        stream_buffer: StreamBuffer,
        clock: RunClock,
        *,
        tokenizer: Any,
        legacy: bool,
        draft: ModelSession | None = None,
        fallbacks: Sequence[Fallback] = (),
        ranks: OneProcess = ONE_PROCESS,
    ):
        self.request, self.session, self.stream_buffer, self.clock = request, session, stream_buffer, clock
        self._draft, self._tokenizer, self._legacy, self._fallbacks = draft, tokenizer, legacy, fallbacks
        self.ranks = ranks
        self._device = request.prompt.ids.device
        self.transcript = Transcript(request, session, stream_buffer, clock, ranks)
        self._cached_tokens = int(request.mask[:, : session.cache.total_tokens].sum())
        self._prompt_tokens = int(request.mask.sum()) - self._cached_tokens + request.source_tokens
        self.given_up = False  # there is no result
        self._peak = Peak(self._device)

    def begin(self, alone: bool = True) -> Flow:
        """The strategy's flow, whose operations `perform` carries out. alone: whether no steps are joined with others:
        then tokens that a constraint determines are fed at once."""
        self.clock.begin()
        self.transcript.stopping.begin()
        records = self.transcript.records.has_scores
        # Not kept: it refers to this object.
        task = replace(self.request.task, process=self._process, attempt=self._attempt, records_scores=records)
        task = task if alone else replace(task, forced=None)
        return self.request.strategy.flow(task)

    @property
    def done(self) -> bool:
        """Whether all rows have ended."""
        return self.transcript.stopping.done

    @property
    def cache_name(self) -> str:
        return self.session.cache.name

    def break_off(self) -> list[StreamChunk]:
        """Prepare the result of a run that stops early: the chunks that were not shown."""
        with _logging_failure("the check which rows the last tokens end has failed"):  # may fail as it did before
            self.transcript.read_unread()
        self.transcript.discard_unread()
        rows, texts = self.transcript.final_rows()
        if rows is not None:
            self._return_to(rows)
        if texts is not None:
            self.transcript.take(texts)
        self.stream_buffer.end_all()
        with _logging_failure("the streamer did not take the last tokens"):
            return self.stream_buffer.release()
        return self.stream_buffer.release()

    def _return_to(self, rows: list[int]) -> None:
        """Select the rows of the result. Where the cache has no memory for that it is emptied."""
        index = torch.tensor(rows, device="cpu")
        with recovering(CacheError, Exhausted) as outcome:
            select = self.transcript.row_selection(index)
            self.session.select_rows(index)
        if (reason := outcome.failure) is not None:
            _logger.warning("the cache is emptied, because its rows could not follow those of the result: %s", reason)
            self.session.discard_cache()  # this makes room
            select = self.transcript.row_selection(index)
        select()

    def perform(self, operation: Emit | Crop | Rows | Report | Finish) -> tuple[torch.Tensor | None, list[StreamChunk]]:
        """Carry out one operation of the flow, not a `Forward`: its result, and what there is to show."""
        match operation:
            case Emit(tokens, scores):
                chunks = self.transcript.emit(tokens, scores)
                return self.transcript.tokens.ids, chunks
            case Crop(tokens, "main"):
                self.session.commit(rejected=tokens)
                self.transcript.records.reject_logits(tokens)
                return None, []
            case Crop(tokens):
                assert self._draft is not None
                self._draft.crop(tokens)
                return None, []
            case Rows(index):
                chunks = self.transcript.read_all()
                self.transcript.logits_check.before_rows()
                self._reorder(index.cpu())
                return None, chunks
            case Report(final, best):
                return None, self.transcript.report(final, best)
            case Finish():
                return None, self.transcript.finish(operation)

    def read_piece(self, forward: Forward, max_tokens: int) -> Forward | None:
        """Read at most `max_tokens` of the prompt: what is left of it. None where `forward` is to be performed."""
        is_plain = forward.model == "main" and not (forward.hidden or forward.all_logits)
        if not is_plain or forward.tokens.shape[1] <= 1 or self.clock.has_first_token:
            return None
        remaining = self.session.read_piece(forward.tokens, max_tokens)
        return None if remaining is None else forward._replace(tokens=remaining)

    def forward(self, forward: Forward, computed: ModelOutput | None = None) -> ForwardResult:
        """Carry out a `Forward`: its result. computed: the outputs, where it was part of a joined step."""
        fed: int | None = self.session.fed
        if fed and not self.clock.has_first_token:  # these tokens are the first, though a search emits them at its end
            self.clock.first_token()
        tokens = forward.tokens.shape[1] if forward.all_logits else 1
        session = self.session if forward.model == "main" else self._draft
        assert session is not None  # a strategy that needs one was given one
        if forward.model != "main":
            fed = None
        elif computed is None and not self.transcript.tokens.has_room(tokens):  # here it can recover when memory is out
            self.session.attempt(lambda: self.transcript.tokens.reserve(tokens))
        outputs, states = session.forward(forward.tokens, forward.hidden, forward.all_logits, computed)
        self._peak.record()
        logits = session.attempt(lambda: outputs.logits[:, -tokens:].to(self._device, torch.float32, copy=True))
        self.transcript.logits_check.record(logits, outputs.logits.dtype, fed)
        if forward.model == "main":
            self.transcript.records.add_forward(outputs, tokens)
        logits = logits if forward.all_logits else logits[:, 0]
        return (logits, states) if forward.hidden else logits

    def _process(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `Task`: the scores as they are without processors. Not repeated where one has written into them."""
        if not self.request.processing.names:
            return scores
        writes = None if scores.is_inference() else write_count(scores)

        def is_unchanged() -> bool:
            return writes is not None and write_count(scores) == writes

        # Processors draw from torch's global generator, not from that of the call's seed.
        work = self._rewinding(lambda: self.transcript.logits_check.process(ids, scores), None)
        return self.session.attempt(work, is_unchanged)

    def _attempt(self, work: Callable[[], T]) -> T:
        """See `Task`."""
        return self.session.attempt(self._rewinding(work, self.request.generator))

    def _rewinding(self, work: Callable[[], T], generator: torch.Generator | None) -> Callable[[], T]:
        """`work`, which draws the same random numbers when it is repeated."""
        if not (self.request.strategy.samples or self.request.processing.names):
            return work
        return rewinding(work, self._device, generator)

    def _reorder(self, index: torch.Tensor) -> None:
        select = self.transcript.row_selection(index)
        self.session.select_rows(index)
        select()
        # Failures below end the run, and its partial result needs neither of these.
        if self._draft is not None:
            self._draft.select_rows(index)
        self.request.processing.select_rows(index)

    def close(self) -> None:
        if self.clock.has_ended:
            return
        self.transcript.discard_unread()
        if self.request.drafts.verifications:  # the text may end before the tokens that were verified
            self.transcript.records.keep_logits(self.transcript.tokens.written - self.transcript.tokens.prompt)
        self._draft = None
        try:
            self.session.close(self.transcript.tokens.log())
        finally:
            self.clock.end()
            with _logging_failure("the streamer could not be ended"):  # it has ended before, unless the run was stopped
                self.stream_buffer.close()

    def give_up(self) -> None:
        """End without a result, because texts and rows may not fit together. The cache is emptied."""
        self.given_up = True
        if not self.clock.has_ended:
            self.clock.end()
            self.session.discard_cache()
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
        records = self.transcript.records.fields()
        if "encoder_outputs" not in self.request.prompt.model_kwargs:  # GPT-2 returns an empty tuple of these
            records.pop("cross_attentions", None)
        text = self.transcript.decoded(self._tokenizer)
        return Generation(
            sequences=self.transcript.tokens.ids.contiguous(),
            tokens=self.transcript.tokens.new(),
            text=text,
            parsed=self.transcript.parsed(text),
            logprobs=None if self.request.top_logprobs is None else self.stream_buffer.logprobs,
            finish_reasons=list(self.transcript.stopping.reasons),
            stats=self._stats(),
            cache=self.session.cache.handle,
            legacy=self._legacy,
            **self.transcript.finish_fields,
            **records,
            **encoder_records(self.request.prompt.model_kwargs, self.request.output_flags),
        )

    def _stats(self) -> Stats:
        drafts = self.request.drafts
        return Stats(
            cache=self.cache_name,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            new_tokens=self.transcript.new_tokens,
            **self.clock.rates(self._prompt_tokens, self.transcript.new_tokens - len(self.transcript.tokens.ids)),
            total_s=self.clock.total_s,
            cache_bytes=self.session.cache.bytes,
            peak_bytes=self._peak.bytes,
            drafted_tokens=drafts.drafted if drafts.verifications else None,
            accepted_tokens=drafts.accepted if drafts.verifications else None,
            verifications=drafts.verifications or None,
            fallbacks=tuple(self._fallbacks),
            linears=self.session.executor.linears,
            compiled=self.session.executor.compiled,
        )


@contextmanager
def _logging_failure(warning: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        _logger.warning(warning, exc_info=True)
