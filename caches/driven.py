"""What the engine's loop asks of a cache, whoever wrote it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from transformers.cache_utils import Cache as TransformersCache


@runtime_checkable
class Driven(Protocol):
    """One step is a transaction: `begin`, the forward, then `settle` or `abort`.

    name: what messages call it. log: ids [rows, seen] of the tokens in it when our loop fed them all, else None.
    """

    name: str
    log: torch.Tensor | None

    @property
    def handle(self) -> TransformersCache | None:
        """What the model gets as its cache argument; None makes every step compute the whole sequence."""

    @property
    def seen(self) -> int:
        """Tokens committed per row: the loop feeds what comes after them."""

    @property
    def max_tokens(self) -> int | None:
        """Tokens it can hold per row; None when it has no limit."""

    @property
    def fixed(self) -> bool:
        """Whether its tensors never move, so that a compiled step can use it."""

    @property
    def bytes(self) -> int:
        """Bytes of everything it keeps, room for tokens to come included."""

    def begin(self, tokens: int, graph: bool = False) -> None:
        """Open a step of `tokens` per row: make room, decide where they go. When this raises, nothing has changed.

        graph: the forward is compiled.
        """

    def settle(self, drop: int = 0) -> None:
        """Commit the open step without its last `drop` tokens, and forget what is out of reach."""

    def abort(self) -> None:
        """Forget the open step on every layer, whichever of them it had reached. Without one: nothing to do."""

    def rows(self, index: torch.Tensor) -> None:
        """Row i becomes row `index[i]` in everything it holds."""

    def reserve(self, tokens: int) -> None:
        """Say that it will hold `tokens` tokens in all, so that room for them is made at once."""

    def reset(self) -> None:
        """Forget everything."""
