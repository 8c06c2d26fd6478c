"""Generating without a cache: nothing is ever seen, so the loop feeds the whole sequence in every step."""

from __future__ import annotations

import torch


class NoCache:
    """Has nothing to open, commit or undo."""

    name = "none"
    log = None
    handle = None
    seen = 0
    max_tokens = None
    fixed = False
    bytes = 0

    def begin(self, tokens: int, graph: bool = False) -> None:
        pass

    def settle(self, drop: int = 0) -> None:
        pass

    def abort(self) -> None:
        pass

    def rows(self, index: torch.Tensor) -> None:
        pass

    def reserve(self, tokens: int) -> None:
        pass

    def reset(self) -> None:
        pass
