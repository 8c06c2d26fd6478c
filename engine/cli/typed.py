"""What is typed into a terminal, or piped: lines, and pasted texts of several lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from engine.cli import output
from engine.errors import OptionError

# What a terminal sends around a pasted text, if it was asked to mark it: "bracketed paste".
_BEGIN, _END = "\x1b[200~", "\x1b[201~"
_MARK, _DO_NOT_MARK = "\x1b[?2004h", "\x1b[?2004l"


def read_line(prompt: str) -> str:
    """A line of standard input, without its end; a pasted text with all its line breaks.

    Raises `EOFError`, and `OptionError` if it is no text.
    """
    line = _read(prompt)
    if not sys.stdin.isatty():
        return line
    with suppress(EOFError):
        while line.count(_BEGIN) > line.count(_END):
            line += "\n" + _read("")
    return line.replace(_BEGIN, "").replace(_END, "").rstrip("\n")


def _read(prompt: str) -> str:
    try:
        line = input(prompt) + "\n" if sys.stdin.isatty() else sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is no text in UTF-8: {error.reason} at byte {error.start}") from error
    if not line:
        raise EOFError
    return line.removesuffix("\n")


@contextmanager
def editing() -> Iterator[None]:
    """A context in which a person at a terminal can edit lines, and pasted texts are marked as such.

    libedit, which Python has in place of GNU readline on some systems, takes pasted lines one by one.
    """
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:  # not on every system
        readline = None  # type: ignore[assignment]
    if readline is None or not sys.stdout.isatty():  # where answers go to a file, `input` leaves it out
        with _marking():
            yield
        return
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    yield


@contextmanager
def _marking() -> Iterator[None]:
    try:
        import termios
    except ImportError:  # Windows
        termios = None  # type: ignore[assignment]
    if termios is None or not sys.stderr.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before, quiet = termios.tcgetattr(terminal), termios.tcgetattr(terminal)
    quiet[3] &= ~termios.ECHOCTL  # it would show the marks
    try:
        termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
        output.write(sys.stderr, _MARK)
        yield
    finally:
        output.write(sys.stderr, _DO_NOT_MARK)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
