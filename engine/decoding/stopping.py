"""When a row ends: end-of-sequence ids, stop strings, the caller's criteria, time and length. Decided on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import StoppingCriteriaList

from engine.errors import OptionError
from engine.output.detokenizer import RowText
from engine.request.logits_processors import name_of


class Criteria(StoppingCriteriaList):
    """Criteria whose verdicts are checked: each is bool [rows], or one for all rows."""

    def __call__(self, ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None, **more: Any) -> torch.Tensor:
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for criterion in self:
            ended |= _checked(name_of(criterion), criterion(ids, scores, **more), len(ids)).to(ids.device)
        return ended


def _checked(name: str, verdict: Any, rows: int) -> torch.Tensor:
    told = f"the stopping criterion {name} returns whether each of {rows} rows ends, bool [{rows}]"
    try:
        found = torch.as_tensor(verdict)
    except (ValueError, TypeError, RuntimeError) as error:
        raise OptionError(f"{told}, but it returned {verdict!r:.80}") from error
    if found.is_floating_point() or found.is_complex() or list(found.shape) not in ([], [1], [rows]):
        raise OptionError(f"{told}, but it returned {found.dtype} {list(found.shape)}")
    return found.bool()


class Stopping:
    """`reasons[row]` is None while the row runs, then why it ended: the first of the reasons in the order below.

    eos: `eos_ids`; stop_string: `texts`; criteria: `criteria`; time: `time_criteria`; length: `max_columns` reached.
    """

    def __init__(
        self,
        rows: int,
        max_columns: int,
        eos_ids: Sequence[int],
        criteria: StoppingCriteriaList,
        time_criteria: StoppingCriteriaList,
    ):
        self.reasons: list[str | None] = [None] * rows
        self._last_column = max_columns
        self._eos_ids = frozenset(eos_ids)
        self._criteria = (("criteria", criteria), ("time", time_criteria))

    @property
    def done(self) -> bool:
        return all(reason is not None for reason in self.reasons)

    def check(
        self,
        columns: int,
        tokens: Sequence[int],
        texts: Sequence[RowText] | None,
        seen_by_criteria: Callable[[], tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]],
    ) -> None:
        """Look at the last of `columns` columns: `tokens` are its ids on the host.

        seen_by_criteria: the ids [rows, columns] and the scores so far, asked for only where there are criteria.
        """
        for row, token in enumerate(tokens):
            if self.reasons[row] is None:
                self.reasons[row] = self._said_by_itself(token, None if texts is None else texts[row])
        # Whatever these raise, the rows that have ended by themselves are known to have.
        verdicts = [(reason, criteria(*seen_by_criteria()).tolist()) for reason, criteria in self._criteria if criteria]
        for row, known in enumerate(self.reasons):
            if known is None:
                told = [reason for reason, verdict in verdicts if verdict[row]]
                at_end = ["length"] if columns >= self._last_column else []
                self.reasons[row] = next(iter(told + at_end), None)

    def _said_by_itself(self, token: int, text: RowText | None) -> str | None:
        if token in self._eos_ids:
            return "eos"
        return "stop_string" if text is not None and text.stopped else None

    def why(self, ids: torch.Tensor, text: RowText | None) -> str:
        """Why a text has ended with `ids` [columns], as its strategy found."""
        said = self._said_by_itself(int(ids[-1]), text)
        if said is not None or len(ids) >= self._last_column:
            return said or "length"
        told = [reason for reason, criteria in self._criteria if criteria and bool(criteria(ids[None], None).all())]
        return next(iter(told), "criteria")

    def select_rows(self, index: torch.Tensor) -> None:
        self.reasons = [self.reasons[row] for row in index.tolist()]
