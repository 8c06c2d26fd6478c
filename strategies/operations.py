"""The operations of decoding strategies.

A strategy's `flow` is a generator: it yields operations and is sent their results. One driver in the engine carries
them out, so a flow touches no model, cache, mask or device, and a test can drive it with `next()` and `.send()`.

    operation                      result sent back
    Forward(tokens)                logits after the last token, float32 [rows, vocabulary]
    Forward(tokens, hidden=True)   logits, and the last hidden states of these tokens [rows, n, width]
    Forward(tokens, all_logits=True)    logits after each of these tokens, float32 [rows, n, vocabulary]
    Forward(tokens, model="draft") the same of the draft, a second model with a cache of its own
    Emit(tokens)                   all ids so far, prompt included, [rows, columns]; rows that have ended got the pad id
    Crop(tokens)                   None
    Rows(index)                    None
    Report(final, best)              None
    Finish(tokens, lengths)        None

The first operation of every flow is a `Forward` of the prompt. The driver closes the flow when all rows have ended; a
flow that returns ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch

from configs import EngineError

T = TypeVar("T")
Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(ids [rows, columns], scores [rows, vocabulary]) -> scores [rows, vocabulary]: the logits processors of the call."""

ENOUGH_PROPOSALS = 100  # tokens after which the share of accepted ones is known


@dataclass
class SpeculationStats:
    """Counts of the tokens that a flow proposed to its model: the flow counts, the engine reports.

    drafted, accepted: tokens of all rows, each counted once. verifications: forwards that looked at some. length: how
    many a draft proposes at a time, to begin with and in the end. price: of a proposed token, in steps of the model, at
    least: proposals do not pay where a smaller share of them is accepted.
    """

    drafted: int = 0
    accepted: int = 0
    verifications: int = 0
    length: int | None = None
    # Of verifying alone: about 0.06 for SmolLM2-135M in float32 on one thread of an Intel Xeon at 2.8 GHz.
    price: float = 0.03
    _lately: tuple[float, float] = (0, 0)  # drafted and accepted; older ones count less

    def count(self, drafted: int, accepted: int) -> None:
        """A verification of so many tokens."""
        self.verifications += 1
        self.drafted += drafted
        self.accepted += accepted
        weight = 0.5 if self._lately[0] >= 2 * ENOUGH_PROPOSALS else 1
        self._lately = weight * self._lately[0] + drafted, weight * self._lately[1] + accepted

    @property
    def pays(self) -> bool:
        """Whether enough of the last proposals were accepted, or too few were made to know.

        By counts, not by time: where texts are drawn, random numbers depend on what is proposed.
        """
        drafted, accepted = self._lately
        return drafted < ENOUGH_PROPOSALS or accepted >= self.price * drafted


@dataclass(frozen=True)
class Translation:
    """Between the ids of the model and those of a draft with another vocabulary, for one row.

    to_draft: all ids [1, columns] -> the same text [1, n]. to_model: (all ids, the draft's text, how many tokens of it
    say the same as the ids) -> what comes after the ids, [1, any]. max_columns: the draft's texts get no longer.
    """

    to_draft: Callable[[torch.Tensor], torch.Tensor]
    to_model: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    max_columns: int


def nothing(ids: torch.Tensor) -> None:
    """The `Task.announce` of a call without a constraint."""


def at_once(work: Callable[[], T]) -> T:
    """The `Task.attempt` that does the work once."""
    return work()


@dataclass(frozen=True)
class Task:
    """The input of a flow.

    Attributes
    ----------
    ids : LongTensor [rows, columns]
        The prompt.
    mask : LongTensor [rows, columns or more]
        0 where the prompt has a pad; with further columns in front where it begins with embeddings that have no id.
    process : (ids [rows, columns], logits [rows, vocabulary]) -> scores [rows, vocabulary]
        Applies the call's logits processors. A flow calls it for every step.
    ended : (ids [any, columns]) -> bool [any]
        Whether a text ends with the last of its ids. Only flows that `Finish` by themselves have to ask.
    max_columns : int
        No row gets longer than so many columns.
    eos_ids : tuple of int
        Tokens that end a text, as given: see `ends`.
    candidates_per_beam : int
        How many of the best tokens a search looks at for each beam: enough for one that goes on, whichever end.
    pad_id : int
        What a row that has ended is filled up with.
    drafts : SpeculationStats
        Filled in by flows that propose tokens.
    translation : Translation or None
        Where the draft has other ids than the model.
    attempt : (work) -> what `work()` returns
        For work on scores [rows, vocabulary] that needs memory, as `attempt(lambda: scores.softmax(dim=-1))`. When
        memory is out, the work is done again after a fallback, so it must not change anything. `process` does this by
        itself.
    records_scores : bool
        Whether the scores of the steps are wanted in `Finish`.
    generator : torch.Generator or None
        Of the call's `seed`, on the device of the scores; None for torch's global one. A strategy that draws passes it
        on, as in `torch.multinomial(probabilities, 1, generator=task.generator)`. The seed covers nothing else: a
        `process` that draws takes torch's global numbers.
    forced : (ids [rows, columns]) -> list of list of int, or None
        For each row the tokens that a constraint of the call lets come next as the only ones, maybe none. None without
        a constraint.
    announce : (ids [rows, columns]) -> None
        May be called before a `Forward` with the very ids that `process` gets after it: a constraint then makes its
        mask while the device computes.
    belongs : (ids [any, columns]) -> bool [any], or None
        Whether the last of the ids, one of `eos_ids`, is text that a constraint asks for. None where none can be.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    process: Process
    ended: Callable[[torch.Tensor], torch.Tensor]
    max_columns: int
    eos_ids: tuple[int, ...] = ()
    candidates_per_beam: int = 2
    pad_id: int = 0
    drafts: SpeculationStats = field(default_factory=SpeculationStats)
    translation: Translation | None = None
    attempt: Callable[[Callable[[], Any]], Any] = at_once
    records_scores: bool = True
    generator: torch.Generator | None = None
    forced: Callable[[torch.Tensor], list[list[int]]] | None = None
    announce: Callable[[torch.Tensor], None] = nothing
    belongs: Callable[[torch.Tensor], torch.Tensor] | None = None

    @cached_property
    def _eos(self) -> torch.Tensor:
        return torch.tensor(sorted(self.eos_ids), dtype=torch.long, device=self.ids.device)

    def ends(self, ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Whether the tokens [any] are ends of the texts ids [any, columns] that they come after, bool [any]."""
        is_eos = torch.isin(tokens, self._eos)
        return is_eos if self.belongs is None else is_eos & ~self.belongs(torch.cat([ids, tokens[:, None]], dim=1))


class Forward(NamedTuple):  # made for every token: a frozen dataclass takes 1 µs more
    """Feed `tokens` [rows, n] to the model. They are committed by its next operation unless that is a `Crop`.

    model: "main", or "draft" where the strategy `needs` one.
    """

    tokens: torch.Tensor
    hidden: bool = False
    all_logits: bool = False
    model: str = "main"


class Emit(NamedTuple):  # as above
    """`tokens` [rows, n] are final. `scores`, one [rows, vocabulary] per column, are recorded when the caller asked."""

    tokens: torch.Tensor
    scores: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class Crop:
    """Take back the last `tokens` tokens of the `Forward` just made; of the draft, of all that were fed."""

    tokens: int
    model: str = "main"


@dataclass(frozen=True)
class Rows:
    """Row i becomes row `index[i]` in everything that is kept per row, emitted tokens included.

    Every row `n` times in a row (see `repeat_rows_index`) is a fork: the rows share their tokens in the cache.
    """

    index: torch.Tensor


@dataclass(frozen=True)
class Hypothesis:
    """A text to be returned, as far as it goes. ended: whether that is all of it. row: which row goes on from it."""

    tokens: list[int]
    ended: bool
    row: int


@dataclass(frozen=True)
class Report:
    """How the texts stand of a flow that will `Finish`, one `Hypothesis` for each that is returned, in their order.

    It comes between a `Rows` and the next `Forward`. final: with the tokens that cannot become others any more. best:
    what each would be if the run stopped here. Both wait for the device, so they are only asked for where the
    run is streamed, or where it stops early.
    """

    final: Callable[[], list[Hypothesis]]
    best: Callable[[], list[Hypothesis]]


@dataclass(frozen=True)
class Finish:
    """All rows have ended: `tokens` [rows, n] come after the prompt, of which row i uses the first `lengths[i]`.

    scores: one [rows at that step, vocabulary] per step. sequences_scores [rows] and beam_indices [rows, n] are
    reported as they are.
    """

    tokens: torch.Tensor
    lengths: list[int]
    scores: tuple[torch.Tensor, ...] = ()
    sequences_scores: torch.Tensor | None = None
    beam_indices: torch.Tensor | None = None


Operation = Forward | Emit | Crop | Rows | Report | Finish
Flow = Generator[Operation, Any, None]


class NoCandidateError(EngineError):
    """There is nothing that the next token could be chosen by."""


@dataclass(frozen=True)
class Needs:
    """What a strategy needs of the engine. The defaults fit a flow of one row per prompt that keeps every token.

    Attributes
    ----------
    rows_per_prompt : int
        Rows that each row of the prompt becomes.
    scored_rows : int or None
        How many of these rows `Task.process` gets at a time; None for all.
    rows_are_beams : bool
        Whether logits processors take the rows of a prompt for the beams of one search.
    texts_per_prompt : int
        Rows of the result per prompt.
    score_copies : int
        float32 tensors [rows, vocabulary] that exist at the same time, at most, from the model's logits to the chosen
        token, without those of logits processors.
    hidden_states : bool
        Whether the first `Forward` has `hidden=True`.
    verifies : bool
        Whether tokens are fed that a `Crop` may take back.
    draft : bool
        Whether a `Forward` has `model="draft"`.
    keeps_draft_length : bool
        Whether `Task.drafts.length` carries over from call to call.
    """

    rows_per_prompt: int = 1
    scored_rows: int | None = None
    rows_are_beams: bool = False
    texts_per_prompt: int = 1
    score_copies: int = 4
    hidden_states: bool = False
    verifies: bool = False
    draft: bool = False
    keeps_draft_length: bool = False

    @property
    def rows_at_a_time(self) -> int:
        """Rows per prompt whose scores are processed in one call."""
        return self.rows_per_prompt if self.scored_rows is None else self.scored_rows


class Strategy(Protocol):
    """A dataclass whose fields are the strategy's options, by the names of transformers' generation parameters.

    `needs` may be left out where the defaults of `Needs` fit.
    """

    name: ClassVar[str]

    @property
    def samples(self) -> bool:
        """Whether it draws at random: then temperature, top-k, top-p and their like apply to its scores."""

    @property
    def needs(self) -> Needs:
        """What it needs of the engine. It must not change during a run."""
        return Needs()

    def flow(self, task: Task) -> Flow:
        """Decode after the prompt."""


def needs_of(strategy: Strategy) -> Needs:
    """What `strategy` declares; the defaults for a class without `needs`."""
    return getattr(strategy, "needs", None) or Needs()


def repeat_rows_index(rows: int, times: int) -> torch.Tensor:
    """The index that repeats every row: for 2 rows 3 times 0, 0, 0, 1, 1, 1."""
    return torch.arange(rows, device="cpu").repeat_interleave(times)


def read_prompt(task: Task, branches: int) -> Generator[Operation, Any, tuple[torch.Tensor, torch.Tensor]]:
    """Read the prompt once and let every row branch: ids [rows * branches, columns] and logits after them."""
    logits = yield Forward(task.ids)
    if branches == 1:
        return task.ids, logits
    yield Rows(repeat_rows_index(len(task.ids), branches))
    return task.ids.repeat_interleave(branches, dim=0), logits.repeat_interleave(branches, dim=0)


def one_token_per_step(task: Task, choose: Callable[[torch.Tensor], torch.Tensor], branches: int = 1) -> Flow:
    """The flow of strategies that choose tokens [rows] by scores [rows, vocabulary]. branches: texts per prompt."""
    ids, logits = yield from read_prompt(task, branches)
    while True:
        scores = task.process(ids, logits)
        tokens = task.attempt(partial(choose, scores))
        ids = yield Emit(tokens[:, None], (scores,))
        del logits, scores  # the next step makes others
        task.announce(ids)
        logits = yield Forward(ids[:, -1:])
