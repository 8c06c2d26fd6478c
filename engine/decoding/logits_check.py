"""Whether tokens can be chosen by the scores of a run: of its model, of its draft, and as the processors left them.

To `argmax` a NaN is more than any number, and where all scores are -inf token 0 is the best: a text would go on with
nonsense without a word. Looking costs one reduction, and the host sees what came of it when it sees the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.decoding.guided_session import GuidedSession
from engine.decoding.model_session import ModelSession
from engine.decoding.token_buffer import Sent, Tokens, arrived
from engine.request.request import Request
from strategies import NoCandidateError


@dataclass(frozen=True)
class _Logits:
    """What a forward returned: logits [rows, tokens, vocabulary], of type `dtype` before they were copied.

    column: the first one of the run that depends on them. number: for which new token the first of them are, from 1 on.
    fed: tokens that the session was fed before; None for a draft. peaks: of every row the highest, NaN where one
    column's is not finite.
    """

    column: int
    number: int
    fed: int | None
    logits: torch.Tensor
    dtype: torch.dtype
    peaks: Sent


@dataclass(frozen=True)
class _Scores:
    """What the processors made of `given` for the texts `ids`: scores [rows, vocabulary].

    column: the one whose tokens they choose. forwards: how many there had been. peaks: the highest of every row.
    """

    column: int
    forwards: int
    ids: torch.Tensor
    given: torch.Tensor
    scores: torch.Tensor
    peaks: Sent


class LogitsCheck:
    """Of the scores of one run. Its methods raise `NoCandidateError`, which says what was found, for which token of
    which rows.

    session: the model's, which is then brought back to where it was before the forward. running, everywhere: which rows
    have not ended; the others may get anything.
    """

    def __init__(self, request: Request, tokens: Tokens, session: ModelSession | GuidedSession):
        self._processing, self._tokens, self._lane = request.processing, tokens, session
        self._prompts, self._prompt_columns = len(request.prompt.ids), request.prompt.columns
        # +inf is the best there is, but nothing can be weighed against it.
        self._weighs = request.strategy.samples or request.needs.rows_per_prompt > 1
        self._forwards = 0
        self._logits: list[_Logits] = []
        self._scores: list[_Scores] = []

    def look(self, logits: torch.Tensor, dtype: torch.dtype, fed: int | None, running: Sequence[bool]) -> None:
        """At what a forward returned: see `_Logits`. Where tokens are read late, it is judged with them."""
        self._forwards += 1
        if self._processing.repairs:
            return
        tokens, column = logits.shape[1], self._tokens.written
        peaks = logits.amax(dim=-1)
        peaks = peaks[:, 0] if tokens == 1 else peaks.where(peaks.isfinite(), math.nan).amax(dim=-1)
        number = column - self._tokens.prompt + 1
        if fed is not None:  # the texts of a search are not written before its end
            number = self._lane.fed - self._prompt_columns - tokens + 2
        self._logits.append(_Logits(column, number, fed, logits, dtype, self._tokens.send(peaks)))
        if not self._tokens.late:
            self._check_logits(running)

    def process(self, ids: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """What the processors make of scores [rows, vocabulary] for the texts `ids`, looked at too."""
        scores, column = self._processing(ids, given), ids.shape[1]
        if self._processing.names:
            # What was asked about this column before the last forward was about texts that were only tried.
            kept = [one for one in self._scores if one.column != column or one.forwards == self._forwards]
            peaks = self._tokens.send(scores.amax(dim=-1))
            self._scores = [*kept, _Scores(column, self._forwards, ids, given, scores, peaks)]
        return scores

    def before_write(self, running: Sequence[bool]) -> None:
        """Judge what the tokens of a column were chosen by, if it is read at once."""
        if not self._tokens.late:
            self._check_scores(running, self._tokens.written)

    def before_read(self, running: Sequence[bool]) -> None:
        """The same, if it is read late."""
        if self._tokens.late:
            self._check_logits(running, self._tokens.read)
            self._check_scores(running, self._tokens.read)

    def before_rows(self, running: Sequence[bool]) -> None:
        """Judge everything: rows change places, for which the device is waited for anyway."""
        self._check_logits(running)
        self._check_scores(running)

    def _check_logits(self, running: Sequence[bool], column: float = math.inf) -> None:
        for one in [one for one in self._logits if one.column <= column]:
            peaks = arrived(one.peaks)
            rows = [row for row in _counting(peaks, running) if not math.isfinite(peaks[row])]
            if rows:
                if one.fed is not None:
                    self._lane.go_back(one.fed)
                raise NoCandidateError(self._about_logits(one, rows, peaks))
        self._logits = [one for one in self._logits if one.column > column]

    def _check_scores(self, running: Sequence[bool], column: float = math.inf) -> None:
        for one in [one for one in self._scores if one.column <= column]:
            peaks = arrived(one.peaks)
            # A search does without a row that nothing comes after, as long as the prompt has others.
            each_counts = column < math.inf or len(peaks) == len(running) == self._prompts
            rows = [row for row in _counting(peaks, running) if self._is_lost(peaks[row], each_counts)]
            if rows:
                raise NoCandidateError(self._about_scores(one, rows, peaks))
        self._scores = [one for one in self._scores if one.column > column]

    def _is_lost(self, peak: float, each_counts: bool = True) -> bool:
        return math.isnan(peak) or (peak == math.inf and self._weighs) or (peak == -math.inf and each_counts)

    def _about_logits(self, one: _Logits, rows: list[int], peaks: list[float]) -> str:
        tokens = one.logits.shape[1]
        which = f"new token {one.number}" if tokens == 1 else f"new tokens {one.number} to {one.number + tokens - 1}"
        told = f"returned {_found(one.logits, rows)} for {which} of {self._named(rows, peaks)}"
        remedy = (
            f"they were computed in {str(one.dtype).removeprefix('torch.')}: float16 overflows above 65504, where "
            "bfloat16 and float32 do not; in other types look for NaN in the weights and in the inputs"
        )
        if one.fed is None:
            return (
                f"the draft {told}, so what it proposes is nonsense, while the model and its text are sound: leave "
                f"assistant_model out, or repair the draft ({remedy})"
            )
        return f"the model {told}, by which no token can be chosen; {remedy}"

    def _about_scores(self, one: _Scores, rows: list[int], peaks: list[float]) -> str:
        who = self._processing.culprit(one.ids, one.given, self._are_lost)
        return (
            f"{who} made {_found(one.scores, rows)} of the model's finite logits for new token "
            f"{one.column - self._tokens.prompt + 1} of {self._named(rows, peaks)}, by which no token can be chosen: a "
            "logits processor may set scores to -inf, but not all of a row, and none to NaN or +inf"
        )

    def _are_lost(self, scores: torch.Tensor) -> bool:
        return any(self._is_lost(peak) for peak in scores.amax(dim=-1).tolist())

    def _named(self, rows: list[int], peaks: list[float]) -> str:
        """Of several rows per prompt, also which prompt they are of."""
        names = f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))}"
        if len(peaks) == self._prompts:
            return names
        prompts = sorted({row * self._prompts // len(peaks) for row in rows})
        return f"{names} (of prompt{'s' * (len(prompts) > 1)} {', '.join(map(str, prompts))})"


def _counting(peaks: list[float], running: Sequence[bool]) -> list[int]:
    """The rows that count. A strategy may have some of its rows processed at a time: then it is not known which."""
    return [row for row in range(len(peaks)) if len(running) != len(peaks) or running[row]]


def _found(scores: torch.Tensor, rows: list[int]) -> str:
    """What is wrong with the scores of these rows, with numbers."""
    scores = scores[rows]
    counts = {"NaN": int(scores.isnan().sum()), "+inf": int(scores.isposinf().sum())}
    found = " and ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{found} among {scores.numel()} scores" if found else f"nothing but -inf in {scores.numel()} scores"
