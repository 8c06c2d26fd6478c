"""Plug-ins: caches and strategies of other packages, and rules for registering a name twice."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from importlib.metadata import entry_points

from configs.errors import ConfigError

_loaded: set[str] = set()
_loading = threading.RLock()


def check_name(name: str, registered: Sequence[object], definitions: Sequence[object], replace: bool) -> None:
    """Raise `ConfigError` if a name is registered by other definitions, unless `replace`.

    name: in words. registered, definitions: the classes and functions that are registered, and those to register. They
    are the same if their modules and qualified names are equal, as when a notebook's cell is executed again.
    """
    if not replace and list(map(_qualified_name, registered)) != list(map(_qualified_name, definitions)):
        owners = " and ".join(map(_qualified_name, registered))
        raise ConfigError(f"{name} is registered already, by {owners}: choose another name, or pass replace=True")


def _qualified_name(definition: object) -> str:
    if not hasattr(definition, "__qualname__"):  # such as a functools.partial
        return repr(definition)
    return f"{definition.__module__}.{definition.__qualname__}"


def load_plugins(group: str) -> None:
    """Import the entry points of `group` of all installed packages, once; on import they register themselves.

    An entry point that cannot be imported is logged as a warning, with its traceback.
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
