"""The bookkeeping of beam search: running beams, ended texts, and when nothing can get better.

All tensors begin with [prompts, beams]. The rules are transformers': release 5, for diverse groups release 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce

import torch

from strategies.draw import draw
from strategies.largest import largest
from strategies.operations import Finish, Hypothesis, NoCandidateError, Report, Task

_NEVER = -1e9  # the score of what must not be chosen


@dataclass(frozen=True)
class Rules:
    """When a search ends and how the texts that have ended are compared. See `Beam` for the options.

    is_group: the rules of one group of diverse beam search, those of transformers 4. A group is done when its worst
    finished text scores at least as high as the best candidate of the step, finished or not. At the length limit all
    running beams are added, unless it is done. Without it the rules are those of transformers 5: the comparison is with
    the best running beam, and only the best candidates are added.
    """

    length_penalty: float
    early_stopping: bool | str
    do_sample: bool = False
    is_group: bool = False


@dataclass(frozen=True)
class Hypotheses:
    """ids [prompts, n, columns]. rows: in which row of all each new token was chosen, -1 after the end, [prompts, n,
    new columns]. scores [prompts, n], the best first.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    scores: torch.Tensor

    def take(self, index: torch.Tensor) -> Hypotheses:
        """Of every prompt those at `index` [prompts, any]."""
        return Hypotheses(_take(self.ids, index), _take(self.rows, index), self.scores.gather(1, index))

    @property
    def lengths(self) -> torch.Tensor:
        """New tokens of every text, [prompts, n]."""
        return (self.rows >= 0).sum(dim=-1)

    @property
    def are_chosen(self) -> torch.Tensor:
        """Which are more than a placeholder, [prompts, n]."""
        return self.scores > _NEVER / 2

    def best(self, texts: int) -> Hypotheses:
        """The best `texts` of every prompt; of equal ones the first, as in transformers."""
        return self.take(self.scores.sort(dim=1, descending=True, stable=True).indices[:, :texts])

    def then(self, ids: torch.Tensor | int, rows: torch.Tensor | int) -> Hypotheses:
        """With one more column."""
        return Hypotheses(_with_column(self.ids, ids), _with_column(self.rows, rows), self.scores)

    def joined_with(self, texts: Hypotheses) -> Hypotheses:
        pairs = zip((self.ids, self.rows, self.scores), (texts.ids, texts.rows, texts.scores), strict=True)
        return Hypotheses(*(torch.cat(pair, dim=1) for pair in pairs))


class BeamState:
    """A search of `size` beams for every prompt of `task`. first_row: of those of a prompt; stride: rows per prompt."""

    def __init__(self, task: Task, rules: Rules, size: int, first_row: int, stride: int):
        ids = task.ids
        self._task, self._rules, self._size, self._prompt = task, rules, size, ids.shape[1]
        self._first = (torch.arange(len(ids), device=ids.device) * stride + first_row)[:, None]
        self._candidates = task.candidates_per_beam * size
        scores = torch.full((len(ids), size), _NEVER, dtype=torch.float32, device=ids.device)
        ids = ids[:, None].expand(-1, size, -1)
        self.ended = Hypotheses(ids, ids[..., :0], scores)
        self._is_text = scores > 0  # of those that have ended: no placeholder
        scores = scores.clone()
        scores[:, 0] = 0  # all beams are equal: only the first one counts
        self.running = Hypotheses(ids, ids[..., :0], scores)
        self.parents = self._first.expand(-1, size)
        """In which row of all the step before each running beam was, [prompts, beams]."""
        self._can_improve = torch.ones_like(self._is_text[:, :1])
        self._lost = ~self._can_improve[:, 0]  # prompts without a text that have nothing to go on with, [prompts]
        self.done = ~self._can_improve[:, 0]
        """Which prompts have their texts, [prompts]."""

    def advance(self, log_probs: torch.Tensor) -> None:
        """Go on with the best tokens. log_probs: [prompts, beams, vocabulary]."""
        vocabulary = log_probs.shape[-1]
        scores, index = self._task.attempt(partial(self._choose, log_probs))
        begun = self._is_text.any(dim=1) | self.done | ~self.running.are_chosen[:, 0]
        self._lost = (scores.amax(dim=1) == -torch.inf) & ~begun
        beams, tokens = index // vocabulary, index % vocabulary
        rows = beams + self._first
        grown = Hypotheses(_take(self.running.ids, beams), _take(self.running.rows, beams), scores).then(tokens, rows)
        ends = self._task.ended(grown.ids.flatten(0, 1)).view_as(scores)
        # Where all end, the length does it: those of a group without an end token are the beams that run.
        cut = ends.all(dim=1, keepdim=True)
        stops = self._task.ends(grown.ids[..., :-1].flatten(0, 1), tokens.flatten()) if self._rules.is_group else ends
        stops = stops.view_as(ends).where(cut, ends)
        best = (scores + stops.float() * _NEVER).topk(self._size).indices
        self.ended = self.ended.then(self._task.pad_id, -1)
        self._keep_ended(grown, stops)
        self.running = Hypotheses(grown.ids, grown.rows, scores + stops.float() * _NEVER).take(best)
        self.parents = rows.gather(1, best)
        if self._rules.is_group:
            self._look_ahead(scores[:, :1])
            self._keep_ended(self.running, cut.expand(-1, self._size))
            over = cut
        else:
            self._look_ahead(self.running.scores[:, :1])
            over = ends.all()
        self._can_improve = self._can_improve & ~over  # or there is nothing to go on with
        self.done = ~self._can_improve[:, 0] | (self._is_text.all(dim=1) & (self._rules.early_stopping is True))

    def _choose(self, log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = (log_probs + self.running.scores[..., None]).flatten(1)
        if not self._rules.do_sample:
            return largest(scores, self._candidates)
        index = draw(scores.softmax(dim=-1), self._task.generator, self._candidates)
        return scores.gather(1, index), index

    def _keep_ended(self, candidates: Hypotheses, ends: torch.Tensor) -> None:
        """Of the texts that had ended and those that end now, keep the best."""
        rules, eligible = self._rules, ends.clone()
        eligible[:, self._size :] = False  # the other candidates only stand by for those that end
        scores = candidates.scores / (candidates.rows.shape[-1] ** rules.length_penalty)
        full = self._is_text.all(dim=1, keepdim=True) & (rules.early_stopping is True)
        for excluded in (full, ~self._can_improve, ~eligible):
            scores = scores + excluded.float() * _NEVER
        texts = self.ended.joined_with(Hypotheses(candidates.ids, candidates.rows, scores))
        best = texts.scores.topk(self._size).indices
        best = best.where(~self.done[:, None], torch.arange(self._size, device=best.device))  # also where scores tie
        self.ended = texts.take(best)
        self._is_text = torch.cat([self._is_text, eligible], dim=1).gather(1, best)

    def _look_ahead(self, best: torch.Tensor) -> None:
        """Find out which prompts may still get better texts. best: the score to go on from, [prompts, 1]."""
        rules, columns = self._rules, self.running.ids.shape[-1]
        at_best = self._task.max_columns if rules.early_stopping == "never" and rules.length_penalty > 0 else columns
        hoped = best / ((at_best - self._prompt) ** rules.length_penalty)
        worst = self.ended.scores.min(dim=1, keepdim=True).values.where(self._is_text, _NEVER)
        self._can_improve = self._can_improve & (hoped > worst).any(dim=1, keepdim=True)

    @property
    def over(self) -> bool:
        """Whether no prompt goes on; waits for the device. Raises `NoCandidateError` for one without a text."""
        lost = self._lost.tolist()
        if any(lost):
            raise NoCandidateError(
                f"all scores of all beams of prompt {lost.index(True)} are -inf, and none of its texts has ended: the "
                "logits processors of the call have to leave a token that one of them can go on with"
            )
        stopped = self._rules.early_stopping is True and bool(self._is_text.all())
        return stopped or not bool(self._can_improve.any())


def show(searches: list[BeamState], returned: int, prompt: int) -> Report:
    """The best `returned` texts of every prompt, for rows that are the running beams. prompt: its columns."""
    running, ended, done = zip(*((search.running, search.ended, search.done) for search in searches), strict=True)
    standing = BeamSnapshot(running, ended, done, returned, prompt)
    return Report(standing.final, standing.best)


@dataclass(frozen=True)
class BeamSnapshot:
    """All searches between two steps: see `BeamState` and `show`. Nothing is computed unless it is asked for."""

    running: tuple[Hypotheses, ...]
    ended: tuple[Hypotheses, ...]
    done: tuple[torch.Tensor, ...]
    returned: int
    prompt: int

    def final(self) -> list[Hypothesis]:
        """Of every text what all that may become it have in common."""
        ended = reduce(Hypotheses.joined_with, self.ended)
        texts = reduce(Hypotheses.joined_with, [*self.running, ended])
        worst = ended.best(self.returned).scores[:, -1:]
        counts = torch.cat([self._may_win(), ended.are_chosen & (ended.scores >= worst)], dim=1)
        ids, some = texts.ids[..., self.prompt :], counts.long().argmax(dim=1, keepdim=True)
        differs = (ids != _take(ids, some)) & counts[..., None]
        agreed = (~differs.any(dim=1)).long().cumprod(dim=1).sum(dim=1).tolist()
        done, hypotheses = torch.stack(self.done).all(dim=0).tolist(), []
        for number, text in enumerate(self.best()):
            prompt = number // self.returned
            hypotheses.append(text if done[prompt] else Hypothesis(text.tokens[: agreed[prompt]], False, text.row))
        return hypotheses

    def best(self) -> list[Hypothesis]:
        """The running beams, the best first, then texts that have ended: those alone where the prompt is done."""
        running = reduce(Hypotheses.joined_with, self.running)
        ended = reduce(Hypotheses.joined_with, self.ended).best(self.returned)
        may_win, beams, hypotheses = self._may_win().tolist(), running.scores.shape[1], []
        for prompt, scores in enumerate(running.scores.tolist()):
            ids, lengths = ended.ids[prompt, :, self.prompt :].tolist(), ended.lengths[prompt].tolist()
            real = ended.are_chosen[prompt].tolist()
            texts = [Hypothesis(ids[n][: lengths[n]], True, prompt * beams) for n in range(self.returned) if real[n]]
            ids, real = running.ids[prompt, :, self.prompt :].tolist(), running.are_chosen[prompt].tolist()
            order = sorted((beam for beam in range(beams) if may_win[prompt][beam]), key=lambda beam: -scores[beam])
            alive = [Hypothesis(ids[beam], False, prompt * beams + beam) for beam in order if real[beam]]
            # Beams that have ended only go on for want of others.
            dead = [Hypothesis(ids[beam], False, prompt * beams + beam) for beam in order if not real[beam]]
            hypotheses += (alive + texts + dead)[: self.returned]
        return hypotheses

    def _may_win(self) -> torch.Tensor:
        """Which running beams are of a search that is not done, [prompts, beams]."""
        sizes = [running.scores.shape[1] for running in self.running]
        return torch.cat([~done[:, None].expand(-1, size) for done, size in zip(self.done, sizes, strict=True)], dim=1)


def finish(ended: list[Hypotheses], returned: int, prompt: int, scores: tuple[torch.Tensor, ...]) -> Finish:
    """The best `returned` texts of every prompt. prompt: its columns. scores: of every step."""
    texts = reduce(Hypotheses.joined_with, ended).best(returned)
    rows, lengths = texts.rows.flatten(0, 1), texts.lengths.flatten().tolist()
    longest = max(lengths)
    tokens = texts.ids.flatten(0, 1)[:, prompt : prompt + longest]
    return Finish(tokens, lengths, scores, texts.scores.flatten(), rows[:, :longest])


def _take(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return tensor.gather(1, index[..., None].expand(-1, -1, tensor.shape[-1]))


def _with_column(tensor: torch.Tensor, column: torch.Tensor | int) -> torch.Tensor:
    if isinstance(column, int):
        return torch.nn.functional.pad(tensor, (0, 1), value=column)
    return torch.cat([tensor, column[..., None]], dim=-1)
