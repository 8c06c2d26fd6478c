"""`TimeLimit`: a limit of time that is over on all ranks of a model as soon as it is over on one."""

from __future__ import annotations

import torch
from transformers import MaxTimeCriteria, StoppingCriteria

from caches.platform.as_tensor import as_tensor
from engine.parallel.ranks import OneProcess


class TimeLimit(StoppingCriteria):
    """limit: whose verdict is shared."""

    def __init__(self, limit: MaxTimeCriteria, ranks: OneProcess):
        self._limit, self._ranks = limit, ranks

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        is_over = bool(as_tensor(self._limit(input_ids, scores, **kwargs)).all())
        return torch.full((len(input_ids),), bool(self._ranks.most(is_over)), device=input_ids.device)


def of_all_ranks(criterion: StoppingCriteria, ranks: OneProcess) -> StoppingCriteria:
    """The criterion, with a verdict for all ranks if it is a limit of time."""
    is_limit = isinstance(criterion, MaxTimeCriteria) and ranks.size > 1
    return TimeLimit(criterion, ranks) if is_limit else criterion
