"""What a cache of one or two stacks of layers says of itself. Stateless: a cache class has these beside its methods."""

from __future__ import annotations

from abc import abstractmethod

from caches.core.layer import Layer
from caches.core.layer_stack import LayerStack
from caches.core.wrapped_layer import WrappedLayer
from caches.protocol import TokenLog
from caches.spec.layer_spec import LayerSpec


class StackFacts:
    """Where there are two stacks, most is that of the first, which keeps the decoder's tokens."""

    @property
    @abstractmethod
    def stacks(self) -> tuple[LayerStack, ...]:
        """The layers it consists of: the decoder's, and those for the encoder's tokens where there are such."""

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.stacks[0].layout.name

    @property
    def layers(self) -> list[Layer | WrappedLayer]:
        return self.stacks[0].layers

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return self.stacks[0].specs

    @property
    def log(self) -> TokenLog | None:
        """The tokens it holds, where they are known."""
        return self.stacks[0].log

    @log.setter
    def log(self, log: TokenLog | None) -> None:
        self.stacks[0].log = log

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first step."""
        return self.stacks[0].batch_size

    @property
    def max_tokens(self) -> int | None:
        """Tokens it can hold per row; None without limit."""
        return self.stacks[0].max_tokens

    @property
    def max_rows(self) -> int | None:
        """Rows it has room for; None without limit."""
        return self.stacks[0].max_rows

    @property
    def is_quantized(self) -> bool:
        """Whether some of it is kept in fewer bits than it came in."""
        return self.stacks[0].is_quantized

    @property
    def fixed(self) -> bool:
        """Whether buffers are made once and never move."""
        return all(stack.layout.preallocated for stack in self.stacks)

    @property
    def why_not_compiled(self) -> str | None:
        """Why a compiled step cannot use it; None where it can."""
        return next((why for stack in self.stacks if (why := stack.why_not_compiled) is not None), None)

    def can_reject(self, rejected: int) -> bool:
        """Whether `commit(rejected)` is possible."""
        return self.stacks[0].can_reject(rejected)

    def growth(self, tokens: int) -> float:
        """How many times as large buffers will be when there is room for `tokens` more."""
        return self.stacks[0].growth(tokens)
