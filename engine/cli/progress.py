"""What the command line is doing at the moment: on standard error, on a terminal only, and gone when it is done."""

from __future__ import annotations

import sys
import time
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from engine.result import StreamChunk


class Work:
    """A context in which `doing` names the work at hand, and `count` says how far it is."""

    def __init__(self) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[counted]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=None, counted="")
        self._since_s = 0.0
        self._tokens: Counter[int] = Counter()  # of each row

    def __enter__(self) -> Work:
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.hide()

    def doing(self, what: str) -> None:
        self._since_s = time.perf_counter()
        self._bar.reset(self._task, total=None, description=what, counted="")

    def count(self, piece: StreamChunk, limit: int | None) -> None:
        """Add the tokens of a piece of a stream. limit: the most of a row, if that is known."""
        if not self._tokens:
            self.doing("generating")
        self._tokens[piece.row] += len(piece.tokens)
        longest = max(self._tokens.values())
        rate = self._tokens.total() / max(time.perf_counter() - self._since_s, 1e-9)
        counted = f"{longest}{f' of {limit}' if limit else ''} tokens, {rate:.1f} tokens/s"
        self._bar.update(self._task, completed=longest, total=limit, counted=counted)

    def hide(self) -> None:
        self._bar.stop()
