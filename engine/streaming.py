"""`Stream`: an iterator of the chunks of a run, and `AsyncStream`, which has the run in a thread."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Generator as ChunkGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Any, TypeVar

from engine.decoding.driver import Driver
from engine.errors import EngineError
from engine.output.stream_buffer import StreamBuffer
from engine.result import Generation, StreamChunk

T = TypeVar("T")


def _leave(chunks: ChunkGenerator[StreamChunk, None, None], buffer: StreamBuffer) -> None:
    with suppress(ValueError):  # another thread is in it
        chunks.close()
        buffer.close()  # a generator of which nothing was read does not end the streamer


class Stream:
    """An iterator of chunks. It may be left early: `result()` then returns what was generated so far.

    The run ends with the last chunk, with `close()`, or where `with engine.stream(...) as chunks:` ends.
    """

    def __init__(self, driver: Driver, model: str):
        """model: its name in `repr`."""
        self._driver, self._model, self._new_tokens = driver, model, 0
        self._chunks = driver.chunks()
        # On collection and before the process ends: the cleanup of a run needs a working interpreter.
        weakref.finalize(self, _leave, self._chunks, driver.loop.stream_buffer)

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        self._check_idle()
        chunk = next(self._chunks)
        self._new_tokens += len(chunk.tokens)
        return chunk

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the run, if it has not ended; there are no further chunks. Raises `EngineError` during a step."""
        self._check_idle()
        self._chunks.close()
        self._driver.loop.close()  # where nothing was read, the generator has not

    def _check_idle(self) -> None:
        if inspect.getgeneratorstate(self._chunks) == inspect.GEN_RUNNING:
            raise EngineError(
                "the stream is in a step, in another thread or around this call: to end it from there, start it with "
                "cancellation=threading.Event() and set that"
            )

    def __repr__(self) -> str:
        return f"Stream({self._model}, cache={self._driver.loop.cache_name!r}, {self._new_tokens} new tokens shown)"

    @property
    def given_up(self) -> bool:
        """Whether a second Ctrl-C came while the partial result was made: there is none."""
        return self._driver.loop.given_up

    def result(self) -> Generation:
        """End the stream, if it has not ended: the generation. Raises `EngineError` where it is `given_up`."""
        self.close()
        return self._driver.loop.result()


class Cancelled(Event):
    """Set by itself or with another event. event: see `cancellation` of `engine.generate`; None for no other."""

    def __init__(self, event: Any = None):
        super().__init__()
        self._other = event

    def is_set(self) -> bool:
        return super().is_set() or (self._other is not None and bool(self._other.is_set()))


class AsyncStream:
    """An asynchronous iterator of chunks. It may be left early, as a `Stream`.

    The run ends with the last chunk, with `aclose()`, where `async with gen.astream(...) as chunks:` ends, or where the
    task that waits for a chunk is cancelled: then after the step that it is in.
    """

    def __init__(self, begin: Callable[[], Stream], cancelled: Cancelled):
        """begin: starts the run, in the thread. cancelled: ends it."""
        self._begin, self._cancelled, self._is_closed = begin, cancelled, False
        self._stream: Stream | None = None
        self._thread = ThreadPoolExecutor(1, "kvengine-stream")  # it ends when this object is gone

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> StreamChunk:
        chunk = None if self._is_closed else await self._in_thread(lambda: next(self._begun(), None))
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the run, if it has not ended, and wait for that; there are no further chunks."""
        self._is_closed = True
        self._cancelled.set()  # a step that runs for another task ends in `GenerationCancelled`
        await self._in_thread(lambda: None if self._stream is None else self._stream.close())

    async def result(self) -> Generation:
        """End the run, if it has not ended: the generation."""
        return await self._in_thread(lambda: self._begun().result())

    def _begun(self) -> Stream:
        if self._stream is None:
            self._stream = self._begin()
        return self._stream

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except asyncio.CancelledError:
            self._cancelled.set()
            raise
