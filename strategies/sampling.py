"""Sampling: draw each token from the model's distribution, as the processors and warpers of the call have shaped it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from strategies.flow import Flow, Process, one_token_per_step
from strategies.registry import register


@register
@dataclass(frozen=True)
class Sampling:
    """Draws once per step over all rows from torch's global generator, so a seed means what it means in transformers.

    Temperature, top-k, top-p and the like are transformers' logits processors and set as in its `GenerationConfig`.
    """

    name: ClassVar[str] = "sampling"
    samples: ClassVar[bool] = True

    def flow(self, ids: torch.Tensor, process: Process) -> Flow:
        return one_token_per_step(ids, process, _draw)


def _draw(scores: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
