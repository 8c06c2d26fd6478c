"""`Batch`: prompts submitted from any thread, run together in a thread of its own."""

from __future__ import annotations

import atexit
import pickle
import queue
import threading
import time
import weakref
from contextlib import suppress
from itertools import count
from types import TracebackType

from engine.errors import EngineError, OptionError
from engine.out_of_memory import in_words
from engine.serving.counts import BatchState, Counts
from engine.serving.request import BatchRequest
from engine.serving.scheduler import Scheduler

_STATE_S = 0.25  # between two looks at a batch
_EXIT_S = 30.0  # for the last step, as the process ends
_IDLE_S = 5.0  # between two exchanges of ranks that have nothing to do: then they notice that one has ended


class Batch:
    """Runs the prompts that are submitted to it together. Made by `Generator.batch`.

    In a `with` statement it waits at the end for all that were submitted, or cancels them after an error. Where several
    processes compute the model, each makes a batch. Prompts are submitted on rank 0; the batches of the others run the
    same, and closing them waits until that of rank 0 is closed.

    state: what it does, a quarter of a second old at most. failure: the error that stopped it; None where none did.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler, self._indices = scheduler, count()
        self._inbox: queue.SimpleQueue[BatchRequest | None] = queue.SimpleQueue()  # None: something else has changed
        self._lock = threading.Lock()  # nothing is submitted after the close; never held by the thread that runs
        self._is_closed = self._cancels = False
        self.state, self._state_at = BatchState(), 0.0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine batch", daemon=True)
        _batches.add(self)
        self._thread.start()

    def submit(self, inputs: object = None, **parameters: object) -> BatchRequest:
        """Queue one prompt. inputs, parameters: as of `generate`, without a streamer; wrong ones are its error."""
        with self._lock:
            if self._is_closed:
                raise EngineError("the batch is closed and takes no more prompts: open another with gen.batch()")
            if not self._scheduler.ranks.is_first:
                raise EngineError("prompts are submitted on rank 0, and this is another one")
            request = BatchRequest(next(self._indices), inputs, parameters)
            if self._scheduler.ranks.size > 1:
                _check_can_be_sent(request)
            self._inbox.put(request)
        return request

    @property
    def is_alive(self) -> bool:
        """Whether it takes prompts."""
        return self._thread.is_alive() and not self._is_closed

    @property
    def counts(self) -> Counts:
        """What was done so far."""
        return self._scheduler.counts

    def close(self, cancel: bool = False) -> None:
        """Take no more prompts, and wait for those that were submitted. cancel: end these before their next step."""
        self._close(cancel, None)

    def _close(self, cancel: bool, timeout: float | None) -> None:
        with self._lock:
            self._is_closed, self._cancels = True, self._cancels or cancel
        self._inbox.put(None)
        self._thread.join(timeout)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(cancel=error is not None)

    async def __aenter__(self) -> Batch:
        return self

    async def __aexit__(
        self, error_type: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio

        await asyncio.to_thread(self.close, error is not None)

    def _run(self) -> None:
        try:
            while self._has_work():
                self._scheduler.turn()
                self._publish()
        except BaseException as error:  # no request may wait for ever
            with self._lock:
                self._is_closed, self.failure = True, error
            self._scheduler.ranks.end()
            for request in self._take(waits=False):
                self._scheduler.add(request)
            failure = EngineError(f"the batch stopped: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._scheduler.close(failure)
            raise

    def _publish(self) -> None:
        """Set `state`: when there is nothing more to do, and from time to time before, as it takes a while."""
        now = time.monotonic()
        if now - self._state_at >= _STATE_S or not self._scheduler.is_busy:
            self.state, self._state_at = self._scheduler.state(), now

    def _has_work(self) -> bool:
        """Wait for something to do, and queue what was submitted. False at the end."""
        ranks = self._scheduler.ranks
        while True:
            requests: list[BatchRequest] = []
            if ranks.is_first:
                requests = self._take(waits=not (self._scheduler.is_busy or self._is_closed))
                for request in requests:
                    self._scheduler.add(request)
            cancels, is_over = self._cancels, self._is_closed and self._inbox.empty()
            if ranks.size > 1:
                cancels, is_over = self._from_rank_0(requests, cancels, is_over)
            if cancels:
                self._scheduler.close()
            if self._scheduler.is_busy:
                return True
            if is_over:
                return False

    def _from_rank_0(self, requests: list[BatchRequest], cancels: bool, is_over: bool) -> tuple[bool, bool]:
        """Queue on the other ranks what was submitted on rank 0; whether that cancels all, and whether it is over."""
        ranks = self._scheduler.ranks
        if not ranks.most(ranks.is_first and bool(requests or cancels or is_over)):
            return False, False
        sent, cancels, is_over = ranks.share((_sent(requests), cancels, is_over))
        for fields in [] if ranks.is_first else sent:
            self._scheduler.add(BatchRequest(*fields))
        return cancels, is_over

    def _take(self, waits: bool) -> list[BatchRequest]:
        """What was submitted. waits: for something to come, if there is nothing."""
        requests: list[BatchRequest] = []
        seconds = _IDLE_S if self._scheduler.ranks.size > 1 else None
        with suppress(queue.Empty):
            while True:
                request = self._inbox.get(block=waits, timeout=seconds)
                waits = False
                if request is not None:
                    requests.append(request)
        return requests


_batches: weakref.WeakSet[Batch] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End what still runs: the interpreter ends a thread within torch by ending the process with an error."""
    for batch in list(_batches):
        if batch._thread.is_alive():
            batch._close(cancel=True, timeout=_EXIT_S)


def _sent(requests: list[BatchRequest]) -> list[tuple[int, object, dict[str, object]]]:
    """What other ranks need of these requests. They are cancelled on rank 0."""
    parameters_of_all = [
        {name: value for name, value in request.parameters.items() if name != "cancellation"} for request in requests
    ]
    return [
        (request.index, request.inputs, parameters)
        for request, parameters in zip(requests, parameters_of_all, strict=True)
    ]


def _check_can_be_sent(request: BatchRequest) -> None:
    try:
        pickle.dumps(_sent([request]))
    except Exception as error:
        raise OptionError(f"the other ranks of the model cannot be sent this prompt: {in_words(error)}") from error
