"""Greedy decoding: the most probable token, every time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.largest import highest
from strategies.operations import Flow, Needs, Task, one_token_per_step
from strategies.registry import register
from strategies.speculative import nothing_proposed, speculative_loop


@register
@dataclass(frozen=True)
class Greedy:
    """Takes the highest score; the lowest token id on ties. It has no options."""

    name: ClassVar[str] = "greedy"
    samples: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(score_copies=2)

    def flow(self, task: Task) -> Flow:
        if task.forced is not None:
            return speculative_loop(task, False, nothing_proposed)
        return one_token_per_step(task, highest)
