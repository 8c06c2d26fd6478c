"""Small things several tests use."""

from __future__ import annotations

import inspect
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import caches
from strategies import Emit, Forward

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


def new_cache(name: str, model, tokens: int = 64) -> caches.Driven:
    """An empty cache of this backend for the model; skips the test where the backend is not for this kind of model."""
    options = {"max_cache_len": tokens} if caches.recipe(name).has_a_size else {}
    try:
        return caches.build(name, model.config, **options)
    except caches.UnsupportedLayer as error:
        pytest.skip(str(error))


def skip_if_refused(name: str, model) -> None:
    """Skip the test where the backend is not for this kind of model."""
    new_cache(name, model)


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


_PATH = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"  # where the `engine` of these tests is
