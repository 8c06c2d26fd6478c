"""Generation without a cache: nothing is kept, so the loop feeds the full sequence in every step."""

from __future__ import annotations

from caches.protocol import Capabilities, TokenLog


class NoCache:
    """Has nothing to open, commit or undo."""

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

    def __init__(self, name: str = "none"):
        self.name = name

    def can_reject(self, rejected: int) -> bool:
        return True

    def _do_nothing(self, *arguments: object, **named: object) -> None:
        """There is nothing to check, keep or undo."""

    check_fits = begin = commit = abort = select_rows = finish = crop = fork = reserve = reset = _do_nothing
