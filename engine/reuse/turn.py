"""A turn of a chat: what it asks for, and which parameters it may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.errors import EngineError, InputError, OptionError
from engine.prompt import EncodedPrompt
from engine.request.inputs.checks import PositionsError
from engine.reuse.conversation import Conversation, Message, TemplateText

# Called with the error that refuses a turn: the inputs and arguments of another call to try, or None.
Instead = Callable[[EngineError], tuple[EncodedPrompt, dict[str, Any]] | None]
WHEN_FULL = ("stop", "drop")
_PLAIN_STOP = "\nUser:"  # where there is no template, a model goes on with the next question


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

    def leave_out_oldest(self, conversation: Conversation, error: PositionsError, when_full: str) -> None:
        """Leave out as many messages as the others need room, where the model's length is reached.

        Raises `InputError` where none can be left out, and with `when_full="stop"`.
        """
        reason, _, _ = str(error).partition(":")
        count = conversation.how_many_to_leave_out(self.messages, error.room)
        if not count:
            raise InputError(
                f"{reason}: send a shorter message, or ask for a shorter answer (max_new_tokens)"
            ) from error
        if when_full == "stop":
            raise InputError(
                f"the conversation has reached the model's length ({reason}): take turns back with undo() or clear(), "
                "ask for a shorter answer (max_new_tokens), or leave out the oldest turns with when_full='drop'"
            ) from error
        first = int(self.messages[0]["role"] == "system")
        self.messages = (*self.messages[:first], *self.messages[first + count :])
        self.left_out += count


def checked(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters. Raises `OptionError` for those that no turn has."""
    for name, reason in _REFUSED.items():
        if name in parameters:
            raise OptionError(f"{name} cannot apply to a chat, {reason}")
    return parameters


def with_plain_stop(parameters: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """The parameters of a turn without a chat template: the next question ends its answer, as do the strings of the
    parameters, else of their generation config, else of the model's."""
    config = parameters.get("generation_config")
    config = config.get if isinstance(config, dict) else partial(getattr, config)
    sources = (parameters.get("stop_strings"), config("stop_strings", None),
               getattr(model.generation_config, "stop_strings", None))  # fmt: skip
    strings = next((strings for strings in sources if strings is not None), ())
    return parameters | {"stop_strings": [_PLAIN_STOP, *([strings] if isinstance(strings, str) else strings)]}


_REFUSED = {
    "num_return_sequences": "whose turn has one answer: leave it out",
    "inputs": "whose turn has a message: give it first",
    "tokenizer": "which has that of its generator: Generator(model, tokenizer)",
    **dict.fromkeys(
        ("cache", "cache_config", "max_cache_len", "cache_implementation", "past_key_values"),
        "whose turns have one cache: Chat.use() puts it in another backend",
    ),
}
