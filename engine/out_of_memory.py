"""Errors of memory that is out, in words, and giving back what allocators keep in store."""

from __future__ import annotations

from accelerate.utils.memory import clear_device_cache

from engine.host_allocator import give_back_freed_memory

_LONG = 300  # characters of a message of another library


class Exhausted(Exception):
    """Memory is out, and there is nothing left that could be done about it. `__cause__`: the error that said so."""


def first_line(error: BaseException) -> str:
    """The first line of its text, without the place in torch's code; its class where it has none. A line that ends in a
    colon goes on with the next."""
    lines = [line.strip() for line in str(error).partition(" (originally from")[0].splitlines() if line.strip()]
    count = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    return " ".join(lines[:count]) or type(error).__name__


def in_words(error: BaseException) -> str:
    """Its class and the first line of its text."""
    line = first_line(error)
    line = line if len(line) <= _LONG else f"{line[:_LONG].rpartition(' ')[0] or line[:_LONG]} ..."
    return line if line == type(error).__name__ else f"{type(error).__name__}: {line}"


def empty_allocators(collects: bool = True) -> None:
    """Give back what nothing refers to. Not while the error is handled: its frames refer to what the step has made.

    collects: whether garbage is collected, which takes 0.4 s in a process with torch and transformers.
    """
    clear_device_cache(garbage_collection=collects)
    give_back_freed_memory()
