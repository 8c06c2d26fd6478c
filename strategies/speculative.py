"""What strategies share that propose several tokens and let the model verify them in one forward.

Rows are emitted together, up to the shortest; verified tokens beyond that are proposed again first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from strategies.draw import draw
from strategies.largest import highest
from strategies.operations import Crop, Emit, Flow, Forward, Operation, Task

# Of processors that are functions of the caller, which need not know what to say of a text that cannot be.
REFUSALS = (LookupError, ValueError, TypeError, AssertionError)


PAUSE = 8  # steps between two proposals that do not pay


@dataclass(frozen=True)
class Proposal:
    """tokens [rows, k]. probabilities: what each was drawn from [rows, k, vocabulary]; None where nothing was drawn.

    is_new: False for fixed tokens alone, which are not counted.
    """

    tokens: torch.Tensor
    probabilities: torch.Tensor | None = None
    is_new: bool = True


class VerifiedText:
    """ids [rows, columns]: what was emitted. over: rows that have ended, bool [rows].

    fixed [rows, n]: what comes next for sure, of row i its first `counts[i]`; it may be fed again, not chosen again.
    """

    def __init__(self, task: Task, samples: bool):
        rows = len(task.ids)
        self.task, self.ids = task, task.ids
        self.over = torch.zeros(rows, dtype=torch.bool, device=task.ids.device)
        self.fixed = task.ids[:, :0]
        self.counts = torch.zeros(rows, dtype=torch.long, device=task.ids.device)
        self._ends = torch.zeros_like(task.ids[:, :0], dtype=torch.bool)  # which of `fixed` end a text
        self._samples = samples

    @property
    def room(self) -> int:
        """Tokens that can be proposed: one more is chosen after them."""
        return self.task.max_columns - self.ids.shape[1] - 1

    @property
    def most_fixed(self) -> int:
        """Waits for the device."""
        return int(self.counts.max())

    def known(self, column: int, otherwise: torch.Tensor) -> torch.Tensor:
        """The tokens [rows] `column` columns after the text: fixed ones, the pad id after the end, else `otherwise`."""
        if column < self.fixed.shape[1]:
            otherwise = self.fixed[:, column].where(column < self.counts, otherwise)
        return otherwise.masked_fill(self.over, self.task.pad_id)

    def verify(self, proposal: Proposal, logits: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The tokens [rows, n] to emit, n > 0, and their scores. logits: [rows, k + 1, vocabulary]."""
        task, drafted = self.task, proposal.tokens
        k, ids = drafted.shape[1], torch.cat([self.ids, drafted], dim=1)
        goes_on, over = torch.ones_like(self.over), self.over  # those whose tokens so far are what was fed; ended
        certain, accepted = torch.zeros_like(self.counts), torch.zeros_like(self.counts)
        tokens: list[torch.Tensor] = []
        ends: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        for column in range(k + 1):
            try:
                text = ids[:, : self.ids.shape[1] + column]
                scores.append(task.process(text, logits[:, column]))
            except REFUSALS:
                if not tokens:
                    raise
                break  # the text may be one that cannot be; where it can, the next verification raises
            is_open = ~over & (column >= self.counts)
            proposed = drafted[:, column] if column < k else None
            q = None if proposal.probabilities is None or column == k else proposal.probabilities[:, column]
            chosen, agrees = task.attempt(partial(self._choose, scores[-1], proposed, q))
            tokens.append(self.known(column, chosen).masked_fill(over, task.pad_id))
            certain += goes_on & ~over
            accepted += goes_on & is_open & agrees
            ends.append(goes_on & task.ends(text, tokens[-1]))
            over = over | ends[-1]
            goes_on = goes_on & (agrees | ~is_open | over)
            if not bool((goes_on & ~over).any()):
                break
        if k and proposal.is_new:
            self._count(k, accepted)
        # A row that has ended does not hold up the others.
        columns = int(certain.masked_fill(over, len(tokens)).min())
        self.fixed, self._ends = torch.stack(tokens, dim=1), torch.stack(ends, dim=1)
        self.counts = certain
        return self.fixed[:, :columns], tuple(scores[:columns])

    def _choose(
        self, scores: torch.Tensor, proposed: torch.Tensor | None, q: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens [rows] that are chosen by `scores`, and whether they are those `proposed`.

        q [rows, vocabulary]: what the proposed ones were drawn from. Then they are accepted as often as possible
        without changing the distribution of the scores (arXiv 2211.17192).
        """
        p, generator = scores.softmax(dim=-1) if self._samples else scores, self.task.generator
        if q is None or proposed is None:
            chosen = draw(p, generator)[:, 0] if self._samples else highest(p)
            return chosen, torch.zeros_like(self.over) if proposed is None else chosen == proposed
        ratio = (p.gather(1, proposed[:, None]) / q.gather(1, proposed[:, None]))[:, 0]
        accepted = torch.rand(ratio.shape, generator=generator, dtype=ratio.dtype, device=ratio.device) < ratio
        residual = (p - q).clamp(min=0)
        # Where they are equal but for rounding, nothing is left to draw from.
        residual = residual.where(residual.sum(dim=-1, keepdim=True) > 0, p)
        return proposed.where(accepted, draw(residual, generator)[:, 0]), accepted

    def _count(self, k: int, accepted: torch.Tensor) -> None:
        proposed = (k - self.counts).clamp(min=0).masked_fill(self.over, 0)
        self.task.drafts.count(int(proposed.sum()), int(accepted.sum()))

    def advance(self, ids: torch.Tensor, emitted: torch.Tensor) -> None:
        """`emitted` was emitted, and the driver answered `ids`."""
        columns = emitted.shape[1]
        answered = ids[:, -columns:]
        # Where it put the pad id, the row had ended in a way that only the driver sees.
        self.over = self.over | self._ends[:, :columns].any(dim=1) | (answered != emitted).any(dim=1)
        self.ids, self.fixed = ids, self.fixed[:, columns:]
        self.counts = (self.counts - columns).clamp(min=0).masked_fill(self.over, 0)


def score_copies(proposed: int, samples: bool) -> int:
    """See `Needs.score_copies`: logits after `proposed` tokens and one more, each twice, and the last scores."""
    return 2 * (proposed + 1) + (3 if samples else 1)


def forced_tokens(text: VerifiedText) -> Proposal | None:
    """What every row has to go on with, as a proposal that will be accepted; None where a row is free to choose."""
    if text.task.forced is None or text.room < 1 or text.most_fixed:
        return None
    forced = text.task.forced(text.ids)
    over = text.over.tolist()
    columns = min((len(tokens) for tokens, ended in zip(forced, over, strict=True) if not ended), default=0)
    columns = min(columns, text.room)
    if not columns:
        return None
    rows = [
        [text.task.pad_id] * columns if ended else tokens[:columns] for tokens, ended in zip(forced, over, strict=True)
    ]
    return Proposal(torch.tensor(rows, dtype=torch.long, device=text.ids.device))


def fixed_tokens(text: VerifiedText) -> Proposal:
    """The fixed tokens of the rows, so that they are fed again, and nothing new."""
    columns = [text.known(column, torch.full_like(text.counts, text.task.pad_id)) for column in range(text.most_fixed)]
    tokens = torch.stack(columns, dim=1)[:, : text.room] if columns else text.ids[:, :0]
    return Proposal(tokens, is_new=False)


def nothing_proposed(text: VerifiedText) -> Generator[Operation, Any, Proposal]:
    """The proposals of a strategy that only reads tokens at once that a constraint has determined."""
    yield from ()
    return Proposal(text.ids[:, :0])


Propose = Callable[[VerifiedText], Generator[Operation, Any, Proposal]]


def speculative_loop(task: Task, samples: bool, propose: Propose) -> Flow:
    """The flow of every strategy that has its proposals verified. They begin with the text's fixed tokens.

    Proposals that do not pay are made now and then only: the text may become one where they do.
    """
    text, waited = VerifiedText(task, samples), 0
    logits = (yield Forward(task.ids))[:, None]
    proposal = Proposal(task.ids[:, :0])
    while True:
        tokens, scores = text.verify(proposal, logits)
        wrong = proposal.tokens.shape[1] - (tokens.shape[1] - 1)
        if wrong:
            yield Crop(wrong)
        text.advance((yield Emit(tokens, scores)), tokens)
        del logits, scores  # the next forward makes others
        proposes = task.drafts.pays or waited >= PAUSE
        proposal = forced_tokens(text) or ((yield from propose(text)) if proposes else fixed_tokens(text))
        waited = 0 if proposal.is_new and proposal.tokens.shape[1] else waited + 1
        logits = yield Forward(torch.cat([text.ids[:, -1:], proposal.tokens], dim=1), all_logits=True)
