"""`Scheduler`: runs many requests turn by turn. A turn is one step of all that decode, and a piece of each new prompt.

Steps of one token per row are one forward of the model over the rows of all requests, each with its own cache. Requests
whose steps cannot be joined (`DecodingLoop.why_alone`) take their steps by themselves in the same turn.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from transformers.utils import ModelOutput

from caches.platform.out_of_memory import empty_allocators, is_out_of_memory, recovering
from engine.decoding.driver import Driver, Turn
from engine.errors import EngineError, GenerationCancelled
from engine.model.model_runner import ModelRunner
from engine.parallel.ranks import OneProcess, PeerError
from engine.result import Generation, StreamChunk, nothing_generated
from engine.serving.batch_request import BatchRequest
from engine.serving.counts import BatchState, Counts
from strategies import Forward

_logger = logging.getLogger("engine")
_PIECE_SHARE = 0.8  # of the time of a step, for the piece of a prompt that is read before the next one
_MOST_SHARES = 8  # of this kind in a turn, however many prompts wait to be read
_SMALLEST_PIECE, _LARGEST_PIECE = 32, 256  # tokens of a prompt; fewer take about as long

# Others that are no `Exception`, such as panics of libraries in Rust, are errors of one request.
_OF_THE_PROCESS = (KeyboardInterrupt, SystemExit, GeneratorExit)


def _is_cancelled(request: BatchRequest, fails: bool) -> bool:
    """fails: the answer where the event given with the request fails. Its run asks again, and gets the error."""
    with suppress(Exception):
        return request.is_set()
    return fails


def _as_exception(error: BaseException) -> BaseException:
    """What the caller of a request gets, who catches `Exception`."""
    if isinstance(error, (Exception, *_OF_THE_PROCESS)):
        return error
    failure = EngineError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


@dataclass(eq=False)
class _Run:
    """A request that was begun. forward: what it does in its next turn; None to read on."""

    request: BatchRequest
    driver: Driver
    turns: Generator[Turn, ModelOutput | None, None]
    planned_bytes: int
    forward: Forward | None = None
    is_reading: bool = True
    is_parked: bool = False
    ended_before: int = 0  # how many requests had ended when it was parked
    fed_before: int = -1  # columns that it had been fed then

    @property
    def rows(self) -> int:
        return self.driver.loop.rows

    @property
    def reads(self) -> bool:
        return self.is_reading and not self.is_parked

    @property
    def decodes(self) -> bool:
        return not (self.is_reading or self.is_parked)

    @property
    def bytes(self) -> int:
        """Of its cache at most: as planned, or what it has."""
        return 0 if self.is_parked else max(self.planned_bytes, self.driver.loop.cache_bytes)


class Scheduler:
    """start: makes the run of a request; its second argument is the run's `make_room`. slots: rows at once.

    piece_tokens: tokens of prompts read in a turn while others decode; None for as many as take about as long as a step
    of the others, for each of at most eight prompts. reads_first: all prompts that have a slot are read before the next
    step instead, which takes the least time in all. most_bytes: of all caches together; None for no limit.
    """

    def __init__(
        self,
        runner: ModelRunner,
        start: Callable[[BatchRequest, Callable[[], bool]], Driver],
        slots: int,
        piece_tokens: int | None,
        reads_first: bool,
        most_bytes: int | None,
    ):
        self._runner, self._start, self._slots = runner, start, slots
        self._piece_tokens, self._reads_first, self._most_bytes = piece_tokens, reads_first, most_bytes
        self._waiting: deque[BatchRequest] = deque()
        self._next: _Run | None = None  # the first in the queue, where there is no room for it yet
        self._runs: list[_Run] = []  # in the order in which they were begun
        self._active: _Run | None = None  # whose turn it is
        self._joined: list[_Run] = []  # that take part in a joined step and do not have its outputs yet
        self._ended: list[BatchRequest] = []
        self._ended_count = 0
        self._step_s = self._token_s = 0.0  # of a step; of a token of a prompt
        self._reading_s = 0.0  # that prompts may take; below 0 where they took more
        self._cancelled: set[int] = set()  # indices of requests, the same on all ranks
        self.counts = Counts()

    @property
    def ranks(self) -> OneProcess:
        """The processes that compute the model together; all of them have the same requests and take the same turns."""
        return self._runner.ranks

    def add(self, request: BatchRequest) -> None:
        self._waiting.append(request)

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._next or self._runs)

    @property
    def has_room(self) -> bool:
        """Whether a request that is added now may begin at once."""
        return self._next is None and self._rows + len(self._waiting) < self._slots

    def state(self) -> BatchState:
        """What is done now. For the thread that runs the turns."""
        parked = sum(run.is_parked for run in self._runs)
        active = [run for run in self._runs if not run.is_parked]
        cache_bytes = sum((Counter(run.driver.loop.cache_bytes_by_place) for run in self._runs), Counter())
        waiting = len(self._waiting) + (self._next is not None)
        return BatchState(waiting, len(active), parked, sum(run.rows for run in active), dict(cache_bytes))

    def turn(self) -> list[BatchRequest]:
        """Do a turn; the requests that have ended in it."""
        runs = self._runs if self._next is None else [*self._runs, self._next]
        cancelled = {request.index for request in self._waiting if _is_cancelled(request, fails=False)}
        cancelled |= {run.request.index for run in runs if _is_cancelled(run.request, fails=True)}
        self._cancelled = self.ranks.share(cancelled) if self.ranks.most(bool(cancelled)) else set()
        if self._cancelled:
            self._end_cancelled()
        self._admit()
        self._resume()
        self._read_prompts()
        self._decode()
        ended, self._ended = self._ended, []
        return ended

    def close(self, failure: EngineError | None = None) -> None:
        """End all requests: those that run as cancelled, the others with `failure`."""
        for run in self._runs:
            run.request.cancel()
        self._cancelled = {run.request.index for run in self._runs}
        while self._runs:
            with suppress(PeerError):  # each of them ends, also where the other ranks have
                self._end_runs()
        waiting = [*self._waiting] if self._next is None else [self._next.request, *self._waiting]
        if self._next is not None:
            self._next.turns.close()
        self._next = None
        self._waiting.clear()
        for request in waiting:
            self._end(request, failure or EngineError("the batch was closed before this prompt had its turn"))

    def _end_cancelled(self) -> None:
        """End the requests that were cancelled, also those that wait, are read, or are parked."""
        for request in [request for request in self._waiting if request.index in self._cancelled]:
            self._waiting.remove(request)
            nothing = nothing_generated(torch.empty(1, 0, dtype=torch.long, device="cpu"), True, (), 0.0)
            self._end(request, GenerationCancelled("generation was cancelled before this prompt had its turn", nothing))
        if self._next is not None and self._next.request.index in self._cancelled:
            self._runs.append(self._next)
            self._next = None
        self._end_runs()

    def _end_runs(self) -> None:
        """Let the runs that were cancelled go on to their errors."""
        for run in [run for run in self._runs if run.request.index in self._cancelled]:
            while run in self._runs:  # up to its next forward, which checks for it
                self._advance(run, None)

    # Who takes part.

    @property
    def _rows(self) -> int:
        return sum(run.rows for run in self._runs)

    def _admit(self) -> None:
        """Begin requests in their order, as long as there is room. What cannot be begun ends with its error."""
        while self._next is not None or self._waiting:
            if self._next is None:
                if self._runs and self._rows >= self._slots:
                    return
                self._next = self._begun(self._waiting.popleft())
                continue
            if self._runs and not self._fits(self._next):
                return
            self._runs.append(self._next)
            self._next = None

    def _begun(self, request: BatchRequest) -> _Run | None:
        try:
            run: _Run | None = None
            driver = self._start(request, lambda: self._park(run))
            planned_bytes = 0 if self._most_bytes is None else driver.planned_bytes()
            run = _Run(request, driver, driver.turns(self._piece), planned_bytes)
            return run
        except BaseException as error:
            self._end(request, error)
            if isinstance(error, _OF_THE_PROCESS):
                raise
            self.ranks.end()
            self.ranks.meet()
            return None

    def _fits(self, run: _Run) -> bool:
        if self._rows + run.rows > self._slots or any(other_run.is_parked for other_run in self._runs):
            return False
        return self._most_bytes is None or sum(admitted.bytes for admitted in [*self._runs, run]) <= self._most_bytes

    def _end(self, request: BatchRequest, result: Generation | BaseException) -> None:
        self._runs = [run for run in self._runs if run.request is not request]
        if isinstance(result, BaseException):
            result = _as_exception(result)
        if isinstance(result, Generation):
            result = replace(result, cache=None)  # else memory would follow all requests, not those that run
        elif isinstance(partial := getattr(result, "partial", None), Generation):
            result.partial = replace(partial, cache=None)  # type: ignore[attr-defined]
        request.end(result)
        self._ended.append(request)
        self._ended_count += 1

    # Turns.

    def _advance(self, run: _Run, computed: ModelOutput | None) -> None:
        """Let a run go on to its next forward or to its end. computed: the outputs of the forward that is due."""
        self._active = run
        try:
            if self._go_on(run, computed):
                self._end(run.request, run.driver.loop.result())
        except BaseException as error:
            self._end(run.request, error)
            if isinstance(error, _OF_THE_PROCESS):  # the caller gets it too
                raise
            self.ranks.meet()
        finally:
            self._active = None

    def _go_on(self, run: _Run, computed: ModelOutput | None) -> bool:
        """See `_advance`. Returns whether the run has come to its end."""
        was_due = run.forward is not None
        if was_due:
            run.is_reading = False
        try:
            item = run.turns.send(computed) if was_due else next(run.turns)
            while isinstance(item, StreamChunk):
                run.request.add_chunk(item)
                item = next(run.turns)
        except StopIteration:
            return True
        run.forward = item
        return False

    def _decode(self) -> None:
        """One step of every run that decodes."""
        due = [run for run in self._runs if run.decodes]
        joined = [run for run in due if self._why_alone(run) is None]
        alone = [run for run in due if run not in joined]
        self._step_together(joined)
        for run in alone:
            if run in self._runs and not run.is_parked:
                self.counts.alone_steps += 1
                self._advance(run, None)

    def _why_alone(self, run: _Run) -> str | None:
        assert run.forward is not None
        reason = run.driver.loop.why_alone(run.forward)
        if reason is not None:
            self.counts.why_alone.add(reason)
        return reason

    def _step_together(self, runs: list[_Run]) -> None:
        """A joined step. Where it fails for want of memory, the newest runs are parked; else each steps by itself."""
        begun, ranks = time.perf_counter(), self.ranks
        while len(runs) > 1:
            self._joined = list(runs)
            with recovering(Exception) as outcome, ranks.together():
                computed = self._computed(runs)
            if outcome.failure is None:
                for run, outputs in zip(runs, computed, strict=True):
                    self._joined.remove(run)
                    self._advance(run, outputs)
                self._step_s = self._seconds_since(begun)
                return
            self._joined = []
            for run in runs:
                run.driver.loop.abort_joined()
            ranks.meet()
            out = ranks.most(is_out_of_memory(outcome.failure)) > 0
            if not out:
                _logger.warning("a joined step failed, so each request takes it by itself: %s", outcome.failure)
            empty_allocators()
            if not (out and self._park(runs[0])):
                break
            runs = [run for run in runs if run in self._runs and not run.is_parked]
        for run in runs:
            if run in self._runs and not run.is_parked:  # one of those before may have asked for memory
                self._count(run.rows, run.rows * (run.driver.loop.fed + 1))
                self._advance(run, None)
        self._step_s = self._seconds_since(begun)

    def _seconds_since(self, begun: float) -> float:
        """On all ranks the most of them."""
        return self.ranks.most(int((time.perf_counter() - begun) * 1e6)) / 1e6

    def _computed(self, runs: list[_Run]) -> list[ModelOutput]:
        with torch.no_grad():
            inputs = []
            for run in runs:
                assert run.forward is not None
                inputs.append(run.driver.loop.prepare(run.forward))
            hidden = any(run.forward is not None and run.forward.hidden for run in runs)
            routed = all(run.driver.loop.is_routed for run in runs)
            compiled = all(run.driver.loop.is_compiled for run in runs)
            outputs = self._runner.step_together(inputs, hidden, routed, compiled)
        rows = sum(len(tokens) for _, tokens in inputs)
        self._count(rows, sum(len(tokens) * (cache.total_tokens + 1) for cache, tokens in inputs))
        return outputs

    def _count(self, rows: int, slots: int) -> None:
        self.counts.steps += 1
        self.counts.row_steps += rows
        self.counts.slots_read += slots

    def _read_prompts(self) -> None:
        """Read of the prompts, those that wait longest first, as much as a turn may.

        While others decode, each turn gives prompts a share of the time of a step. A piece may take more than is left;
        then the next turns read nothing.
        """
        while self._reads_first and self._read():
            self._admit()
        prompts = sum(run.reads for run in self._runs)
        decoding = sum(run.decodes for run in self._runs)
        if prompts == 0 or self._piece_tokens is not None or decoding == 0:
            self._reading_s = 0.0
            self._read()
            return
        self._reading_s += _PIECE_SHARE * self._step_s * min(prompts, _MOST_SHARES)
        while self._reading_s > 0 and self._read():
            pass

    def _read(self) -> bool:
        """Read a piece of the prompt that waits longest; whether there was one."""
        run = next((run for run in self._runs if run.reads), None)
        if run is None:
            return False
        self.counts.pieces += 1
        begun, fed_columns = time.perf_counter(), run.driver.loop.fed
        self._advance(run, None)
        if run.forward is not None and run.is_reading:  # its last piece
            self._advance(run, None)
        tokens, seconds = run.driver.loop.fed - fed_columns, self._seconds_since(begun)
        self._reading_s -= seconds
        if tokens >= _SMALLEST_PIECE // 2:
            self._token_s = seconds / tokens
        return True

    def _piece(self) -> int:
        """Tokens of a prompt that are read at once."""
        if self._piece_tokens is not None:
            return self._piece_tokens
        if self._reads_first or not any(run.decodes for run in self._runs):
            return _LARGEST_PIECE
        tokens = int(self._reading_s / self._token_s) if self._token_s else 0
        return min(max(_SMALLEST_PIECE, tokens), _LARGEST_PIECE)

    # When memory is out.

    def _park(self, asking: _Run | None) -> bool:
        """Free the cache of the newest run but `asking`, until others have ended; whether there was one.

        A run is not parked again before it has been fed more: else newer ones could keep it from ever ending.
        """
        busy = [asking, self._active, *self._joined]
        for run in reversed(self._runs):
            loop = run.driver.loop
            if run in busy or run.is_parked or not loop.cache_bytes or loop.fed <= run.fed_before:
                continue
            with recovering(Exception) as outcome, torch.no_grad():
                loop.park()
            if outcome.failure is not None:
                _logger.warning("a request could not be parked: %s", outcome.failure)
                continue
            run.is_parked, run.ended_before, run.fed_before = True, self._ended_count, loop.fed
            self.counts.parked += 1
            return True
        return False

    def _resume(self) -> None:
        """Let the oldest parked run go on once another has ended, or nothing else runs."""
        parked = next((run for run in self._runs if run.is_parked), None)
        if parked is None:
            return
        if self._ended_count > parked.ended_before or all(run.is_parked for run in self._runs):
            parked.is_parked = False
