"""The progress line of the command line: on standard error, only on a terminal, removed at the end."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Work:
    """A context manager for the progress line: `doing` sets the current work, `count` its progress."""

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

    def __enter__(self) -> Work:
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.hide()

    def doing(self, what: str) -> None:
        """Show `what` as the current work, and restart its clock."""
        self._since_s = time.perf_counter()
        self._bar.reset(self._task, total=None, description=what, counted="")

    def count(self, tokens: int, total: int | None, rows: int = 1) -> None:
        """Show that each of `rows` rows has `tokens` tokens. total: the most tokens, if known."""
        rate = rows * tokens / max(time.perf_counter() - self._since_s, 1e-9)
        counted = f"{tokens}{f' of {total}' if total else ''} tokens, {rate:.1f} tokens/s"
        self._bar.update(self._task, completed=tokens, total=total, counted=counted)

    def watch(self, total: int | None, rows: int) -> Any:
        """A logits processor that shows the progress of a run with `rows` texts, for any strategy."""
        first = longest = 0

        def count(ids: Any, scores: Any) -> Any:
            nonlocal first, longest
            if not first:
                first = ids.shape[1]
                self.doing("generating")
            longest = max(longest, ids.shape[1])  # proposed tokens may be rejected
            self.count(longest - first + 1, total, rows)
            return scores

        return count

    def hide(self) -> None:
        """Remove the progress line."""
        self._bar.stop()
