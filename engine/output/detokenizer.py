"""Tokens to text while they come: no half characters, and nothing of a stop string."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

_PLAIN = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
_HALF = "\ufffd"
_MIDDLE = "abcdef"  # behind it a token is in the middle of a text, where no tokenizer leaves out its space


class RowText:
    """The text of one row. Feed it tokens with `push`, take what is safe to show, `flush` at the end.

    stop_strings: the first one to appear ends the text just before it; `stopped` becomes True. decoding: arguments of
    the tokenizer's `decode`; by default special tokens are left out, and spaces are as they are. prompt: ids before the
    first token. A stop string may begin in them, may begin with a space that the tokenizer leaves out where a text
    begins, and may contain special tokens, as in transformers.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_strings: Sequence[str] = (),
        decoding: dict[str, Any] | None = None,
        prompt: Sequence[int] = (),
    ):
        self._tokenizer = tokenizer
        self._decoding = _PLAIN if decoding is None else decoding
        self._stops = tuple(stop_strings)
        self._special: dict[int, str] = {}  # tokens that do not show, though a stop string may have them
        if self._stops and self._decoding.get("skip_special_tokens"):
            self._special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        # Characters that may be the beginning of a stop string, and whether each shows.
        self._held: list[tuple[str, bool]] = []
        before: list[int] = []
        if self._stops:
            middle = list(tokenizer(_MIDDLE, add_special_tokens=False)["input_ids"])
            before = [*middle, *prompt]
            self._held = [(character, False) for character in self._end_of(middle, before)]
        self._begin(before)
        self._begins: int | None = len(before)  # the token that the shown text begins with; None once there is some
        self.text = ""  # all text released
        self.stopped = False

    def begin(self, tokens: Sequence[int]) -> str:
        """Go on from these tokens; returns their text, in which no stop string is looked for."""
        self._begins = None
        return self._begin(tokens)

    def _begin(self, tokens: Sequence[int]) -> str:
        text = self._decode(list(tokens))
        said = text.rstrip(_HALF)
        self._tokens, self._context = list(tokens), 0  # decoding starts at `_context`: what is before changes nothing
        self._decoded = len(tokens) if said == text else 0  # where `_context` may go next: no character is halved there
        self._taken = len(said)  # characters taken of what is decoded
        return said

    def push(self, token: int) -> str:
        """Add a token; returns the text that is final now."""
        if self.stopped:
            return ""
        if token in self._special:
            shown = self._rest()
            self._tokens.append(token)
            return shown if self.stopped else shown + self._take(self._special[token], hidden=len(self._special[token]))
        self._tokens.append(token)
        text = self._decode(self._tokens[self._context :])
        # A replacement character at the end is half a character, or will turn out to be no text at all.
        whole = text.rstrip(_HALF)
        delta, self._taken = whole[self._taken :], max(self._taken, len(whole))
        if whole == text:
            self._context, self._decoded = self._decoded, len(self._tokens)
            self._taken = len(self._decode(self._tokens[self._context :]))
        return self._take(delta, self._hidden(delta)) if delta else ""

    def flush(self) -> str:
        """No more tokens: returns what was held back."""
        if self.stopped:
            return ""
        rest = self._rest()
        if self.stopped:
            return rest
        held, self._held = _shown(self._held), []
        self.text += held
        return rest + held

    def copy(self) -> RowText:
        """The same text so far, to go on differently."""
        twin = copy.copy(self)
        twin._tokens = list(self._tokens)
        return twin

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, **self._decoding)

    def _end_of(self, middle: list[int], before: list[int]) -> str:
        """What a stop string may have of the text before: all but its last character, and nothing of `middle`."""
        longest = max(map(len, self._stops)) - 1
        decoding = _PLAIN | {"skip_special_tokens": False}
        text = self._tokenizer.decode(before, **decoding)[len(self._tokenizer.decode(middle, **decoding)) :]
        return text.rstrip(_HALF)[-longest:] if longest > 0 else ""

    def _hidden(self, delta: str) -> int:
        """How many characters at the beginning of `delta` the new text alone is without."""
        if self._begins is None:
            return 0
        alone = self._decode(self._tokens[self._begins :]).rstrip(_HALF)
        self._begins = None
        return len(delta) - len(alone) if delta.endswith(alone) else 0

    def _rest(self) -> str:
        """Take what has come of a character that will not be whole."""
        text = self._decode(self._tokens[self._context :])
        delta, self._taken = text[self._taken :], max(self._taken, len(text))
        return self._take(delta) if delta else ""

    def _take(self, delta: str, hidden: int = 0) -> str:
        """hidden: how many characters at the beginning do not show."""
        pending = [*self._held, *((character, place >= hidden) for place, character in enumerate(delta))]
        text, held = "".join(character for character, _ in pending), len(self._held)
        # What ends before `delta` was said by the prompt.
        begins = [text.find(stop, max(0, held - len(stop) + 1)) for stop in self._stops]
        found = [begin for begin in begins if begin >= 0]
        if found:
            self.stopped, self._held = True, []
            released = _shown(pending[: min(found)])
        else:
            safe = len(pending) - self._stop_prefix(text)
            released, self._held = _shown(pending[:safe]), pending[safe:]
        self.text += released
        return released

    def _stop_prefix(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


def _shown(characters: Sequence[tuple[str, bool]]) -> str:
    return "".join(character for character, shows in characters if shows)


def ends_of(prompts: torch.Tensor, stop_strings: Sequence[str]) -> list[list[int]]:
    """Of every row of prompts [rows, columns] the last ids, pads too: as many as a stop string may begin in."""
    columns = max((len(stop) for stop in stop_strings), default=0) + 4
    return prompts[:, -columns:].tolist() if stop_strings else [[] for _ in prompts]
