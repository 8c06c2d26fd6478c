"""What a decoding strategy is made of.

A strategy's `flow` is a generator: it yields operations and is sent their results. One driver in the engine carries
them out, so a flow touches no model, cache, mask or device, and a test can play the driver with `next()` and `.send()`.

    operation          result sent back
    Forward(tokens)    logits after the last token, float32 [rows, vocabulary]
    Emit(tokens)       all token ids so far, prompt included, [rows, columns]; rows that have ended got the pad id
    Crop(tokens)       None
    Rows(index)        None

The first operation of every flow is a `Forward` of the prompt. The driver closes the flow when all rows have ended; a
flow that returns ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(ids [rows, columns], logits [rows, vocabulary]) -> scores [rows, vocabulary]: the logits processors of the call."""


@dataclass(frozen=True)
class Forward:
    """Feed `tokens` [rows, n] to the model. They are committed by the next operation unless that is a `Crop`."""

    tokens: torch.Tensor


@dataclass(frozen=True)
class Emit:
    """`tokens` [rows, n] are final. `scores`, one [rows, vocabulary] per column, are recorded when the caller asked."""

    tokens: torch.Tensor
    scores: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class Crop:
    """Take back the last `tokens` tokens of the `Forward` just made."""

    tokens: int


@dataclass(frozen=True)
class Rows:
    """Row i becomes row `index[i]` in everything that is kept per row, emitted tokens included."""

    index: torch.Tensor


Operation = Forward | Emit | Crop | Rows
Flow = Generator[Operation, Any, None]


class Strategy(Protocol):
    """A dataclass whose fields are the strategy's options."""

    name: ClassVar[str]
    samples: ClassVar[bool]
    """Whether it draws at random: then temperature, top-k, top-p and their like apply to its scores."""

    def flow(self, ids: torch.Tensor, process: Process) -> Flow:
        """Decode after the prompt `ids` [rows, columns]."""


def one_token_per_step(ids: torch.Tensor, process: Process, choose: Callable[[torch.Tensor], torch.Tensor]) -> Flow:
    """The flow of every strategy that picks each row's next token from its scores alone.

    choose: scores [rows, vocabulary] -> tokens [rows].
    """
    tokens = ids
    while True:
        logits = yield Forward(tokens)
        scores = process(ids, logits)
        ids = yield Emit(choose(scores)[:, None], (scores,))
        tokens = ids[:, -1:]
