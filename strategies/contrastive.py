"""Contrastive search (Su & Collier 2022, arXiv 2202.06417): the most probable token that is unlike what was said."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from configs import ConfigError
from strategies.operations import Emit, Flow, Forward, Needs, Rows, Task, repeat_rows_index
from strategies.registry import register


@register
@dataclass(frozen=True)
class Contrastive:
    """Of the `top_k` most probable tokens, takes the one with the highest

        (1 - penalty_alpha) * probability - penalty_alpha * similarity

    where similarity is the largest cosine between its last hidden state and those of all positions before it. Every
    candidate is fed once, as a row of its own.
    """

    name: ClassVar[str] = "contrastive"
    samples: ClassVar[bool] = False
    penalty_alpha: float = 0.6
    top_k: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.penalty_alpha <= 1:
            raise ConfigError(f"{self.name}: penalty_alpha={self.penalty_alpha}, but it lies between 0 and 1")
        if self.top_k < 2:
            raise ConfigError(f"{self.name}: top_k={self.top_k}, but it needs 2 candidates or more to choose from")

    @property
    def needs(self) -> Needs:
        return Needs(rows_per_prompt=self.top_k, scored_rows=1, score_copies=3, hidden_states=True)

    def flow(self, task: Task) -> Flow:
        ids = task.ids
        logits, hidden = yield Forward(ids, hidden=True)
        k = min(self.top_k, logits.shape[-1])
        context = _directions(hidden)
        visible = task.mask != 0  # padding is no context
        first_rows = torch.arange(len(ids), device=ids.device) * k
        while True:
            scores = task.process(ids, logits)
            probabilities, candidates = task.attempt(partial(_likeliest, scores, k))
            yield Rows(repeat_rows_index(len(ids), k))
            del logits  # the next step makes others
            logits, hidden = yield Forward(candidates.reshape(-1, 1), hidden=True)
            states = _directions(hidden).unflatten(0, (-1, k))[:, :, 0]  # [rows, k, width]
            cosines = (states @ context.transpose(1, 2)).masked_fill(~visible[:, None], -1)
            value = (1 - self.penalty_alpha) * probabilities - self.penalty_alpha * cosines.amax(dim=-1)
            value = value.masked_fill(scores.gather(1, candidates) == -torch.inf, -torch.inf)  # processors forbid it
            best = value.argmax(dim=-1, keepdim=True)  # [rows, 1], the first on ties
            winners = first_rows + best[:, 0]
            yield Rows(winners)
            ids = yield Emit(candidates.gather(1, best), (scores,))
            logits = logits[winners]
            chosen = states.gather(1, best[..., None].expand(-1, -1, states.shape[-1]))
            context = torch.cat([context, chosen], dim=1)
            visible = torch.nn.functional.pad(visible, (0, 1), value=True)


def _likeliest(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, candidates = scores.softmax(dim=-1).topk(k)
    return values, candidates


def _directions(states: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(states.float(), dim=-1)
