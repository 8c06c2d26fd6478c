"""The progress line of the command line: on standard error, only on a terminal, removed at the end."""

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
    """A context manager for the progress line: `doing` sets the current work, `count` its progress.

    is_shown: False for one that stays silent.
    """

    def __init__(self, is_shown: bool = True) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[counted]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not (is_shown and sys.stderr.isatty()),
        )
        self._task = self._bar.add_task("", total=None, counted="")
        self._since_s = 0.0
        self._tokens: Counter[int] = Counter()  # of each row

    def __enter__(self) -> Work:
        self._bar.start()
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.hide()

    def doing(self, description: str) -> None:
        """Show `description` as the current work, and restart its clock."""
        self._since_s = time.perf_counter()
        self._bar.reset(self._task, total=None, description=description, counted="")

    def count(self, chunk: StreamChunk, limit: int | None) -> None:
        """Show the progress after a chunk of the stream. limit: the most new tokens of a row; None if unknown."""
        if not self._tokens:
            self.doing("generating")
        self._tokens[chunk.row] += len(chunk.tokens)
        longest = max(self._tokens.values())
        rate = self._tokens.total() / max(time.perf_counter() - self._since_s, 1e-9)
        counted = f"{longest}{f' of {limit}' if limit else ''} tokens, {rate:.1f} tokens/s"
        self._bar.update(self._task, completed=longest, total=limit, counted=counted)

    def hide(self) -> None:
        """Remove the progress line."""
        self._bar.stop()
