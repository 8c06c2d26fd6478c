"""When a row ends: end-of-sequence ids, stop strings, the caller's criteria, time and length. Decided on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import MaxTimeCriteria, StoppingCriteriaList

from engine.model.ranks import OneProcess
from engine.output.detokenizer import RowText
from engine.request.generation_helpers import replaces
from engine.request.request import Request
from engine.request.time_limit import of_all_ranks


class Stopping:
    """`reasons[row]` is None while the row runs, then the first of these that ended it.

    "eos": an end-of-sequence id; "stop_string": the row's text; "criteria": those of the caller; "time": `max_time`
    since `begin`, on one of the ranks; "length": `max_columns` of the request.
    """

    def __init__(self, request: Request, ranks: OneProcess):
        self.reasons: list[str | None] = [None] * len(request.prompt.ids)
        self._last_column = request.max_columns
        self._eos_ids = frozenset(request.eos_ids)
        self._time = StoppingCriteriaList()
        self._max_time_s = None if replaces(request.criteria, MaxTimeCriteria) else request.config.max_time
        self._ranks = ranks
        given = type(request.criteria)(of_all_ranks(one, ranks) for one in request.criteria)
        self._criteria = (("criteria", given), ("time", self._time))

    def begin(self) -> None:
        """The first operation comes now: time is counted from here on."""
        if self._max_time_s is not None:
            self._time.append(of_all_ranks(MaxTimeCriteria(self._max_time_s), self._ranks))

    @property
    def done(self) -> bool:
        return None not in self.reasons

    @property
    def running(self) -> list[bool]:
        """Which rows have not ended."""
        return [reason is None for reason in self.reasons]

    def check(
        self,
        columns: int,
        tokens: Sequence[int],
        texts: Sequence[RowText] | None,
        read_by_criteria: Callable[[], tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]],
    ) -> None:
        """Check the last of `columns` columns. tokens: its ids. read_by_criteria: the ids and scores so far."""
        for row, token in enumerate(tokens):
            if self.reasons[row] is None:
                self.reasons[row] = self._own_reason(token, None if texts is None else texts[row])
        # These may raise: the reasons of rows that ended by themselves are set before.
        verdicts = [(reason, criteria(*read_by_criteria()).tolist()) for reason, criteria in self._criteria if criteria]
        if columns >= self._last_column:
            verdicts.append(("length", [True] * len(self.reasons)))
        for reason, verdict in verdicts:
            for row, ends in enumerate(verdict):
                if ends and self.reasons[row] is None:
                    self.reasons[row] = reason

    def _own_reason(self, token: int, text: RowText | None) -> str | None:
        if token in self._eos_ids:
            return "eos"
        return "stop_string" if text is not None and text.stopped else None

    def why(self, ids: torch.Tensor, text: RowText | None) -> str:
        """The reason that a text ended with `ids` [columns], where the strategy found its end."""
        said = self._own_reason(int(ids[-1]), text)
        if said is not None or len(ids) >= self._last_column:
            return said or "length"
        # Criteria of the caller may keep a state of all rows: they are not asked about one.
        return "time" if self._time and bool(self._time(ids[None], None).all()) else "criteria"

    def select_rows(self, index: torch.Tensor) -> None:
        self.reasons = [self.reasons[row] for row in index.tolist()]
