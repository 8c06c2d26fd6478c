"""Where the command line writes: texts, tables and JSON to standard output, all else to standard error."""

from __future__ import annotations

import os
import sys
from typing import TextIO

import typer
from rich.console import Console

UNREAD = 141  # the exit code of a program that writes to a pipe which is closed, as shells give it


def say(text: str, end: str = "\n") -> None:
    """Write to standard output at once. Where its reader has left (`| head`), the command ends."""
    write(sys.stdout, text + end)


def complain(message: str) -> None:
    """Say in one line, on standard error, what is wrong."""
    _note(f"error: {' '.join(message.split())}", "red")


def remark(message: str) -> None:
    """Say something to a person: nothing where standard error is no terminal."""
    if _is_watched():
        _note(message, "dim")


def tell(text: str) -> None:
    """Write lines to standard error."""
    write(sys.stderr, text + "\n")


def write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        leave(stream)
        raise typer.Exit(UNREAD) from None


def leave(stream: TextIO) -> None:
    """What is left to be written goes nowhere: Python would complain when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _note(message: str, style: str) -> None:
    console = Console(stderr=True, highlight=False)
    with console.capture() as noted:
        console.print(message, style=style, markup=False, soft_wrap=True)
    write(sys.stderr, noted.get())


def _is_watched() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
