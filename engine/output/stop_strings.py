"""Stop strings: where the first one begins in a text, and how much of its end may still become one."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class StopStrings:
    """The texts that end a text just before them."""

    def __init__(self, strings: Sequence[str]):
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def first(self, text: str, begin: int) -> int | None:
        """Where the first of them begins in `text`, if it ends behind the character `begin`; None if there is none."""
        begins = [text.find(string, max(0, begin - len(string) + 1)) for string in self._strings]
        return min((index for index in begins if index >= 0), default=None)

    def begun(self, text: str) -> int:
        """Length of the longest end of `text` that begins one of them."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(string.startswith(text[-length:]) for string in self._strings):
                return length
        return 0

    def end_of(self, text: str) -> str:
        """The end of `text` in which one of them may begin."""
        return text[-(self._longest - 1) :] if self._longest > 1 else ""


def ends_of(prompts: torch.Tensor, stop_strings: Sequence[str]) -> list[list[int]]:
    """The last ids of each row of `prompts` [rows, columns], pad tokens included, in which a stop string may begin."""
    columns = max((len(stop) for stop in stop_strings), default=0) + 4
    return prompts[:, -columns:].tolist() if stop_strings else [[] for _ in prompts]
