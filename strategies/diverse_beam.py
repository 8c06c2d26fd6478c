"""Diverse beam search (arXiv 1610.02424): groups of beams, each kept from choosing what the groups before it chose."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from configs import ConfigError
from strategies.beam import check_beams
from strategies.beam_search import BeamState, Rules, finish, show
from strategies.operations import Flow, Forward, Needs, Rows, Task, read_prompt, repeat_rows_index
from strategies.registry import register


@register
@dataclass(frozen=True)
class DiverseBeam:
    """Beam search in `num_beam_groups` groups of `num_beams` / `num_beam_groups`.

    diversity_penalty: what a token loses for every beam of an earlier group of the same prompt that chose it in the
    same step; it stays in the scores. The other options as of `Beam`; the texts of all groups compete in the end.
    """

    name: ClassVar[str] = "diverse_beam"
    samples: ClassVar[bool] = False
    num_beams: int = 4
    num_beam_groups: int = 2
    diversity_penalty: float = 0.0
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        check_beams(self.name, self.num_beams, self.num_return_sequences, self.length_penalty, self.early_stopping)
        if self.num_beam_groups < 2 or self.num_beams % self.num_beam_groups:
            raise ConfigError(
                f"{self.name}: num_beams={self.num_beams} cannot be {self.num_beam_groups} groups of equal size: "
                "num_beam_groups has to be 2 or more and divide num_beams"
            )
        if self.diversity_penalty <= 0:
            raise ConfigError(
                f"{self.name}: diversity_penalty={self.diversity_penalty}, and without one over 0 all groups find the "
                "same texts"
            )

    @property
    def needs(self) -> Needs:
        return Needs(
            rows_per_prompt=self.num_beams,
            scored_rows=self.num_beams // self.num_beam_groups,
            rows_are_beams=True,
            texts_per_prompt=self.num_return_sequences,
        )

    def flow(self, task: Task) -> Flow:
        size = self.num_beams // self.num_beam_groups
        rules = Rules(self.length_penalty, self.early_stopping, is_group=True)
        groups = [BeamState(task, rules, size, begin, self.num_beams) for begin in range(0, self.num_beams, size)]
        _, logits = yield from read_prompt(task, self.num_beams)
        recorded: list[torch.Tensor] = []
        while True:
            chosen_by = self._advance(groups, task, task.attempt(partial(logits.log_softmax, dim=-1)))
            recorded += [task.attempt(partial(_of_all_rows, chosen_by))] if task.records_scores else []
            if all(group.over for group in groups):
                break
            yield Rows(torch.cat([group.parents for group in groups], dim=1).flatten())
            yield show(groups, self.num_return_sequences, task.ids.shape[1])
            tokens = torch.cat([group.running.ids[..., -1] for group in groups], dim=1)
            del logits, chosen_by  # the next step makes others
            logits = yield Forward(tokens.view(-1, 1))
        ended = [group.ended for group in groups]
        end = finish(ended, self.num_return_sequences, task.ids.shape[1], tuple(recorded))
        yield Rows(repeat_rows_index(len(task.ids), self.num_return_sequences) * self.num_beams)
        yield end

    def _advance(self, groups: list[BeamState], task: Task, log_probs: torch.Tensor) -> list[torch.Tensor]:
        """One step of all groups in their order; where scores are recorded, those that each chose by."""
        by_group = log_probs.unflatten(0, (len(task.ids), len(groups), -1)).unbind(dim=1)
        penalty = torch.zeros_like(log_probs[: len(task.ids)])  # [prompts, vocabulary]
        chosen_by: list[torch.Tensor] = []  # [prompts, beams of the group, vocabulary]
        for group, scores in zip(groups, by_group, strict=True):
            penalized = task.attempt(partial(_penalized, scores, penalty))
            processed = task.process(group.running.ids.flatten(0, 1), penalized).view_as(scores)
            chosen_by += [processed] if task.records_scores else []
            was_done = group.done
            group.advance(processed)
            tokens = group.running.ids[..., -1].masked_fill(was_done[:, None], task.pad_id)
            penalty.scatter_add_(1, tokens, torch.full_like(tokens, self.diversity_penalty, dtype=penalty.dtype))
        return chosen_by


def _of_all_rows(groups: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(groups, dim=1).flatten(0, 2)


def _penalized(scores: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    return (scores - penalty[:, None]).flatten(0, 1)
