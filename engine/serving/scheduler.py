"""`Scheduler`: runs many requests turn by turn. A turn is one step of all that decode, and a piece of each new prompt.

Steps of one token per row are one forward of the model over the rows of all requests, each with its own cache. Requests
whose steps cannot be joined (`Run.why_alone`) take their steps by themselves in the same turn.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from transformers.utils import ModelOutput

from caches.platform.out_of_memory import empty_allocators, is_out_of_memory, recovering
from engine.decoding.driver import Driver
from engine.errors import EngineError, GenerationCancelled
from engine.model.model_runner import ModelRunner
from engine.parallel.ranks import OneProcess, PeerError
from engine.result import Generation, nothing_generated
from engine.serving.batch_request import BatchRequest
from engine.serving.counts import BatchState, Counts
from engine.serving.joining import ReadingTime, Run, batch_state, step_together

_logger = logging.getLogger("engine")
# Others that are no `Exception`, such as panics of libraries in Rust, are errors of one request.
_OF_THE_PROCESS = (KeyboardInterrupt, SystemExit, GeneratorExit)


def _is_cancelled(request: BatchRequest, fails: bool) -> bool:
    """fails: the answer where the event given with the request fails. Its run asks again, and gets the error."""
    with suppress(Exception):
        return request.is_set()
    return fails


def _without_cache(result: Generation | BaseException) -> Generation | BaseException:
    """What the caller of a request gets, who catches `Exception`: else memory would follow all requests, not those that
    run."""
    if isinstance(result, Generation):
        return replace(result, cache=None)
    if not isinstance(result, (Exception, *_OF_THE_PROCESS)):
        failure = EngineError(f"{type(result).__name__}: {result}")
        failure.__cause__ = result
        result = failure
    if not isinstance(result, _OF_THE_PROCESS):
        _clear_frames(result)
    if isinstance(partial := getattr(result, "partial", None), Generation):
        result.partial = replace(partial, cache=None)  # type: ignore[union-attr]
    return result


def _clear_frames(error: BaseException) -> None:
    """Free what the frames refer to that an error and its causes came through. Their lines of code stay."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__


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
        self._most_bytes, self._reading = most_bytes, ReadingTime(piece_tokens, reads_first)
        self._waiting: deque[BatchRequest] = deque()
        self._next: Run | None = None  # the first in the queue, where there is no room for it yet
        self._runs: list[Run] = []  # in the order in which they were begun
        self._active: Run | None = None  # whose turn it is
        self._joined: list[Run] = []  # that take part in a joined step and do not have its outputs yet
        self._ended: list[BatchRequest] = []
        self._ended_count = 0
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
        return batch_state(self._runs, len(self._waiting) + (self._next is not None))

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
        if self._next is not None:
            self._next.turns.close()
            self._waiting.appendleft(self._next.request)
            self._next = None
        while self._waiting:
            request = self._waiting.popleft()
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

    def _begun(self, request: BatchRequest) -> Run | None:
        try:
            driver = self._start(request, lambda: self._park(request))  # not its run: no circle would hold its cache
            planned_bytes = 0 if self._most_bytes is None else driver.planned_bytes()
            return Run(request, driver, driver.turns(self._piece), planned_bytes)
        except BaseException as error:
            self._end(request, error)
            if isinstance(error, _OF_THE_PROCESS):
                raise
            self.ranks.end()
            self.ranks.meet()
            return None

    def _fits(self, run: Run) -> bool:
        if self._rows + run.rows > self._slots or any(other_run.is_parked for other_run in self._runs):
            return False
        return self._most_bytes is None or sum(admitted.bytes for admitted in [*self._runs, run]) <= self._most_bytes

    def _end(self, request: BatchRequest, result: Generation | BaseException) -> None:
        self._runs = [run for run in self._runs if run.request is not request]
        request.end(_without_cache(result))
        self._ended.append(request)
        self._ended_count += 1

    # Turns.

    def _advance(self, run: Run, computed: ModelOutput | None) -> None:
        """Let a run go on to its next forward or to its end. computed: the outputs of the forward that is due."""
        self._active = run
        try:
            if run.go_on(computed):
                self._end(run.request, run.loop.result())
        except BaseException as error:
            self._end(run.request, error)
            if isinstance(error, _OF_THE_PROCESS):  # the caller gets it too
                raise
            self.ranks.meet()
        finally:
            self._active = None
            if run not in self._runs:
                run.release()

    def _decode(self) -> None:
        """One step of every run that decodes."""
        due = [run for run in self._runs if run.decodes]
        reasons = {run: run.why_alone for run in due}
        self.counts.why_alone.update(reason for reason in reasons.values() if reason is not None)
        begun = time.perf_counter()
        self._step_together([run for run in due if reasons[run] is None])
        self._reading.step_s = self._seconds_since(begun)
        for run in due:
            if reasons[run] is not None and run in self._runs and not run.is_parked:
                self.counts.alone_steps += 1
                self._advance(run, None)

    def _step_together(self, runs: list[Run]) -> None:
        """A joined step. Where it fails for want of memory, the newest runs are parked; else each steps by itself."""
        ranks = self.ranks
        while len(runs) > 1:
            self._joined = list(runs)
            with recovering(Exception) as outcome, ranks.together():
                computed = step_together(self._runner, runs, self.counts)
            if outcome.failure is None:
                for run, outputs in zip(runs, computed, strict=True):
                    self._joined.remove(run)
                    self._advance(run, outputs)
                return
            self._joined = []
            for run in runs:
                run.loop.session.abort_joined()
            ranks.meet()
            out = ranks.most(is_out_of_memory(outcome.failure)) > 0
            if not out:
                _logger.warning("a joined step failed, so each request takes it by itself: %s", outcome.failure)
            empty_allocators()
            if not (out and self._park(runs[0].request)):
                break
            runs = [run for run in runs if run in self._runs and not run.is_parked]
        for run in runs:
            if run in self._runs and not run.is_parked:  # one of those before may have asked for memory
                self.counts.add_step(run.rows, run.rows * (run.fed + 1))
                self._advance(run, None)

    def _seconds_since(self, begun: float) -> float:
        """On all ranks the most of them."""
        return self.ranks.most(int((time.perf_counter() - begun) * 1e6)) / 1e6

    def _read_prompts(self) -> None:
        """Read of the prompts, those that wait longest first, as much as a turn may.

        While others decode, each turn gives prompts a share of the time of a step. A piece may take more than is left;
        then the next turns read nothing.
        """
        while self._reading.reads_first and self._read():
            self._admit()
        if not self._reading.begin_turn(sum(run.reads for run in self._runs), sum(run.decodes for run in self._runs)):
            self._read()
        while self._reading.is_left and self._read():
            pass

    def _read(self) -> bool:
        """Read a piece of the prompt that waits longest; whether there was one."""
        run = next((run for run in self._runs if run.reads), None)
        if run is None:
            return False
        self.counts.pieces += 1
        begun, fed_columns = time.perf_counter(), run.fed
        self._advance(run, None)
        if run.forward is not None and run.is_reading:  # its last piece
            self._advance(run, None)
        tokens = run.fed - fed_columns if run in self._runs else 0
        self._reading.add_piece(tokens, self._seconds_since(begun))
        return True

    def _piece(self) -> int:
        return self._reading.piece(any(run.decodes for run in self._runs))

    # When memory is out.

    def _park(self, asking: BatchRequest) -> bool:
        """Free the cache of the newest run but that of `asking`, until others have ended; whether there was one."""
        busy = [self._active, *self._joined]
        for run in reversed(self._runs):
            if run.request is asking or run in busy or not run.can_be_parked:
                continue
            with recovering(Exception) as outcome:
                run.park(self._ended_count)
            if outcome.failure is not None:
                _logger.warning("a request could not be parked: %s", outcome.failure)
                continue
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
