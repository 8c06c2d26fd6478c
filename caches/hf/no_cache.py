"""Generation without a cache: nothing is kept, so the loop feeds the full sequence in every step."""

from __future__ import annotations

from typing import Any

import torch

from caches.protocol import Capabilities, TokenLog


class NoCache:
    """Has nothing to open, commit or undo."""

    name = "none"
    log: TokenLog | None = None
    handle = None
    total_tokens = 0
    batch_size = -1
    max_tokens = None
    max_rows = None
    why_not_compiled = "every step is of another length"
    bytes = device_bytes = 0
    unfinished = False
    capabilities = Capabilities(can_split=True)

    def check_fits(self, model_config: Any) -> None:
        pass

    def begin(self, tokens: int, graph: bool = False) -> None:
        pass

    def can_reject(self, rejected: int) -> bool:
        return True

    def commit(self, rejected: int = 0) -> None:
        pass

    def abort(self) -> None:
        pass

    def select_rows(self, index: torch.Tensor) -> None:
        pass

    def finish(self) -> None:
        pass

    def crop(self, tokens: int) -> None:
        pass

    def fork(self, times: int) -> None:
        pass

    def reserve(self, tokens: int) -> None:
        pass

    def reset(self) -> None:
        pass
