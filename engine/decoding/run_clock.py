"""`RunClock`: when a run began, gave its first token and ended, without the time that its consumer took."""

from __future__ import annotations

import time


class RunClock:
    """All times in seconds. started: of the call, by `time.perf_counter`. away_s: taken by a stream's consumer."""

    def __init__(self, started: float):
        self._started, self.away_s = started, 0.0
        self._ready_s = time.perf_counter()
        self._first_token_s: float | None = None
        self.has_first_token = False
        self._ended_s: float | None = None

    def begin(self) -> None:
        """The first operation comes now: since the object was made, the consumer had the run."""
        self.away_s += time.perf_counter() - self._ready_s

    def first_token(self) -> None:
        """The first token is there."""
        self._first_token_s, self.has_first_token = self._now(), True

    def end(self) -> None:
        if self._ended_s is None:
            self._ended_s = self._now()

    @property
    def has_ended(self) -> bool:
        return self._ended_s is not None

    def _now(self) -> float:
        return time.perf_counter() - self.away_s

    def rates(self, prompt_tokens: int, decoded_tokens: int) -> dict[str, float | None]:
        """Fields of `Stats`. decoded_tokens: new ones, without the first of each row, which comes from the prefill."""
        first_token_s = self._first_token_s
        prefill_s = None if first_token_s is None else first_token_s - self._started
        decode_s = None if first_token_s is None else self._started + self.total_s - first_token_s
        return {
            "ttft_s": prefill_s,
            "prefill_tokens_per_s": None if not prefill_s else prompt_tokens / prefill_s,
            "decode_tokens_per_s": None if not decode_s or decoded_tokens < 1 else decoded_tokens / decode_s,
        }

    @property
    def total_s(self) -> float:
        assert self._ended_s is not None
        return self._ended_s - self._started
