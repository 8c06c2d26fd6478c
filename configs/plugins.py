"""Caches and strategies of others: when a name may be given again, and packages that bring some along."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from configs.errors import ConfigError

_loaded: set[str] = set()
_loading = threading.RLock()


def check_name(what: str, holder: Sequence[Any], new: Sequence[Any], replace: bool) -> None:
    """Raise `ConfigError` where a name is taken by other definitions, unless they are to be replaced.

    what: the name, in words. holder, new: classes and functions. A definition that is executed again, such as a cell of
    a notebook, is the same one: its module and its qualified name are those of before.
    """
    if not replace and list(map(_place, holder)) != list(map(_place, new)):
        places = " and ".join(map(_place, holder))
        raise ConfigError(f"{what} is registered already, by {places}: choose another name, or say replace=True")


def _place(definition: Any) -> str:
    if not hasattr(definition, "__qualname__"):  # such as a functools.partial
        return repr(definition)
    return f"{definition.__module__}.{definition.__qualname__}"


def load_plugins(group: str) -> None:
    """Import what installed packages name as entry points of `group`, once: importing it registers it.

    One that cannot be imported is a warning, with its traceback.
    """
    with _loading:
        if group in _loaded:
            return
        _loaded.add(group)
        for point in entry_points(group=group):
            try:
                point.load()
            except Exception:
                package = "" if point.dist is None else f" of {point.dist.name}"
                logging.getLogger("configs").warning(
                    "the plug-in %r%s (%s) cannot be loaded", point.name, package, point.value, exc_info=True
                )
