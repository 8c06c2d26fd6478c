"""The names that a cache's attributes had in release 0.1."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any


class OldName:
    """The former name of the attribute `new` ("stack.pending": of a part of the cache), with a warning.

    arguments: the new names of renamed ones.
    """

    def __init__(self, new: str, **arguments: str):
        self.new, self.arguments = new, arguments

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = name

    def __get__(self, cache: object, owner: type | None = None) -> Any:
        if cache is None:
            return self
        found = attrgetter(self.new)(cache)
        text = f"a cache's {self.old} is now {self.new}; the old name goes in release 0.3"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return self._renaming(found) if self.arguments else found

    def _renaming(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: method(
            *args, **{self.arguments.get(name, name): value for name, value in named.items()}
        )
