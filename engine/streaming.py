"""`Stream`: an iterator of the chunks of a run."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator as ChunkGenerator
from collections.abc import Iterator
from contextlib import suppress

from engine.decoding.driver import Driver
from engine.errors import EngineError
from engine.output.stream_buffer import StreamBuffer
from engine.result import Generation, StreamChunk


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
