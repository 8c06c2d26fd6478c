"""`Batch`: prompts submitted from any thread, run together in a thread of its own."""

from __future__ import annotations

import threading
from itertools import count
from types import TracebackType
from typing import Any

from engine.errors import EngineError
from engine.serving.request import BatchRequest
from engine.serving.scheduler import Counts, Scheduler


class Batch:
    """Runs the prompts that are submitted to it together. Made by `Generator.batch`.

    In a `with` statement it waits at the end for all that were submitted, or cancels them after an error.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler, self._numbers = scheduler, count()
        self._submitted: list[BatchRequest] = []
        self._changed = threading.Condition()
        self._is_closed = self._cancels = False
        self._thread = threading.Thread(target=self._run, name="engine batch", daemon=True)
        self._thread.start()

    def submit(self, inputs: Any = None, **parameters: Any) -> BatchRequest:
        """Queue one prompt. inputs, parameters: as of `generate`, without a streamer; wrong ones are its error."""
        with self._changed:
            if self._is_closed:
                raise EngineError("the batch is closed and takes no more prompts: open another with gen.batch()")
            request = BatchRequest(next(self._numbers), inputs, parameters)
            self._submitted.append(request)
            self._changed.notify()
        return request

    @property
    def counts(self) -> Counts:
        """What was done so far."""
        return self._scheduler.counts

    def close(self, cancel: bool = False) -> None:
        """Take no more prompts, and wait for those that were submitted. cancel: end these before their next step."""
        with self._changed:
            self._is_closed, self._cancels = True, self._cancels or cancel
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(cancel=error is not None)

    async def __aenter__(self) -> Batch:
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        import asyncio

        await asyncio.to_thread(self.close, error is not None)

    def _run(self) -> None:
        try:
            while self._wait():
                self._scheduler.turn()
        except BaseException as error:  # no request may wait for ever
            self._fail(error)
            raise

    def _wait(self) -> bool:
        """Wait until there is something to do, and queue what was submitted. Whether to go on."""
        with self._changed:
            while not (self._submitted or self._scheduler.is_busy or self._is_closed):
                self._changed.wait()
            for request in self._submitted:
                self._scheduler.add(request)
            self._submitted.clear()
            if self._cancels:
                self._scheduler.close()
            return self._scheduler.is_busy or not self._is_closed

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._is_closed = True
            for request in self._submitted:
                self._scheduler.add(request)
            self._submitted.clear()
        why = EngineError(f"the batch stopped: {type(error).__name__}: {error}")
        why.__cause__ = error
        self._scheduler.close(why)
