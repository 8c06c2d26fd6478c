"""Output of the command line: results to standard output, messages to standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO

import typer
from rich.console import Console

from engine.cli.rendering import WordWrap, as_json
from engine.tables import wrapped

UNREAD = 141  # the exit code that shells show for SIGPIPE


def say(text: str, end: str = "\n") -> None:
    """Write to standard output and flush. If the reader closed the pipe (`| head`), the command ends."""
    write(sys.stdout, text + end)


def say_pieces(pieces: Iterable[str]) -> None:
    """Write a text as it comes, and the end of its last line. A terminal breaks no word of it."""
    console = Console()
    wrap = WordWrap(console.width) if sys.stdout.isatty() and not console.is_dumb_terminal else None
    for piece in pieces:
        say(piece if wrap is None else wrap.shown(piece), end="")
    say("")


def say_json(value: object) -> None:
    """Write a line of JSON to standard output, with real characters where its encoding has them."""
    say(as_json(value, getattr(sys.stdout, "encoding", None)))


def mute() -> None:
    """Print results and messages nowhere, only errors: another rank of the model prints the same."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def complain(message: str) -> None:
    """Write an error to standard error, in one line where that is no terminal."""
    _note(f"error: {' '.join(message.split())}", "red")


def remark(message: str) -> None:
    """Write a hint to standard error, if it is a terminal."""
    if _is_watched():
        _note(message, "dim")


def tell(text: str) -> None:
    """Write lines to standard error."""
    write(sys.stderr, _fitted(text) + "\n")


def write(stream: TextIO | None, text: str) -> None:
    """Write and flush; raises `typer.Exit(UNREAD)` if the reader closed the pipe. None: closed from the beginning."""
    if stream is None:
        raise typer.Exit(UNREAD)
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        leave(stream)
        raise typer.Exit(UNREAD) from None


def leave(stream: TextIO) -> None:
    """Redirect a closed stream to the null device, or Python reports an error when it flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _note(message: str, style: str) -> None:
    console = Console(stderr=True, highlight=False)
    with console.capture() as noted:
        console.print(_fitted(message), style=style, markup=False, soft_wrap=True)
    write(sys.stderr, noted.get())


def _fitted(text: str) -> str:
    """Its lines wrapped to a terminal, which would break words; as they are where standard error is none."""
    if not _is_watched():
        return text
    width = Console(stderr=True).width
    return "\n".join(wrapped(line, width) for line in text.split("\n"))


def _is_watched() -> bool:
    return sys.stderr.isatty()
