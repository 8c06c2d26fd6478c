"""Beam search: keep the most probable beginnings, not only the most probable token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from configs import ConfigError, require_positive
from strategies.beam_search import BeamState, Rules, finish, show
from strategies.operations import Flow, Forward, Needs, Rows, Task, read_prompt, repeat_rows_index
from strategies.registry import register


@register
@dataclass(frozen=True)
class Beam:
    """Goes on with the `num_beams` most probable beginnings of every prompt; texts equal transformers'.

    num_return_sequences: how many of the texts are returned, the best first. length_penalty: a text of n tokens has the
    score log-probability / n ** length_penalty, so more than 0 favours long ones. early_stopping: True ends a prompt
    when it has num_beams texts, False when running beams are not likely to do better, "never" when they cannot.
    do_sample: draw the beginnings at random instead of taking the best (beam sampling).
    """

    name: ClassVar[str] = "beam"
    num_beams: int = 4
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    do_sample: bool = False

    def __post_init__(self) -> None:
        check_beams(self.name, self.num_beams, self.num_return_sequences, self.length_penalty, self.early_stopping)

    @property
    def samples(self) -> bool:
        return self.do_sample

    @property
    def needs(self) -> Needs:
        return Needs(
            rows_per_prompt=self.num_beams,
            rows_are_beams=True,
            texts_per_prompt=self.num_return_sequences,
            score_copies=6 if self.do_sample else 3,
        )

    def flow(self, task: Task) -> Flow:
        size = self.num_beams
        rules = Rules(self.length_penalty, self.early_stopping, self.do_sample)
        beams, recorded = BeamState(task, rules, size, first_row=0, stride=size), []
        ids, logits = yield from read_prompt(task, size)
        while True:
            log_probs = task.process(ids, task.attempt(partial(logits.log_softmax, dim=-1)))
            if task.records_scores:
                recorded.append(log_probs)
            beams.advance(log_probs.unflatten(0, (-1, size)))
            if beams.over:
                break
            yield Rows(beams.parents.flatten())
            yield show([beams], self.num_return_sequences, task.ids.shape[1])
            ids = beams.running.ids.flatten(0, 1)
            del logits, log_probs  # the next step makes others
            task.announce(ids)
            logits = yield Forward(ids[:, -1:])
        end = finish([beams.ended], self.num_return_sequences, task.ids.shape[1], tuple(recorded))
        yield Rows(repeat_rows_index(len(task.ids), self.num_return_sequences) * size)
        yield end


def check_beams(
    name: str, num_beams: int, num_return_sequences: int, length_penalty: float, early_stopping: bool | str
) -> None:
    """Raise `ConfigError` for options of the strategy called `name` that cannot be."""
    require_positive(name, num_beams=num_beams, num_return_sequences=num_return_sequences)
    if num_beams == 1:
        raise ConfigError(f"{name}: num_beams=1 is greedy search: ask for 2 or more, or leave the strategy out")
    if num_return_sequences > num_beams:
        raise ConfigError(
            f"{name}: num_return_sequences={num_return_sequences}, but num_beams={num_beams} end with that many texts: "
            "ask for fewer, or for more beams"
        )
    if not isinstance(length_penalty, (int, float)):
        raise ConfigError(f"{name}: length_penalty={length_penalty!r}, but it is a number")
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise ConfigError(f"{name}: early_stopping={early_stopping!r}, but it is True, False or 'never'")
