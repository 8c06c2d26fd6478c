"""`BatchRequest`: the handle of one prompt among many."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from engine.result import Generation, StreamChunk


def _as_it_is(inputs: object) -> object:
    """Lists and dicts copied: the caller may add a message to its list while the prompt waits."""
    if type(inputs) is list:
        return [_as_it_is(entry) for entry in inputs]
    if type(inputs) is dict:
        return {name: _as_it_is(value) for name, value in inputs.items()}
    return inputs


class BatchRequest:
    """A prompt that was submitted. Safe to use from any thread; in asyncio `await` it, or `async for` its chunks.

    index: its number among those of the batch, from 0. inputs, parameters: as of `generate`.
    """

    def __init__(self, index: int, inputs: object, parameters: dict[str, object]):
        self.index, self.inputs = index, _as_it_is(inputs)
        self.parameters: dict[str, Any] = parameters
        self._future: Future[Generation] = Future()
        self._future.set_running_or_notify_cancel()  # a task that is cancelled while it waits does not end it
        self._cancelled = threading.Event()
        self._failure: Exception | None = None  # of the event that it was given
        self._chunks: queue.SimpleQueue[StreamChunk | None] = queue.SimpleQueue()
        self._on_chunk: list[Callable[[], None]] = []  # called from the thread that runs the batch

    @property
    def done(self) -> bool:
        """Whether it has ended, with a result or an error."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for its end. Raises its error, as `generate` does, or `TimeoutError` after `timeout` seconds."""
        return self._future.result(timeout)

    @property
    def error(self) -> BaseException | None:
        """Its error, once it is done; what was generated before is in `error.partial`, where there is such."""
        return self._future.exception() if self.done else None

    @property
    def new_tokens(self) -> int:
        """Tokens that were generated, once it is done; also those before an error."""
        error = self.error
        result = getattr(error, "partial", None) if error is not None else self._future.result() if self.done else None
        return 0 if result is None else result.stats.new_tokens

    def cancel(self) -> None:
        """End it before its next step. `result` then raises `GenerationCancelled`, with what was generated."""
        self._cancelled.set()

    def stream(self) -> Iterator[StreamChunk]:
        """Its chunks as they come, each once. Raises its error after the last."""
        while (chunk := self._chunks.get()) is not None:
            yield chunk
        self._chunks.put(None)  # for another reader
        self.result()

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(arrived.set)

        self._on_chunk.append(wake)
        try:
            while True:
                arrived.clear()
                try:
                    chunk = self._chunks.get_nowait()
                except queue.Empty:
                    await arrived.wait()
                    continue
                if chunk is None:
                    break
                yield chunk
        finally:
            self._on_chunk.remove(wake)
        self._chunks.put(None)
        self.result()

    def __await__(self) -> Generator[object, None, Generation]:
        return asyncio.wrap_future(self._future).__await__()

    def __repr__(self) -> str:
        state = "waits or runs" if not self.done else "done" if self.error is None else type(self.error).__name__
        return f"BatchRequest({self.index}, {self.inputs!r:.40}, {state})"

    # For the scheduler.

    def is_set(self) -> bool:
        """As an event for `cancellation`: whether it was cancelled, here or by the event that it was given.

        Raises the error of that event, also in later calls.
        """
        event = self.parameters.get("cancellation")
        if self._failure is not None:
            raise self._failure
        try:
            return self._cancelled.is_set() or (event is not None and event.is_set())
        except Exception as error:
            self._failure = error
            raise

    def add_chunk(self, chunk: StreamChunk | None) -> None:
        """None: there are no more."""
        self._chunks.put(chunk)
        for wake in list(self._on_chunk):
            wake()

    def end(self, result: Generation | BaseException) -> None:
        """Its result or its error; once."""
        if isinstance(result, BaseException):
            self._future.set_exception(result)
        else:
            self._future.set_result(result)
        self.add_chunk(None)
