"""Incremental detokenizing: text that is final, without incomplete characters or parts of stop strings."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.chat_template import special_tokens
from engine.output.stop_strings import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PLAIN = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
_HALF = "\ufffd"
_MIDDLE = "abcdef"  # decoded in front of other tokens, so that tokenizers do not strip their leading space


class RowText:
    """The text of one row: `push` tokens, which returns the text that is final, and `flush` at the end.

    stop_strings: the first one to appear ends the text just before it, and `stopped` becomes True. decoding: arguments
    of the tokenizer's `decode`; by default without special tokens and without cleaning up spaces. prompt: ids before
    the first token. As in transformers, a stop string may begin in the prompt, may begin with a space that the
    tokenizer strips at the beginning of a text, and may contain special tokens. keeps_space: the text begins with that
    space.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: Sequence[str] = (),
        decoding: dict[str, object] | None = None,
        prompt: Sequence[int] = (),
        keeps_space: bool = False,
    ):
        self._tokenizer = tokenizer
        self._decoding = _PLAIN if decoding is None else decoding
        self._stops = StopStrings(stop_strings)
        self._special: dict[int, str] = {}  # not part of the text, but stop strings may contain them
        if self._stops and self._decoding.get("skip_special_tokens"):
            self._special = special_tokens(tokenizer)
        # The end of the text, which may begin a stop string: characters, and whether each is part of the text.
        self._withheld: list[tuple[str, bool]] = []
        context_ids: list[int] = []
        if self._stops or keeps_space:
            middle = list(tokenizer(_MIDDLE, add_special_tokens=False)["input_ids"])
            context_ids = [*middle, *prompt]
        if self._stops:
            self._withheld = [(character, False) for character in self._end_of(middle, context_ids)]
        self._begin(context_ids)
        # Index of the first token of the text; None after the first text.
        self._begins: int | None = None if keeps_space else len(context_ids)
        self.text = ""  # all final text
        self.stopped = False

    def begin(self, tokens: Sequence[int]) -> str:
        """Start with these tokens; returns their text. Stop strings in it are ignored."""
        self._begins = None
        return self._begin(tokens)

    def _begin(self, tokens: Sequence[int]) -> str:
        text = self._decode(list(tokens))
        complete = text.rstrip(_HALF)
        self._tokens, self._context = list(tokens), 0  # decoding starts at token `_context`
        self._decoded = len(tokens) if complete == text else 0  # the next `_context`: a boundary between characters
        self._taken = len(complete)  # characters of the decoded text that were returned
        return complete

    def push(self, token: int) -> str:
        """Add a token; returns the text that became final."""
        if self.stopped:
            return ""
        if token in self._special:
            shown = self._rest()
            self._tokens.append(token)
            return shown if self.stopped else shown + self._take(self._special[token], hidden=len(self._special[token]))
        self._tokens.append(token)
        text = self._decode(self._tokens[self._context :])
        # A replacement character at the end is an incomplete character, or bytes that are no text.
        complete = text.rstrip(_HALF)
        delta, self._taken = complete[self._taken :], max(self._taken, len(complete))
        # What is decoded to nothing is no context: the next token would lose its space, as at the beginning of a text.
        if complete == text and (alone := self._decode(self._tokens[self._decoded :])):
            self._context, self._decoded, self._taken = self._decoded, len(self._tokens), len(alone)
        return self._take(delta, self._hidden(delta)) if delta else ""

    def flush(self) -> str:
        """End the text; returns what was withheld."""
        if self.stopped:
            return ""
        remainder = self._rest()
        if self.stopped:
            return remainder
        withheld, self._withheld = _visible(self._withheld), []
        self.text += withheld
        return remainder + withheld

    def copy(self) -> RowText:
        """An independent copy."""
        twin = copy.copy(self)
        twin._tokens = list(self._tokens)
        return twin

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, **self._decoding)

    def _end_of(self, middle: list[int], context_ids: list[int]) -> str:
        """The end of the text of `context_ids` in which a stop string may begin, without the text of `middle`."""
        decoding = _PLAIN | {"skip_special_tokens": False}
        text = self._tokenizer.decode(context_ids, **decoding)[len(self._tokenizer.decode(middle, **decoding)) :]
        return self._stops.end_of(text.rstrip(_HALF))

    def _hidden(self, delta: str) -> int:
        """How many characters at the beginning of `delta` are missing if the new tokens are decoded alone."""
        if self._begins is None:
            return 0
        alone = self._decode(self._tokens[self._begins :]).rstrip(_HALF)
        self._begins = None
        return len(delta) - len(alone) if delta.endswith(alone) else 0

    def _rest(self) -> str:
        """Take an incomplete character that no token completes."""
        text = self._decode(self._tokens[self._context :])
        delta, self._taken = text[self._taken :], max(self._taken, len(text))
        return self._take(delta) if delta else ""

    def _take(self, delta: str, hidden: int = 0) -> str:
        """Add `delta` to the text; returns what is final. hidden: characters of it that are not part of the text."""
        pending = [*self._withheld, *((character, index >= hidden) for index, character in enumerate(delta))]
        text, withheld = "".join(character for character, _ in pending), len(self._withheld)
        # A stop string that ends before `delta` is part of the prompt.
        if (begin := self._stops.first(text, withheld)) is not None:
            self.stopped, self._withheld = True, []
            released = _visible(pending[:begin])
        else:
            safe = len(pending) - self._stops.begun(text)
            released, self._withheld = _visible(pending[:safe]), pending[safe:]
        self.text += released
        return released


def _visible(characters: Sequence[tuple[str, bool]]) -> str:
    return "".join(character for character, visible in characters if visible)
