"""Small things several tests use."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from dataclasses import dataclass

import torch

from strategies import Emit, Forward


def toy_flow(rows: list[list[int]]):
    """A strategy that says what it is told: the columns of `rows`, again and again."""

    @dataclass(frozen=True)
    class Scripted:
        name = "scripted"
        samples = False

        def flow(self, ids, process):
            yield Forward(ids)
            while True:
                ids = yield Emit(torch.tensor(rows))
                yield Forward(ids[:, -1:])

    return Scripted()


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
