"""A run among others: its turns, and what it takes to compute its steps together with those of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput

from caches import EngineCache
from engine.decoding.driver import Driver, Turn
from engine.decoding.loop import DecodingLoop
from engine.model.model_runner import ModelRunner
from engine.result import StreamChunk
from engine.serving.batch_request import BatchRequest
from engine.serving.counts import BatchState, Counts
from strategies import Forward


@dataclass(eq=False)
class Run:
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
    def loop(self) -> DecodingLoop:
        return self.driver.loop

    @property
    def rows(self) -> int:
        """Rows that the model computes, once every prompt has all its rows."""
        return self.loop.request.rows

    @property
    def fed(self) -> int:
        """Columns given to the model so far."""
        return self.loop.session.fed

    @property
    def reads(self) -> bool:
        return self.is_reading and not self.is_parked

    @property
    def decodes(self) -> bool:
        return not (self.is_reading or self.is_parked)

    @property
    def cache(self) -> EngineCache:
        return self.loop.session.cache

    @property
    def bytes(self) -> int:
        """Of its cache on the device at most: as planned, or what it has."""
        return 0 if self.is_parked else max(self.planned_bytes, self.cache.device_bytes)

    @property
    def bytes_by_place(self) -> dict[str, int]:
        """Of its cache by where they are: "device", "host", "disk", ..."""
        return getattr(self.cache, "bytes_by_place", {"device": self.cache.device_bytes})

    def go_on(self, computed: ModelOutput | None) -> bool:
        """Go on to its next forward. computed: the outputs of the one that is due. Whether it has come to its end."""
        was_due = self.forward is not None
        if was_due:
            self.is_reading = False
        try:
            item = self.turns.send(computed) if was_due else next(self.turns)
            while isinstance(item, StreamChunk):
                self.request.add_chunk(item)
                item = next(self.turns)
        except StopIteration:
            return True
        self.forward = item
        return False

    def release(self) -> None:
        """Free what it has computed, after its end: frames that its error came through may keep the run."""
        del self.driver, self.turns

    @property
    def why_alone(self) -> str | None:
        """Why the forward that is due cannot be computed together with those of other runs; None where it can."""
        forward = self.forward
        assert forward is not None
        if forward.model != "main" or forward.tokens.shape[1] > 1:
            return "it feeds several tokens, or feeds them to a draft"
        if self.loop.request.output_flags:
            return "it returns what layers record"
        return self.loop.session.why_alone

    def prepare(self) -> tuple[EngineCache, torch.Tensor]:
        """Before a joined step: the cache, and the tokens [rows, 1] that are fed to it."""
        session, tokens, forward = self.loop.session, self.loop.transcript.tokens, self.forward
        assert forward is not None
        session.attempt(lambda: tokens.reserve(1))
        fed_tokens = session.prepare(forward.tokens)
        return session.cache, fed_tokens

    @property
    def can_be_parked(self) -> bool:
        """Not again before it has been fed more: else newer runs could keep it from ever ending."""
        return not self.is_parked and self.cache.device_bytes > 0 and self.fed > self.fed_before

    def park(self, ended: int) -> None:
        """Free the memory of its cache until its next forward. ended: how many requests have by now."""
        with torch.no_grad():
            self.loop.session.park()
        self.is_parked, self.ended_before, self.fed_before = True, ended, self.fed


def batch_state(runs: Sequence[Run], waiting: int) -> BatchState:
    """What a batch does that has begun `runs`."""
    running = [run for run in runs if not run.is_parked]
    cache_bytes = sum((Counter(run.bytes_by_place) for run in runs), Counter())
    rows = sum(run.rows for run in running)
    return BatchState(waiting, len(running), len(runs) - len(running), rows, dict(cache_bytes))


def step_together(runner: ModelRunner, runs: Sequence[Run], counts: Counts) -> list[ModelOutput]:
    """One forward over the rows of all `runs`: the outputs of each. Their caches are left with an open step."""
    with torch.no_grad():
        inputs = [run.prepare() for run in runs]
        hidden = any(run.forward is not None and run.forward.hidden for run in runs)
        executors = [run.loop.session.executor for run in runs]
        routed = all(executor.routed for executor in executors)
        compiled = all(executor.is_compiled for executor in executors)
        outputs = runner.step_together(inputs, hidden, routed, compiled)
    rows = sum(len(tokens) for _, tokens in inputs)
    counts.add_step(rows, sum(len(tokens) * (cache.total_tokens + 1) for cache, tokens in inputs))
    return outputs


_PIECE_SHARE = 0.8  # of the time of a step, for the piece of a prompt that is read before the next one
_MOST_SHARES = 8  # of this kind in a turn, however many prompts wait to be read
_SMALLEST_PIECE, _LARGEST_PIECE = 32, 256  # tokens of a prompt; fewer take about as long


class ReadingTime:
    """How much of new prompts is read between the steps of others, by what steps and tokens have taken.

    piece_tokens, reads_first: see `Scheduler`. step_s: of the last step.
    """

    def __init__(self, piece_tokens: int | None, reads_first: bool):
        self._piece_tokens, self.reads_first = piece_tokens, reads_first
        self.step_s = self._token_s = 0.0  # the second: of a token of a prompt
        self._left_s = 0.0  # that prompts may take; below 0 where they took more

    @property
    def is_left(self) -> bool:
        return self._left_s > 0

    def begin_turn(self, prompts: int, decoding: int) -> bool:
        """A turn with so many runs that are read and that decode: whether prompts get a share of time. Else one piece
        is read."""
        if prompts == 0 or self._piece_tokens is not None or decoding == 0:
            self._left_s = 0.0
            return False
        self._left_s += _PIECE_SHARE * self.step_s * min(prompts, _MOST_SHARES)
        return True

    def add_piece(self, tokens: int, seconds: float) -> None:
        """A piece was read."""
        self._left_s -= seconds
        if tokens >= _SMALLEST_PIECE // 2:
            self._token_s = seconds / tokens

    def piece(self, decoding: bool) -> int:
        """Tokens of a prompt that are read at once. decoding: whether others decode."""
        if self._piece_tokens is not None:
            return self._piece_tokens
        if self.reads_first or not decoding:
            return _LARGEST_PIECE
        tokens = int(self._left_s / self._token_s) if self._token_s else 0
        return min(max(_SMALLEST_PIECE, tokens), _LARGEST_PIECE)
