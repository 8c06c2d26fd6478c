"""`ScoredText`: a strategy whose text is given, for the log probabilities that a model gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from strategies import Emit, Flow, Forward, Task

_TOKENS = 64  # whose logits exist at once


@dataclass(frozen=True)
class ScoredText:
    """Feeds `tokens` after the prompt of one row, and emits them. samples: it draws nothing."""

    tokens: tuple[int, ...]
    name: ClassVar[str] = "scored_text"
    samples: ClassVar[bool] = False

    def flow(self, task: Task) -> Flow:
        given = torch.tensor([self.tokens], device=task.ids.device)
        yield Forward(task.ids)
        yield Emit(given[:, :1])
        for begin in range(0, given.shape[1] - 1, _TOKENS):
            fed = given[:, begin : begin + _TOKENS][:, : given.shape[1] - 1 - begin]
            yield Forward(fed, all_logits=True)
            yield Emit(given[:, begin + 1 : begin + 1 + fed.shape[1]])
