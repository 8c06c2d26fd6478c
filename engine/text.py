"""Tokens to text while they come: no half characters, and nothing of a stop string."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

_PLAIN = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}


class RowText:
    """The text of one row. Feed it tokens with `push`, take what is safe to show, `flush` at the end.

    stop_strings: the first one to appear ends the text just before it; `stopped` becomes True. decoding: arguments of
    the tokenizer's `decode`; by default special tokens are left out, and spaces are as they are. prompt: ids before the
    first token. A stop string may begin in them, and may contain special tokens, as in transformers.
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
        self._tokens: list[int] = []
        self._context = 0  # decoding starts here: tokens before cannot change the text any more
        self._decoded = 0  # tokens whose text was taken
        # Characters that may be the beginning of a stop string, and whether each shows.
        self._held: list[tuple[str, bool]] = [(character, False) for character in self._end_of(prompt)]
        self._raw = ""  # all text taken from the tokenizer
        self.text = ""  # all text released
        self.stopped = False

    def begin(self, tokens: Sequence[int]) -> str:
        """Go on from these tokens; returns their text, in which no stop string is looked for."""
        self._tokens = list(tokens)
        ends = [len(tokens) - half for half in range(min(4, len(tokens) + 1))]  # a character has at most four parts
        whole = [end for end in ends if not self._decode(self._tokens[:end]).endswith("\ufffd")]
        self._decoded = whole[0] if whole else len(tokens)
        self._context = max(0, self._decoded - 1)  # what comes may be joined to the token before it
        self._raw = self._decode(self._tokens[: self._decoded])
        return self._raw

    def push(self, token: int) -> str:
        """Add a token; returns the text that is final now."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        if token in self._special:
            return self._take(self._special[token], shows=False)
        before = self._decode(self._tokens[self._context : self._decoded])
        now = self._decode(self._tokens[self._context :])
        # A text that ends in a replacement character is half a character, or will turn out to be no text at all.
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._context, self._decoded = self._decoded, len(self._tokens)
        return self._take(now[len(before) :])

    def flush(self) -> str:
        """No more tokens: returns what was held back."""
        if self.stopped:
            return ""
        whole = self._decode(self._tokens)
        rest = self._take(whole[len(self._raw) :]) if whole.startswith(self._raw) else ""
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

    def _end_of(self, prompt: Sequence[int]) -> str:
        """What a stop string may have of the prompt's text: all but its last character."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        if longest < 1:
            return ""
        tokens = list(prompt[-longest - 4 :])  # one per character, and those of half a character before
        text = self._tokenizer.decode(tokens, **(_PLAIN | {"skip_special_tokens": False})).rstrip("\ufffd")
        return text[-longest:]

    def _take(self, delta: str, shows: bool = True) -> str:
        self._raw += delta if shows else ""
        pending = [*self._held, *((character, shows) for character in delta)]
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
