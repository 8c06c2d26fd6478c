"""`Texts`: the texts of requests as token ids. What cannot fit is refused before the work that it would be."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from engine.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LONG_CHARACTERS = 2**16  # a text of more takes a tenth of a second or longer
_MARGIN_TOKENS = 64  # by which the beginning of a text may have more tokens than in all of it
_BYTES_PER_CHARACTER = 512  # that tokenizing takes; 170 to 490 were measured


class Texts:
    """tokenizer: of the model. context_tokens: more than these are refused; None for no limit."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context_tokens: int | None):
        self.tokenizer, self._context_tokens = tokenizer, context_tokens

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def ids(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """What `encode` makes of a text, if its ids may fit. Raises `InputError`, `MemoryError`."""
        self._check_size(text)
        ids = _tokenized(text, encode)
        if not ids:
            raise InputError("the prompt is empty: the model needs at least one token to begin with")
        return ids

    def _check_size(self, text: str) -> None:
        limit = self._context_tokens
        if limit is None:
            return
        if len(text) > limit * self._longest:
            raise InputError(
                f"the prompt has {len(text):,} characters, but the model's context has {limit:,} tokens of "
                f"{self._longest} characters at most: shorten the prompt"
            )
        size = LONG_CHARACTERS
        while size < len(text):  # the beginning shows whether the rest need be read
            if (tokens := len(_tokenized(text[:size], self._plain_ids))) > limit + _MARGIN_TOKENS:
                raise InputError(
                    f"the first {size:,} of {len(text):,} characters of the prompt have {tokens:,} tokens, but the "
                    f"model's context has {limit:,}: shorten the prompt"
                )
            size *= 4

    def _plain_ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _tokenized(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    _check_memory(_BYTES_PER_CHARACTER * len(text))
    try:
        return encode(text)
    except InputError:
        raise
    except (TypeError, ValueError) as error:  # half of a surrogate pair
        raise InputError(f"the prompt is no text: {type(error).__name__}") from None


def _check_memory(size: int) -> None:
    """Raise `MemoryError` where so many bytes are not there: without memory tokenizers in Rust end the process."""
    try:
        mmap.mmap(-1, max(1, size)).close()
    except OSError as error:
        raise MemoryError(f"{size:,} bytes to tokenize a prompt: {error.strerror}") from None
