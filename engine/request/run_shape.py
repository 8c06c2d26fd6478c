"""`RunShape`: the numbers that the memory of a run depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunShape:
    """prompts: rows of the prompt. branches: rows that each of them becomes. new_tokens: of each row, at most.

    source_tokens: tokens that an encoder has read. chunk_tokens: tokens of the prompt per forward, None for all.
    ends_early: whether a row may end before it has all its tokens. shares: whether rows of a prompt may share its
    tokens in the cache. max_cache_len: the size that the generation parameters ask for, or None. score_copies: float32
    tensors [rows, vocabulary] that exist at the same time, see `engine.request.strategy.score_copies`.
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
    def kept(self) -> int:
        """Tokens of a row that the cache holds in the end: all but the last, which is never fed."""
        return self.prompt_tokens + self.new_tokens - 1
