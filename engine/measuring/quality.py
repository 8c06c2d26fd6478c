"""How far the probabilities of a lossy cache, or of weights in few bits, are from those of the model in full."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch.nn import functional

from engine.prompt import without_padding
from engine.scoring import scoring

SKIPPED = 64  # tokens of a text after which nothing is compared: what they look at is short
PIECE = 16  # tokens that are read at once: nearly all that a token looks at then went through the cache

Record: TypeAlias = Callable[[slice, int, torch.Tensor], None]
"""Takes the logits [rows, tokens, vocabulary] after tokens of these rows; the second argument is how many come before
them."""
Reader: TypeAlias = Callable[[torch.Tensor, Record], None]
"""Reads texts, ids [rows, tokens], in pieces and hands the logits of each piece over."""


@dataclass(frozen=True)
class Divergence:
    """Means over `tokens` tokens of texts.

    perplexity: e to the mean negative log probability of the token that comes next. kl: nats per token from the
    probabilities in full to these. same_top: share of the tokens after which the most probable token is the same.
    """

    tokens: int
    perplexity: float
    kl: float
    same_top: float


class Reference:
    """The log probabilities in full after every token of texts, which other readers are compared with.

    ids: [rows, tokens]. skipped: tokens at the beginning of each text after which nothing is compared. They take
    rows x (tokens - skipped) x vocabulary x 4 bytes of memory.
    """

    def __init__(self, ids: torch.Tensor, reader: Reader, skipped: int = SKIPPED):
        self.ids, self.skipped = ids, skipped
        self._log_probabilities: torch.Tensor | None = None
        reader(ids, self._keep)
        self.full = self.compare(self._replay)

    def compare(self, reader: Reader) -> Divergence:
        """Read the texts again with `reader`."""
        rows, length = self.ids.shape
        sums = torch.zeros(3, dtype=torch.float64)

        def add(of_rows: slice, before: int, logits: torch.Tensor) -> None:
            begin, end = max(before, self.skipped), min(before + logits.shape[1], length - 1)
            if begin >= end:
                return
            ours = logits[:, begin - before : end - before].float().cpu().log_softmax(dim=-1)
            full = self._kept()[of_rows, begin - self.skipped : end - self.skipped]
            targets = self.ids[of_rows, begin + 1 : end + 1, None]
            sums[0] -= ours.gather(-1, targets).double().sum()
            sums[1] += functional.kl_div(ours, full, reduction="sum", log_target=True).double()
            sums[2] += (ours.argmax(dim=-1) == full.argmax(dim=-1)).sum()

        reader(self.ids, add)
        tokens = rows * (length - 1 - self.skipped)
        nats, kl, same = (sums / tokens).tolist()
        return Divergence(tokens, math.exp(nats), max(kl, 0.0), same)  # rounding makes a KL of zero negative

    def _keep(self, of_rows: slice, before: int, logits: torch.Tensor) -> None:
        rows, length = self.ids.shape
        if self._log_probabilities is None:
            self._log_probabilities = torch.empty(rows, length - 1 - self.skipped, logits.shape[-1], device="cpu")
        begin = max(before, self.skipped)
        if begin < before + logits.shape[1]:
            target = self._log_probabilities[of_rows, begin - self.skipped : before + logits.shape[1] - self.skipped]
            torch.log_softmax(logits[:, begin - before :].float().cpu(), dim=-1, out=target)

    def _kept(self) -> torch.Tensor:
        assert self._log_probabilities is not None
        return self._log_probabilities

    def _replay(self, ids: torch.Tensor, record: Record) -> None:
        for row in range(ids.shape[0]):
            record(slice(row, row + 1), self.skipped, self._kept()[row : row + 1])


def engine_reader(generate: Callable[..., object], piece_tokens: int = PIECE, rows: int = 4) -> Reader:
    """generate: `Generator.generate` with a cache. piece_tokens: of a forward. rows: texts that are read together."""

    def read(ids: torch.Tensor, record: Record) -> None:
        for begin in range(0, ids.shape[0], rows):
            of_rows = slice(begin, min(begin + rows, ids.shape[0]))
            parameters = scoring(ids[of_rows].tolist(), piece_tokens, partial(record, of_rows)) | {"top_logprobs": None}
            generate(without_padding(ids[of_rows, :1]), **parameters)

    return read
