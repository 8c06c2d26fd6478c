"""A turn of a chat: what it asks for, and which parameters it may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.errors import EngineError, OptionError
from engine.prompt import EncodedPrompt
from engine.reuse.conversation import Message, TemplateText

# Called with the error that refuses a turn: the inputs and arguments of another call to try, or None.
Instead = Callable[[EngineError], tuple[EncodedPrompt, dict[str, Any]] | None]
WHEN_FULL = ("stop", "drop")


@dataclass
class Turn:
    """What a turn asks for.

    asked, ids: the segments of the messages, and their ids [1, tokens]. continues: whether the answer goes on with the
    last message. left_out: messages behind the system message that were left out. starts_anew: whether it begins with
    an empty cache.
    """

    messages: tuple[Message, ...]
    parameters: dict[str, Any]
    asked: tuple[TemplateText, ...] = ()
    ids: torch.Tensor = field(default_factory=lambda: torch.empty(1, 0, dtype=torch.long, device="cpu"))
    continues: bool = False
    left_out: int = 0
    starts_anew: bool = False

    def leave_out(self, count: int) -> None:
        first = int(self.messages[0]["role"] == "system")
        self.messages = (*self.messages[:first], *self.messages[first + count :])
        self.left_out += count


def checked(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters. Raises `OptionError` for those that no turn has."""
    for name, reason in _REFUSED.items():
        if name in parameters:
            raise OptionError(f"{name} cannot apply to a chat, {reason}")
    return parameters


_REFUSED = {
    "num_return_sequences": "whose turn has one answer: leave it out",
    "inputs": "whose turn has a message: give it first",
    "tokenizer": "which has that of its generator: Generator(model, tokenizer)",
    **dict.fromkeys(
        ("cache", "cache_config", "max_cache_len", "cache_implementation", "past_key_values"),
        "whose turns have one cache: Chat.use() puts it in another backend",
    ),
}
