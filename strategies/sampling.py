"""Sampling: draw each token from the model's distribution, as the processors and warpers of the call have shaped it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from configs import require_positive
from strategies.draw import draw
from strategies.operations import Flow, Needs, Task, one_token_per_step
from strategies.registry import register
from strategies.speculative import nothing_proposed, speculative_loop


@register
@dataclass(frozen=True)
class Sampling:
    """Draws once per step over all rows, from the task's generator: a seed means what it means in transformers.

    num_return_sequences: texts per prompt, which is read once for all of them. Temperature, top-k, top-p and the like
    are transformers' logits processors and set as in its `GenerationConfig`.
    """

    name: ClassVar[str] = "sampling"
    samples: ClassVar[bool] = True
    num_return_sequences: int = 1

    def __post_init__(self) -> None:
        require_positive(self.name, num_return_sequences=self.num_return_sequences)

    @property
    def needs(self) -> Needs:
        return Needs(rows_per_prompt=self.num_return_sequences, texts_per_prompt=self.num_return_sequences)

    def flow(self, task: Task) -> Flow:
        if task.forced is not None and self.num_return_sequences == 1:
            return speculative_loop(task, True, nothing_proposed)
        return one_token_per_step(task, partial(_draw, task.generator), self.num_return_sequences)


def _draw(generator: torch.Generator | None, scores: torch.Tensor) -> torch.Tensor:
    return draw(scores.softmax(dim=-1), generator)[:, 0]
