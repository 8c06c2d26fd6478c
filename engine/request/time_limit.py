"""`TimeLimit`: `max_time`, which is over on all ranks of a model as soon as it is over on one."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import MaxTimeCriteria

from engine.model.ranks import OneProcess


class TimeLimit(MaxTimeCriteria):
    """max_time: seconds since `begun`, a `time.time()`; None is now."""

    def __init__(self, max_time: float, ranks: OneProcess, begun: float | None = None):
        super().__init__(max_time, begun)
        self._ranks = ranks

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        is_over = self._ranks.most(time.time() - self.initial_timestamp > self.max_time)
        return torch.full((len(input_ids),), bool(is_over), device=input_ids.device)


def of_all_ranks(criterion: Any, ranks: OneProcess, begun: float | None = None) -> Any:
    """A criterion; a limit of time is over on all ranks together. begun: of the limit; None for its own."""
    if not isinstance(criterion, MaxTimeCriteria):
        return criterion
    return TimeLimit(criterion.max_time, ranks, criterion.initial_timestamp if begun is None else begun)
