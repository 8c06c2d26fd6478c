"""Small things several tests use."""

from __future__ import annotations

import fcntl
import inspect
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import StoppingCriteria

import caches
from engine.model.model_runner import ModelRunner
from strategies import Crop, Emit, Forward, Task

_HAVE_COMPILER = shutil.which("c++") is not None


def needs_kernels(test: Callable) -> Callable:
    """Compiling them takes a while, once per machine."""
    return pytest.mark.slow(pytest.mark.skipif(not _HAVE_COMPILER, reason="no C++ compiler")(test))


def toy_flow(rows: list[list[int]]):
    """A strategy that says what it is told: the columns of `rows`, again and again."""

    @dataclass(frozen=True)
    class Scripted:
        name = "scripted"
        samples = False

        def flow(self, task):
            ids = task.ids
            yield Forward(ids)
            while True:
                ids = yield Emit(torch.tensor(rows))
                yield Forward(ids[:, -1:])

    return Scripted()


def new_cache(name: str, model, tokens: int = 64) -> caches.EngineCache:
    """An empty cache of this backend for the model; skips the test where the backend is not for this kind of model."""
    options = {"max_cache_len": tokens} if caches.recipe(name).has_a_size else {}
    try:
        return caches.build(name, model.config, **options)
    except caches.UnsupportedLayerError as error:
        pytest.skip(str(error))


def skip_if_refused(name: str, model) -> None:
    """Skip the test where the backend is not for this kind of model."""
    new_cache(name, model)


def try_facts(model) -> None:
    """Let the model be tried now: forwards that are counted later are those of runs alone."""
    runner = ModelRunner(model)
    for fact in ("several", "cut", "padded", "in_cache", "reordered", "states", "all_logits"):
        getattr(runner.facts, f"why_not_{fact}")


def cache_argument(model) -> str:
    """What the model's forward calls its cache."""
    return "past_key_values" if "past_key_values" in inspect.signature(model.forward).parameters else "cache_params"


def in_terminal(command: list[str], columns: int = 100) -> tuple[str, int]:
    """Run a command on a terminal of its own; everything it showed there, and its exit code."""
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "40", "PATH": _PATH}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    while True:
        try:
            shown += (part := os.read(master, 65536))
        except OSError:  # how Linux says that the other side is closed
            break
        if not part:
            break
    os.close(master)
    return shown.decode(), process.wait(timeout=60)


class Terminal:
    """A command on a terminal of its own, into which a test types. shown: everything it has shown."""

    def __init__(self, command: list[str], folder: Path | None = None):
        self._side, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, start_new_session=True,
            env=os.environ | {"TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)
        self.shown, self._seen = "", 0

    def until(self, text: str, seconds: float = 120, at_the_end: bool = False) -> None:
        """Read until it has shown this text behind what was waited for before, as the last thing where asked for."""
        end = time.monotonic() + seconds
        while not self.shown.endswith(text, self._seen) if at_the_end else self.shown.find(text, self._seen) < 0:
            assert time.monotonic() < end, self.shown[-1000:]
            if select.select([self._side], [], [], 1)[0]:
                self.shown = re.sub(
                    "\x1b.\\?2004[hl]\r?", "", self.shown + os.read(self._side, 4096).decode(errors="replace")
                )
        self._seen = len(self.shown) if at_the_end else self.shown.index(text, self._seen) + len(text)

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._side)


_PATH = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"  # where the `engine` of these tests is


def needed(cache: str) -> dict[str, int]:
    """Options without which there is no such cache: as wide as any text here."""
    names = caches.recipe(cache).options.option_names()
    if "num_sink_tokens" in names:
        return {"window_length": 256}
    return {"max_cache_len": 64} if caches.recipe(cache).has_a_size else {}


def looks_ahead(text: torch.Tensor, ahead: int):
    """Follows `text` [rows, columns]; after every token it feeds `ahead` wrong ones as well and takes them back."""

    @dataclass(frozen=True)
    class LooksAhead:
        name = "looks_ahead"
        samples = False

        def flow(self, task):
            ids = task.ids
            wrong = (text + 7) % 90 + 2
            tokens = ids
            for column in range(ids.shape[1], text.shape[1], 2):
                logits = yield Forward(tokens)
                yield Emit(logits.argmax(-1)[:, None])
                if column + 1 + ahead >= text.shape[1]:
                    return
                yield Forward(torch.cat([text[:, column : column + 1], wrong[:, column : column + ahead]], dim=1))
                yield Crop(ahead)
                tokens = text[:, column + 1 : column + 2]
                yield Emit(tokens)

    return LooksAhead()


def task(ids, process=lambda ids, scores: scores, max_columns=10, eos_ids=(), mask=None, **more):
    """What a flow gets for the prompt `ids`; texts end with an eos id or at `max_columns`."""
    eos = torch.tensor(list(eos_ids))
    return Task(
        ids=ids,
        mask=torch.ones_like(ids) if mask is None else mask,
        process=process,
        ended=lambda ids: torch.isin(ids[:, -1], eos) | (ids.shape[1] >= max_columns),
        max_columns=max_columns,
        eos_ids=frozenset(eos_ids),
        **more,
    )


class StopAfter(StoppingCriteria):
    def __init__(self, columns):
        self.columns = columns

    def __call__(self, ids, scores, **kwargs):
        done = ids.shape[1] >= self.columns
        return torch.full((ids.shape[0],), done, dtype=torch.bool)


@contextmanager
def threads_of_torch(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_rounded_once(found, exact):
    """That `found` is `exact`, of double precision, rounded to its data type, but for errors of sums in float32."""
    rounding = 0 if found.dtype == torch.float32 else torch.finfo(found.dtype).eps / 2
    torch.testing.assert_close(found.double(), exact, atol=2e-5, rtol=1e-4 + rounding)


def wide(*shape):
    """A part of a larger tensor, as buffers with free slots are."""
    rows, heads, slots, width = shape
    return torch.randn(rows, heads, slots + 5, width)[:, :, :slots]
