"""What the command line is doing at the moment: on standard error, on a terminal only, and gone when it is done."""

from __future__ import annotations

import gc
import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


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

    def __enter__(self) -> Work:
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.hide()

    def doing(self, what: str) -> None:
        self._since_s = time.perf_counter()
        self._bar.reset(self._task, total=None, description=what, counted="")

    def starts_libraries(self) -> None:
        """Import torch and transformers, unless the process has them."""
        if "caches" in sys.modules:
            return
        self.doing("starting torch and transformers")
        import caches  # noqa: F401 - before any other import of them: it takes less time

        gc.freeze()  # all of it stays until the end: neither collections nor the exit have to go through it

    def count(self, tokens: int, total: int, rows: int = 1) -> None:
        """`tokens` of at most `total` are there, in each of `rows` rows."""
        rate = rows * tokens / max(time.perf_counter() - self._since_s, 1e-9)
        counted = f"{tokens} of {total} tokens, {rate:.1f} tokens/s"
        self._bar.update(self._task, completed=tokens, total=total, counted=counted)

    def watch(self, total: int, rows: int) -> Any:
        """A logits processor that counts the steps of a generation of `rows` texts, whatever its strategy."""
        first = longest = 0

        def count(ids: Any, scores: Any) -> Any:
            nonlocal first, longest
            if not first:
                first = ids.shape[1]
                self.doing("generating")
            longest = max(longest, ids.shape[1])  # what is proposed comes too, and may be taken back
            self.count(longest - first + 1, total, rows)
            return scores

        return count

    def hide(self) -> None:
        self._bar.stop()
