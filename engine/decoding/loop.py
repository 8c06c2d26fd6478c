"""A strategy's flow says what to do and `DecodingLoop` does it: it owns the tokens, the records and the clean end; the
model's side of it is a `ModelSession`, the side of those who look on is an `StreamBuffer`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map
from transformers.utils import ModelOutput

from caches import CacheError
from caches.out_of_memory import is_out_of_memory
from engine.decoding.guided_session import GuidedSession
from engine.decoding.logits_check import LogitsCheck
from engine.decoding.model_session import ModelSession
from engine.decoding.stopping import Stopping
from engine.decoding.token_buffer import Tokens
from engine.errors import EngineError
from engine.model.device_state import Peak, random_state, set_random_state
from engine.out_of_memory import Exhausted
from engine.output.stream_buffer import StreamBuffer
from engine.request.encoder import encoder_records
from engine.request.request import Request
from engine.result import Fallback, Generation, Stats, StreamChunk
from strategies import Crop, Emit, Finish, Flow, Forward, Hypothesis, Operation, Report, Rows

T = TypeVar("T")
_logger = logging.getLogger("engine")

# What may be recorded of a call: the parameter that asks for it, and where a forward's outputs have it.
_RECORDS = {
    "scores": ("output_scores", ()),
    "logits": ("output_logits", ()),
    "attentions": ("output_attentions", ("attentions", "decoder_attentions")),
    "cross_attentions": ("output_attentions", ("cross_attentions",)),
    "hidden_states": ("output_hidden_states", ("hidden_states", "decoder_hidden_states")),
}


@dataclass(frozen=True)
class _Mark:
    """Where a run stood after a column was written, to come back to: lengths of its records, the random state."""

    records: dict[str, int]
    generator: torch.Tensor | None


class DecodingLoop:
    """One generation under way.

    tokenizer: None when no text is wanted. legacy: whether the result gives its cache as tuples. started: when the call
    began, of `time.perf_counter`. away_s: how much of the time since then its consumer took, which is none of ours.
    draft: the session of the model that proposes tokens, for strategies that need one. fallbacks: how the sessions went
    on when memory was out, which they add to.
    """

    def __init__(
        self,
        request: Request,
        session: ModelSession | GuidedSession,
        stream_buffer: StreamBuffer,
        *,
        tokenizer: Any,
        legacy: bool,
        started: float,
        draft: ModelSession | None = None,
        fallbacks: Sequence[Fallback] = (),
    ):
        self._draft, self._logits_of_step = draft, 1
        self._request, self._lane, self.stream_buffer, self._tokenizer = request, session, stream_buffer, tokenizer
        self._legacy, self._fallbacks = legacy, fallbacks
        prompt = request.prompt.ids
        self._device, self._generator = prompt.device, request.generator
        self._prompt_tokens = int(request.mask[:, session.cache.total_tokens :].sum()) + request.source_tokens
        self._stopping = Stopping(request)
        columns = request.max_columns
        self._tokens = Tokens(prompt, request.mask[:, request.first_known_column :], columns, request.pad_id)
        self._health = LogitsCheck(request, self._tokens, session)
        self._last_column = columns
        self._best: Callable[[], list[Hypothesis] | None] | None = None  # what there is of texts that come in the end
        self._records: dict[str, list[Any]] = {
            name: [] for name, (asked, _) in _RECORDS.items() if getattr(request.config, asked, None)
        }
        self._sequences_scores: torch.Tensor | None = None
        self._beam_indices: torch.Tensor | None = None
        self._unread: deque[_Mark] = deque()  # one per column that is read late
        self._read = self._mark()
        self._new_tokens = 0
        self._started = started
        self.away_s = 0.0
        self._ready_s = time.perf_counter()
        self._first_token_s: float | None = None
        self._ended_s: float | None = None
        self.given_up = False  # there is no result
        self._peak = Peak(self._device)

    def begin(self) -> Flow:
        """The strategy's flow, whose operations are to be performed."""
        self.away_s += time.perf_counter() - self._ready_s
        records = "scores" in self._records
        # Not kept: it knows this run.
        task = replace(self._request.task, process=self._process, attempt=self._attempt, records_scores=records)
        return self._request.strategy.flow(task)

    @property
    def done(self) -> bool:
        """Whether all rows have ended."""
        return self._stopping.done

    @property
    def cache_name(self) -> str:
        return self._lane.cache.name

    @property
    def _running(self) -> list[bool]:
        """Which rows have not ended, as far as tokens were read."""
        return [reason is None for reason in self._stopping.reasons]

    def break_off(self) -> list[StreamChunk]:
        """The run stops before its end: give what there is the shape of a result. What was not shown of it.

        Where texts come in the end it is the best there are; else rows that are only tried become what they came from.
        """
        try:
            self._read_unread()
        except Exception:  # what raised once may raise again, and the run is told of it already
            _logger.warning("what the last tokens end was not found out", exc_info=True)
        self.forget_unread()
        best, self._best = self._best, None
        try:
            texts = None if best is None else best()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            texts = None  # then the rows of the prompt are all there is
        if texts is not None:
            self._return_to([text.row for text in texts])
            self._take([replace(text, row=row) for row, text in enumerate(texts)])
        else:
            index = self.stream_buffer.way_back()
            if index is not None:
                self._return_to(index)
        self.stream_buffer.end_all()
        try:
            return self.stream_buffer.release()
        except Exception:
            _logger.warning("the streamer did not take the last tokens", exc_info=True)
        return self.stream_buffer.release()

    def _return_to(self, rows: list[int]) -> None:
        """Rows become those of a result, also when there is no memory for that in the cache: then it begins anew."""
        index = torch.tensor(rows)
        try:
            move = self._moving(index)
            self._lane.select_rows(index)
        except Exception as error:
            if not (isinstance(error, (CacheError, Exhausted)) or is_out_of_memory(error)):
                raise
            _logger.warning("the cache is emptied, because its rows could not follow those of the result: %s", error)
            self._lane.forget()  # which makes room
            move = self._moving(index)
        move()

    def perform(self, operation: Operation) -> tuple[Any, list[StreamChunk]]:
        """Carry out one operation of the flow: its result, and what there is to show."""
        match operation:
            case Forward():
                return self._forward(operation), []
            case Emit(tokens, scores):
                pieces = self._emit(tokens, scores)
                return self._tokens.ids, pieces
            case Crop(tokens, "main"):
                self._lane.commit(rejected=tokens)
                logits = self._records.get("logits", [])
                del logits[len(logits) - min(tokens, self._logits_of_step) :]
                return None, []
            case Crop(tokens):
                assert self._draft is not None
                self._draft.crop(tokens)
                return None, []
            case Rows(index):
                pieces = self.read_all()
                self._health.before_rows(self._running)
                self._reorder(index.cpu())
                return None, pieces
            case Report(final, best):
                self._best = best
                if self.stream_buffer.watched:
                    self.stream_buffer.hold(final(), self._stopping.why)
                return None, self.stream_buffer.release()
            case Finish():
                return None, self._finish(operation)

    def _forward(self, forward: Forward) -> Any:
        if self._lane.fed and self._first_token_s is None:  # it is what is fed, and may be final only in the end
            self._first_token_s = self._now()
        tokens = forward.tokens.shape[1] if forward.all_logits else 1
        session = self._lane if forward.model == "main" else self._draft
        assert session is not None  # a strategy that needs one was given one
        fed = session.fed if forward.model == "main" else None
        if forward.model == "main":  # while there is a way to go on without the memory that this takes
            self._lane.attempt(lambda: self._tokens.reserve(tokens))
        outputs, states = session.forward(forward.tokens, forward.hidden, forward.all_logits)
        self._peak.look()
        logits = session.attempt(lambda: outputs.logits[:, -tokens:].to(self._device, torch.float32, copy=True))
        self._health.look(logits, outputs.logits.dtype, fed, self._running)
        if forward.model == "main":
            own = outputs.get("unguided_logits", outputs.logits)
            self._record(outputs, own[:, -tokens:])
        logits = logits if forward.all_logits else logits[:, 0]
        return (logits, states) if forward.hidden else logits

    def _process(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `Task`. A processor that has written into the scores cannot be asked again."""
        before = None if scores.is_inference() else scores._version

        def is_as_it_was() -> bool:
            return before is not None and scores._version == before

        # What processors draw is torch's own, whatever the call's seed.
        return self._lane.attempt(self._rewinding(lambda: self._health.process(ids, scores), None), is_as_it_was)

    def _attempt(self, work: Callable[[], T]) -> T:
        """See `Task`."""
        return self._lane.attempt(self._rewinding(work, self._generator))

    def _rewinding(self, work: Callable[[], T], generator: torch.Generator | None) -> Callable[[], T]:
        """`work` that draws the same numbers when it is done once more; not where others have drawn since."""
        if not (self._request.strategy.samples or self._request.processing.names):
            return work
        before: torch.Tensor | None = None
        after: torch.Tensor | None = None

        def drawn() -> T:
            nonlocal before, after
            now = random_state(self._device, generator)
            if before is not None and after is not None and torch.equal(now, after):
                set_random_state(before, self._device, generator)
            else:
                before = now
            try:
                return work()
            finally:
                after = random_state(self._device, generator)

        return drawn

    def _record(self, outputs: ModelOutput, logits: torch.Tensor) -> None:
        """logits [rows, tokens, vocabulary]: those asked for in this step."""
        self._logits_of_step = logits.shape[1]
        for name, values in self._records.items():
            found = next((outputs[field] for field in _RECORDS[name][1] if field in outputs), None)
            if name == "logits":
                values += logits.to(self._device, torch.float32, copy=True).unbind(dim=1)
            elif found is not None:
                values.append(found)

    def _emit(self, tokens: torch.Tensor, scores: tuple[torch.Tensor, ...]) -> list[StreamChunk]:
        for column in range(tokens.shape[1]):
            if self._stopping.done:
                break
            self._health.before_write(self._running)
            self._tokens.write(tokens[:, column])
            if "scores" in self._records and scores:
                self._records["scores"].append(scores[column])
            if self._tokens.late:
                self._unread.append(self._mark())
            # The first token is waited for, so that the time to it is honest, and nothing can come after the last.
            at_once = not self._tokens.late or self._first_token_s is None
            at_once = at_once or self._tokens.written == self._last_column
            while self._tokens.unread > (0 if at_once else 1):
                self._read_column()
        return self.stream_buffer.release()

    def _finish(self, end: Finish) -> list[StreamChunk]:
        """Take over the tokens of all rows, which the strategy has ended by itself."""
        rows = zip(end.tokens.tolist(), end.lengths, strict=True)
        # A search may find fewer texts than are wanted: what is left is empty, and nothing has ended it.
        texts = [Hypothesis(tokens[:length], length > 0, row) for row, (tokens, length) in enumerate(rows)]
        self._best = lambda: texts
        self._take(texts)
        if "scores" in self._records:
            self._records["scores"] += end.scores
        self._sequences_scores, self._beam_indices = end.sequences_scores, end.beam_indices
        return self.stream_buffer.release()

    def _take(self, texts: list[Hypothesis]) -> None:
        """These texts, one for each row, are what comes after the prompt: the run ends with them."""
        lengths = [len(text.tokens) for text in texts]
        pads = [[self._request.pad_id] * (max(lengths) - length) for length in lengths]
        tokens = [text.tokens + after for text, after in zip(texts, pads, strict=True)]
        self._tokens.write_rows(torch.tensor(tokens, dtype=torch.long, device=self._device), lengths)
        self._best = None
        self._new_tokens = sum(lengths)
        self.stream_buffer.hold(texts, self._stopping.why)
        self._stopping.reasons = self.stream_buffer.reasons

    def _mark(self) -> _Mark:
        generator = random_state(self._device, self._generator) if self._request.strategy.samples else None
        return _Mark({name: len(values) for name, values in self._records.items()}, generator)

    def read_all(self) -> list[StreamChunk]:
        self._read_unread()
        return self.stream_buffer.release()

    def _read_unread(self) -> None:
        while self._tokens.unread and not self._stopping.done:
            self._read_column()

    def _read_column(self) -> None:
        """Look at the first column not read yet, and find the rows that end with it."""
        running = self._running
        self._health.before_read(running)
        new = self._tokens.next()
        if self._unread:
            self._read = self._unread.popleft()
        if self._first_token_s is None:
            self._first_token_s = self._now()
        self._new_tokens += sum(running)
        self.stream_buffer.push(new, running)
        try:
            self._stopping.check(self._tokens.read, new, self.stream_buffer.texts, self._seen_by_criteria)
        finally:
            for row, reason in enumerate(self._stopping.reasons):
                if running[row] and reason is not None:
                    self._tokens.end_row(row)
                    self.stream_buffer.end(row, reason)

    def forget_unread(self) -> None:
        """As if nothing had been done after the column read last."""
        if not self._tokens.unread:
            return
        self._tokens.forget_unread()
        written = self._unread[-1].generator if self._unread else None
        self._unread.clear()
        for name, length in self._read.records.items():
            del self._records[name][length:]
        before = self._read.generator
        # Not where others have drawn since: the same numbers would come to them a second time.
        now = random_state(self._device, self._generator)
        if before is not None and written is not None and torch.equal(now, written):
            set_random_state(before, self._device, self._generator)

    def _seen_by_criteria(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        scores = self._records.get("scores")
        read = len(scores) - self._tokens.unread if scores is not None else 0
        return self._tokens.ids[:, : self._tokens.read], None if scores is None else tuple(scores[:read])

    def _reorder(self, index: torch.Tensor) -> None:
        move = self._moving(index)
        self._lane.select_rows(index)
        move()
        # What fails from here on ends the run, and what there is does without these.
        if self._draft is not None:
            self._draft.select_rows(index)
        self._request.processing.select_rows(index)

    def _moving(self, index: torch.Tensor) -> Callable[[], None]:
        """What makes row i row `index[i]` in what this side of the run keeps, and cannot fail."""
        choose, chosen, last = self._tokens.choosing(index), index.to(self._device), {}
        if len(index) > len(self._tokens.ids):  # what was computed for the rows that these come from was for them too
            for name, values in self._records.items():
                if values and name != "scores":
                    last[name] = tree_map(lambda part: part[chosen], values[-1])

        best = None if self._best is None else _followed(self._best, index.tolist())

        def move() -> None:
            choose()
            self._best = best
            for name, value in last.items():
                self._records[name][-1] = value
            self._stopping.select_rows(index)
            self.stream_buffer.select_rows(index)

        return move

    def _now(self) -> float:
        return time.perf_counter() - self.away_s

    def close(self) -> None:
        if self._ended_s is not None:
            return
        self.forget_unread()
        if (
            self._request.drafts.verifications and "logits" in self._records
        ):  # the text may end before what was verified
            del self._records["logits"][self._tokens.written - self._tokens.prompt :]
        self._draft = None
        try:
            self._lane.close(self._tokens.log())
        finally:
            self._ended_s = self._now()
            try:
                self.stream_buffer.close()
            except Exception:  # unless something has stopped the run, the streamer has ended before
                _logger.warning("the streamer could not be ended", exc_info=True)

    def give_up(self) -> None:
        """End without a result: what there is of texts and rows may not fit together. The cache is emptied."""
        self.given_up = True
        if self._ended_s is None:
            self._ended_s = self._now()
            self._lane.forget()
            with suppress(Exception):  # the streamer
                self.stream_buffer.close()

    def result(self) -> Generation:
        """What was generated. Ends the run. Raises `EngineError` after `give_up`."""
        if self.given_up:
            raise EngineError(
                "the run has no result: it was interrupted once more while what it had was brought into shape, so its "
                "texts and its rows may not fit together"
            )
        self.close()
        sequences = self._tokens.ids
        records = {name: tuple(values) for name, values in self._records.items()}
        if "encoder_outputs" not in self._request.prompt.model_kwargs:  # GPT-2 returns an empty tuple of these
            records.pop("cross_attentions", None)
        return Generation(
            sequences=sequences,
            tokens=self._tokens.new(),
            text=self._text(),
            finish_reasons=list(self._stopping.reasons),
            stats=self._stats(),
            cache=self._lane.cache.handle,
            legacy=self._legacy,
            sequences_scores=self._sequences_scores,
            beam_indices=self._beam_indices,
            **records,
            **encoder_records(self._request.prompt.model_kwargs, self._request.output_flags),
        )

    def _text(self) -> list[str] | None:
        if self._tokenizer is None:
            return None
        texts = self.stream_buffer.flushed()
        if texts is not None:
            return texts
        return [
            self._tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for row in self._tokens.new()
        ]

    def _stats(self) -> Stats:
        assert self._ended_s is not None
        prefill_s = None if self._first_token_s is None else self._first_token_s - self._started
        decode_s = None if self._first_token_s is None else self._ended_s - self._first_token_s
        decoded = self._new_tokens - len(self._tokens.ids)  # the first token of each row comes from the prefill
        drafts = self._request.drafts
        return Stats(
            cache=self.cache_name,
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._new_tokens,
            ttft_s=prefill_s,
            prefill_tokens_per_s=None if not prefill_s else self._prompt_tokens / prefill_s,
            decode_tokens_per_s=None if not decode_s or decoded < 1 else decoded / decode_s,
            total_s=self._ended_s - self._started,
            cache_bytes=self._lane.cache.bytes,
            peak_bytes=self._peak.bytes,
            drafted_tokens=drafts.drafted if drafts.verifications else None,
            accepted_tokens=drafts.accepted if drafts.verifications else None,
            verifications=drafts.verifications or None,
            fallbacks=tuple(self._fallbacks),
            linears=self._lane.linears,
        )


def _followed(best: Callable[[], list[Hypothesis] | None], index: list[int]) -> Callable[[], list[Hypothesis] | None]:
    """`best` when row i has become row `index[i]`; None where a text has lost the row that goes on from it."""

    def texts() -> list[Hypothesis] | None:
        found = best()
        if found is None or not all(text.row in index for text in found):
            return None
        return [replace(text, row=index.index(text.row)) for text in found]

    return texts
