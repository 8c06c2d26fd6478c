"""Whether tokens can be chosen by the scores of a run: of its model, of its draft, and as the processors left them.

`argmax` takes NaN for the highest value, and token 0 where all scores are -inf. The check costs one reduction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch

from engine.decoding.model_session import ModelSession
from engine.decoding.stopping import Stopping
from engine.decoding.token_buffer import Sent, Tokens, arrived
from engine.request.request import Request
from strategies import NoCandidateError

_TYPES = "float16 overflows above 65504, where bfloat16 and float32 do not; in other types look for NaN in the weights "
_TYPES += "and in the inputs"


class _Values(NamedTuple):
    """Logits [rows, tokens, vocabulary] of a forward, or scores [rows, 1, vocabulary] that processors made.

    column: the first one whose tokens they choose. number: which new token that is, from 1 on. forwards: how many there
    had been. peaks: the highest value of every row; of logits NaN where that of a token is not finite. dtype: the
    model's. fed: tokens that the model was fed before; None for a draft. asked: ids and scores the processors got.
    """

    column: int
    number: int
    forwards: int
    values: torch.Tensor
    peaks: Sent
    dtype: torch.dtype | None = None
    fed: int | None = None
    asked: tuple[torch.Tensor, torch.Tensor] | None = None


class LogitsCheck:
    """Its methods raise `NoCandidateError`, and roll `session` back. stopping: knows which rows have ended."""

    def __init__(self, request: Request, tokens: Tokens, session: ModelSession, stopping: Stopping):
        self._processing, self._tokens, self._session, self._stopping = request.processing, tokens, session, stopping
        self._prompts, self._prompt_columns = len(request.prompt.ids), request.prompt.columns
        # +inf is the best there is, but nothing can be weighed against it.
        self._weighs = request.strategy.samples or request.needs.rows_per_prompt > 1
        self._forwards = 0
        self._logits: list[_Values] = []
        self._scores: list[_Values] = []

    def record(self, logits: torch.Tensor, dtype: torch.dtype, fed: int | None) -> None:
        """Check what a forward returned: see `_Values`. Where tokens are read late, it is checked with them."""
        self._forwards += 1
        if self._processing.repairs:
            return
        tokens, column = logits.shape[1], self._tokens.written
        peaks = logits.amax(dim=-1)
        if not self._tokens.late and _are_finite(chain.from_iterable(peaks.tolist())):
            return
        peaks = peaks[:, 0] if tokens == 1 else peaks.where(peaks.isfinite(), math.nan).amax(dim=-1)
        number = column - self._tokens.prompt + 1
        if fed is not None:  # the texts of a search are not written before its end
            number = self._session.fed - self._prompt_columns - tokens + 2
        sent = self._tokens.send(peaks)
        self._logits.append(_Values(column, number, self._forwards, logits, sent, dtype, fed))
        if not self._tokens.late:
            self._check(self._logits)

    def process(self, ids: torch.Tensor, raw_scores: torch.Tensor) -> torch.Tensor:
        """The scores that the processors make of `raw_scores` [rows, vocabulary] for the texts `ids`; checked later."""
        scores, column = self._processing(ids, raw_scores), ids.shape[1]
        # What was asked about this column before the last forward was about texts that were only tried.
        pending = [entry for entry in self._scores if entry.column != column or entry.forwards == self._forwards]
        number, peaks = column - self._tokens.prompt + 1, self._tokens.send(scores.amax(dim=-1))
        added = _Values(column, number, self._forwards, scores[:, None], peaks, asked=(ids, raw_scores))
        self._scores = [*pending, added]
        return scores

    def before_write(self) -> None:
        """Check what the tokens of a column were chosen by, if it is read at once."""
        if not self._tokens.late:
            self._check(self._scores, self._tokens.written)

    def before_read(self) -> None:
        """The same, if it is read late."""
        if self._tokens.late:
            self._check(self._logits, self._tokens.read)
            self._check(self._scores, self._tokens.read)

    def before_rows(self) -> None:
        """Check everything: rows change places, for which the device is waited for anyway."""
        self._check(self._logits)
        self._check(self._scores)

    def _check(self, pending: list[_Values], column: float = math.inf) -> None:
        if not pending:
            return
        for entry in [entry for entry in pending if entry.column <= column]:
            peaks = arrived(entry.peaks)
            if _are_finite(peaks):
                continue
            running = self._stopping.running
            # A strategy may have some of its rows processed at a time: then it is not known which.
            counts = running if len(running) == len(peaks) else [True] * len(peaks)
            # A search does without a row that nothing comes after, as long as the prompt has others.
            each_counts = column < math.inf or len(peaks) == len(running) == self._prompts
            rows = [row for row, peak in enumerate(peaks) if counts[row] and not math.isfinite(peak)]
            rows = [row for row in rows if entry.asked is None or self._is_lost(peaks[row], each_counts)]
            if rows and entry.fed is not None:
                self._session.go_back(entry.fed)
            if rows:
                raise NoCandidateError(self._message(entry, self._found(entry, rows, len(peaks))))
        pending[:] = [entry for entry in pending if entry.column > column]

    def _is_lost(self, peak: float, each_counts: bool = True) -> bool:
        return math.isnan(peak) or (peak == math.inf and self._weighs) or (peak == -math.inf and each_counts)

    def _are_lost(self, scores: torch.Tensor) -> bool:
        return any(map(self._is_lost, scores.amax(dim=-1).tolist()))

    def _message(self, entry: _Values, problem: str) -> str:
        if entry.asked is not None:
            who = self._processing.culprit(*entry.asked, self._are_lost)
            return (
                f"{who} set {problem}, so no token can be chosen; the model's logits were finite. A logits processor "
                "may set scores to -inf, but not all of a row, and none to NaN or +inf"
            )
        computed = f"they were computed in {str(entry.dtype).removeprefix('torch.')}: {_TYPES}"
        if entry.fed is None:
            return (
                f"the draft returned {problem}, so what it proposes is nonsense, while the model and its text are sound"
                f": leave assistant_model out, or repair the draft ({computed})"
            )
        return f"the model returned {problem}, by which no token can be chosen; {computed}"

    def _found(self, entry: _Values, rows: list[int], of: int) -> str:
        """What is wrong, with counts, for which tokens of which of `of` rows; of which prompts where these differ."""
        values, number = entry.values[rows], entry.number
        last_token = number + values.shape[1] - 1
        counts = {"NaN": int(values.isnan().sum()), "+inf": int(values.isposinf().sum())}
        counts, scores = {name: count for name, count in counts.items() if count}, f"{values.numel()} scores"
        new_tokens = f"new token {last_token}" if last_token == number else f"new tokens {number} to {last_token}"
        prompts = sorted({row * self._prompts // of for row in rows})
        whose = _named("row", rows) + ("" if of == self._prompts else f" (of {_named('prompt', prompts)})")
        if entry.asked is not None:  # what a processor did: "set ..."
            to = " and ".join(f"{count} to {name}" for name, count in counts.items())
            return f"{f'{to} of the' if to else 'all'} {scores} of {whose}{'' if to else ' to -inf'} at {new_tokens}"
        wrong = " and ".join(f"{count} {name}" for name, count in counts.items())
        return f"{f'{wrong} among' if wrong else 'nothing but -inf in'} {scores} for {new_tokens} of {whose}"


def _are_finite(peaks: Iterable[float]) -> bool:
    return all(map(math.isfinite, peaks))


def _named(noun: str, indices: list[int]) -> str:
    return f"{noun}{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}"
