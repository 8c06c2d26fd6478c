"""`Driver`: performs the operations of a strategy; however it stops, the cache is consistent and no token is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from transformers.utils import ModelOutput

from caches.platform.out_of_memory import Exhausted, empty_allocators, in_words, is_out_of_memory, without_frames
from caches.platform.torch_api import set_grad_enabled
from caches.platform.undo import on_failure
from engine.decoding.loop import DecodingLoop, ForwardResult
from engine.decoding.stopping import Cancellation, StopAsked
from engine.errors import (
    GenerationCancelled,
    GenerationInterrupted,
    InvalidLogitsError,
    OptionError,
    OutOfMemoryError,
    UserInterrupt,
)
from engine.result import Generation, StreamChunk
from engine.tables import counted
from strategies import Flow, Forward, NoCandidateError

_Result = TypeVar("_Result")
Turn: TypeAlias = StreamChunk | Forward | None
Answer: TypeAlias = ForwardResult | None


class Driver:
    """Runs `loop`. cancellation: the one that its session checks. at_end: called when the run has come to its end.

    planned_bytes: of the cache on the device, at most.
    """

    def __init__(
        self,
        loop: DecodingLoop,
        cancellation: Cancellation,
        at_end: Callable[[], None],
        planned_bytes: Callable[[], int],
    ):
        self.loop, self._cancellation, self._at_end = loop, cancellation, at_end
        self.planned_bytes = planned_bytes

    def chunks(self) -> Generator[StreamChunk, None, None]:
        """The chunks of the text, as they come."""
        return self.turns()  # type: ignore[return-value]  # without others there are only chunks

    def turns(self, piece_tokens: Callable[[], int] | None = None) -> Generator[Turn, ModelOutput | None, None]:
        """The chunks of the text, with turns for others between the forwards of the run.

        piece_tokens: how many tokens of the prompt are read in a turn; None for a run without others. It yields None
        after such a turn, and every `Forward` before it is performed: `send` its outputs where a joined step has
        computed them, else None.
        """
        run = self.loop
        flow = self._begun(alone=piece_tokens is None)
        failure: Exception | KeyboardInterrupt | None = None
        try:
            try:
                yield from self._steps(flow, piece_tokens)
                run.stream_buffer.close()
                self._cancellation.check_keys()
                run.ranks.check()
            except (Exception, KeyboardInterrupt) as error:
                run.ranks.end()
                # The frames of an out-of-memory error refer to the tensors that filled the memory.
                failure = _exhausted(error) if is_out_of_memory(error) else error
            if failure is not None:  # outside of `except`: the consumer of the last chunks may take a while
                if isinstance(failure, Exhausted):
                    empty_allocators()
                yield from self._shown(self._broken_off(failure))
        except KeyboardInterrupt:  # while the partial result was made
            run.give_up()
            raise
        except BaseException:  # the consumer has left: tokens that it was not shown are discarded
            run.ranks.end()
            run.transcript.discard_unread()
            _without_grad(run.break_off)
            raise
        finally:
            try:
                flow.close()
            finally:
                try:
                    _without_grad(run.close)
                finally:
                    self._cancellation.pass_on()
        if failure is not None:
            try:
                self._raise(failure)
            finally:
                failure = None  # its traceback refers to this frame: else both would wait for a garbage collection
        self._at_end()

    def to_end(self) -> Generation:
        """Run to the end. In the main thread, this run handles SIGINT until it returns."""
        with self._cancellation.noting_keys():
            for _ in self.chunks():
                pass
        self._cancellation.pass_on()
        return self.loop.result()

    def _begun(self, alone: bool) -> Flow:
        """The strategy's flow. Its errors, and a flow that is no generator, are raised before any work."""
        with on_failure(partial(_without_grad, self.loop.close)), on_failure(self.loop.ranks.end):
            flow = self.loop.begin(alone)
            if not all(callable(getattr(flow, name, None)) for name in ("send", "close")):
                raise OptionError(
                    f"the strategy's flow() returned {flow!r:.80}, where a generator of operations belongs: write it "
                    "with `yield`, or return the flow of another strategy"
                )
        return flow

    def _steps(self, flow: Flow, piece_tokens: Callable[[], int] | None) -> Generator[Turn, ModelOutput | None, None]:
        """Perform the operations of the flow until all rows have ended."""
        with self._cancellation.noting_keys():
            self.loop.stream_buffer.begin()
        answers: list[Answer] = [None]  # at most one: nothing else keeps scores while the next ones are computed
        while not self.loop.done:
            forward, chunks = None, list[StreamChunk]()
            with self._cancellation.noting_keys():
                grad = torch.is_grad_enabled()
                try:  # as in `_without_grad`, but that no call comes between the run and its steps
                    set_grad_enabled(False)
                    try:
                        operation = flow.send(answers.pop())
                    except StopIteration:
                        break
                    if not isinstance(operation, Forward):
                        answer, chunks = self.loop.perform(operation)
                        answers.append(answer)
                        del answer
                    elif piece_tokens is None:
                        answers.append(self.loop.forward(operation))
                    else:
                        forward = operation
                    del operation
                finally:
                    set_grad_enabled(grad)
            if forward is not None:
                assert piece_tokens is not None
                answers.append((yield from self._with_others(forward, piece_tokens)))
                forward = None
            if chunks:
                yield from self._shown(chunks)
        yield from self._shown(self.loop.transcript.read_all())

    def _with_others(
        self, forward: Forward, piece_tokens: Callable[[], int]
    ) -> Generator[Turn, ModelOutput | None, ForwardResult]:
        """Perform `forward` in turns: see `turns`."""
        while True:
            with self._cancellation.noting_keys():
                remaining = _without_grad(partial(self.loop.read_piece, forward, piece_tokens()))
            if remaining is None:
                break
            forward = remaining
            yield None
        computed = yield forward
        if computed is None:  # else the cache has an open step
            self._cancellation.check()
        with self._cancellation.noting_keys():
            return _without_grad(partial(self.loop.forward, forward, computed))

    def _shown(self, chunks: list[StreamChunk]) -> Generator[StreamChunk, None, None]:
        for chunk in chunks:
            left_s = time.perf_counter()
            try:
                yield chunk
            finally:
                self.loop.clock.away_s += time.perf_counter() - left_s

    def _broken_off(self, failure: Exception | KeyboardInterrupt) -> list[StreamChunk]:
        try:
            return _without_grad(self.loop.break_off)
        except Exception:
            if not isinstance(failure, KeyboardInterrupt) or isinstance(failure, UserInterrupt):
                raise
            self.loop.give_up()  # a second Ctrl-C raises anywhere, also while rows change places
            return []

    def _raise(self, failure: Exception | KeyboardInterrupt) -> None:
        """Raise the failure, with the partial result."""
        if self.loop.given_up:
            raise failure
        result = self.loop.result()
        if isinstance(failure, KeyboardInterrupt):
            failure.partial = result  # type: ignore[attr-defined]
            try:
                raise failure
            finally:
                del failure  # as above
        when = f"after {counted(max(map(len, result.tokens)), 'new token')} per row"
        advice = "what was generated is in `partial`, with its cache where that can be continued"
        if isinstance(failure, StopAsked):
            raise GenerationCancelled(f"generation was cancelled {when}; {advice}", result)
        if isinstance(failure, Exhausted):
            raise OutOfMemoryError(f"memory was out {when} ({failure}); {advice}", result) from failure.__cause__
        if isinstance(failure, NoCandidateError):
            raise InvalidLogitsError(f"generation stopped {when}: {failure}; {advice}", result)
        description = f"{type(failure).__name__}: {failure}"
        raise GenerationInterrupted(f"generation stopped {when} ({description}); {advice}", result) from failure


def _exhausted(error: Exception | KeyboardInterrupt) -> Exhausted:
    failure = Exhausted(in_words(error))
    failure.__cause__ = without_frames(error)
    return failure


def _without_grad(work: Callable[[], _Result]) -> _Result:
    """As within `torch.no_grad()`, which leaves gradients off in the thread when Ctrl-C comes as it ends."""
    grad = torch.is_grad_enabled()
    try:
        set_grad_enabled(False)
        return work()
    finally:
        set_grad_enabled(grad)
