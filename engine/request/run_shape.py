"""`RunShape`: the numbers that the memory of a run depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunShape:
    """What memory depends on in a run.

    prompts: rows that are read; branches: rows that each of them becomes. new_tokens: for each row, at most.
    source_tokens: what an encoder has read. chunk_tokens: as many of the prompt are read at once, None for all.
    ends_early: whether a row may end before it has all its tokens. shares: whether rows may share in the cache what
    they have in common. max_cache_len: a size that the generation parameters ask for, None for none. score_copies:
    float32 numbers there are at most at a time for every row and word of the vocabulary, see `choice.score_copies`.
    """

    prompt_tokens: int
    new_tokens: int
    prompts: int = 1
    branches: int = 1
    source_tokens: int = 0
    chunk_tokens: int | None = None
    ends_early: bool = False
    shares: bool = True
    max_cache_len: int | None = None
    score_copies: int = 2

    @property
    def rows(self) -> int:
        return self.prompts * self.branches

    @property
    def held(self) -> int:
        """Tokens of a row that the cache holds in the end: all but the last, which is never fed."""
        return self.prompt_tokens + self.new_tokens - 1
