"""Assisted decoding: a small draft model proposes tokens, and the model verifies them in one forward."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from configs import ConfigError, require_positive
from strategies.draw import draw
from strategies.largest import highest
from strategies.operations import Crop, Flow, Forward, Needs, Operation, Task
from strategies.registry import register
from strategies.speculative import REFUSALS, Proposal, VerifiedText, score_copies, speculative_loop

SCHEDULES = ("constant", "heuristic", "heuristic_transient")


@register
@dataclass(frozen=True)
class Assisted:
    """The text is that of the model alone: greedy, or with `do_sample` drawn from its distribution.

    num_assistant_tokens: how many tokens are proposed at a time. num_assistant_tokens_schedule: "constant", or
    "heuristic": two more after all of them were accepted in all rows, else one fewer, kept with the draft from call to
    call; "heuristic_transient" only within a call. assistant_confidence_threshold: fewer are proposed where the draft's
    probability of its own token falls below this, in the mean of the rows that go on; 0 turns it off.
    """

    name: ClassVar[str] = "assisted"
    num_assistant_tokens: int = 20
    num_assistant_tokens_schedule: str = "constant"
    assistant_confidence_threshold: float = 0.4
    do_sample: bool = False

    def __post_init__(self) -> None:
        require_positive(self.name, num_assistant_tokens=self.num_assistant_tokens)
        if self.num_assistant_tokens_schedule not in SCHEDULES:
            raise ConfigError(
                f"{self.name}: num_assistant_tokens_schedule={self.num_assistant_tokens_schedule!r}, but it is one of "
                f"{', '.join(SCHEDULES)}"
            )
        if not 0 <= self.assistant_confidence_threshold <= 1:
            raise ConfigError(
                f"{self.name}: assistant_confidence_threshold={self.assistant_confidence_threshold}, but it is a "
                "probability, between 0 and 1"
            )

    @property
    def samples(self) -> bool:
        return self.do_sample

    @property
    def needs(self) -> Needs:
        proposed = self.num_assistant_tokens  # a draw keeps the draft's probabilities of each
        copies = score_copies(proposed, self.samples) + (2 * proposed if self.samples else 0)
        keeps_length = self.num_assistant_tokens_schedule == "heuristic"
        return Needs(score_copies=copies, verifies=True, draft=True, keeps_draft_length=keeps_length)

    def flow(self, task: Task) -> Flow:
        drafter = _Drafter(self, task) if task.translation is None else _Translating(self, task)
        return speculative_loop(task, self.samples, drafter.propose)


class _Drafter:
    """Proposes what a draft with the same vocabulary goes on with."""

    def __init__(self, options: Assisted, task: Task):
        self.options, self.task = options, task
        self.length = task.drafts.length or options.num_assistant_tokens
        self.fed = 0  # columns that the draft has read, proposed ones included
        self.read = task.ids[:, :0]  # these columns, in the draft's ids
        self.proposed: torch.Tensor | None = None  # the text with all of the last proposal, in the model's ids

    def propose(self, text: VerifiedText) -> Generator[Operation, Any, Proposal]:
        columns = text.ids.shape[1]
        self.adapt(text)
        k = min(max(self.length, text.most_fixed), text.room)
        if k < 1:
            return Proposal(text.ids[:, :0])
        tokens = yield from self.unread(text.ids, text.over)
        draft_ids, probabilities = text.ids, []
        while True:
            logits = yield Forward(tokens, model="draft")
            q, drawn = self.task.attempt(partial(self.choose, self.scores(draft_ids, logits, columns)))
            tokens = text.known(draft_ids.shape[1] - columns, drawn)[:, None]
            draft_ids = torch.cat([draft_ids, tokens], dim=1)
            if self.options.samples:
                probabilities.append(q)
            proposed = draft_ids.shape[1] - columns
            if proposed == k or (proposed >= text.most_fixed and self.doubts(q.gather(1, tokens)[~text.over])):
                break
            self.fed += 1
        self.read, self.proposed = draft_ids[:, : self.fed], draft_ids
        return Proposal(draft_ids[:, columns:], torch.stack(probabilities, dim=1) if self.options.samples else None)

    def scores(self, ids: torch.Tensor, logits: torch.Tensor, columns: int) -> torch.Tensor:
        """The processed logits, or these as they are where a processor refuses what was proposed after `columns`."""
        try:
            return self.task.process(ids, logits)
        except REFUSALS:
            if ids.shape[1] == columns:
                raise
            return logits

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The probabilities of these scores, and the tokens [rows] taken by them."""
        q = scores.softmax(dim=-1)
        return q, draw(q, self.task.generator)[:, 0] if self.options.samples else highest(q)

    def unread(self, ids: torch.Tensor, over: torch.Tensor) -> Generator[Operation, Any, torch.Tensor]:
        """The tokens of the text that the draft has to read; it rolls back what is not in the text. over: rows that
        have ended, which do not matter."""
        columns = min(self.fed, ids.shape[1] - 1)  # the last token is never one that it has read
        equal = (self.read[:, :columns] == ids[:, :columns]) | over[:, None]
        common = int(equal.all(dim=0).long().cumprod(dim=0).sum())
        if self.fed > common:
            yield Crop(self.fed - common, model="draft")
        self.fed = ids.shape[1]
        return ids[:, common:]

    def adapt(self, text: VerifiedText) -> None:
        """Adapt the length to how much of the last proposal is in the text."""
        if self.proposed is not None and self.options.num_assistant_tokens_schedule != "constant":
            end = self.proposed.shape[1]
            equal = (text.ids[:, :end] == self.proposed[:, : text.ids.shape[1]]) | text.over[:, None]
            self.length = self.length + 2 if text.ids.shape[1] > end and bool(equal.all()) else max(1, self.length - 1)
        self.task.drafts.length = self.length

    def doubts(self, confidence: torch.Tensor) -> bool:
        """Whether it is not worth to go on after tokens that had these probabilities."""
        threshold = self.options.assistant_confidence_threshold
        return threshold > 0 and bool(confidence.mean() < threshold)


class _Translating(_Drafter):
    """Proposes what a draft with a vocabulary of its own goes on with; for one row."""

    def propose(self, text: VerifiedText) -> Generator[Operation, Any, Proposal]:
        translation = self.task.translation
        assert translation is not None
        self.adapt(text)
        translated = translation.to_draft(text.ids)
        k = min(self.length, text.room, translation.max_columns - translated.shape[1] - 1)
        if k < 1:
            return Proposal(text.ids[:, :0])
        tokens, draft_ids = (yield from self.unread(translated, text.over)), translated
        for _ in range(k):
            logits = yield Forward(tokens, model="draft")
            tokens = highest(logits)[:, None]
            draft_ids = torch.cat([draft_ids, tokens], dim=1)
            if self.doubts(logits.softmax(dim=-1).gather(1, tokens)):
                break
        self.read, self.fed = draft_ids[:, :-1], draft_ids.shape[1] - 1
        proposed = translation.to_model(text.ids, draft_ids, translated.shape[1])[:, : text.room]
        self.proposed = torch.cat([text.ids, proposed], dim=1)
        return Proposal(proposed)
