"""torch and transformers, imported in less time than import statements take.

What a program sees of them is the same, whether it has imported them before, does so later or never.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

_HQQ = "hqq.core.quantize"
_FROZEN_BY_PYTHON = 1000
"""Objects, at most: Python 3.12 freezes 375 by itself. A bare program has 5,000 that it could freeze."""
_MODULES = (
    "torch",
    "transformers.cache_utils",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto",
)


def import_transformers() -> None:
    """Import what every run needs of them, unless the program has done so."""
    if "transformers.modeling_utils" in sys.modules:
        return
    with _collections_paused():
        for shortcut in (_import_cache_utils, _import_models):
            with suppress(Exception):  # a release of transformers that it does not fit imports them its own way, below
                shortcut()
        for name in _MODULES:
            importlib.import_module(name)


@contextmanager
def _collections_paused() -> Iterator[None]:
    """Python's garbage collector does not run inside.

    Imports make several 100,000 objects that stay. The collector goes through them many times and finds nothing, which
    is a quarter of the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() <= _FROZEN_BY_PYTHON:  # else what the program froze would be unfrozen
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, where a collection would have moved them
        gc.enable()


def _import_cache_utils() -> None:
    """Import `transformers.cache_utils`, which imports hqq where it is installed, without hqq.

    hqq imports the whole of torch's compiler, and is needed by transformers' own HQQ caches alone: they get it on first
    use. In releases of transformers in which other modules import hqq too, they get it then.
    """
    name = "transformers.cache_utils"
    importlib.import_module("transformers.configuration_utils")  # first, so that little is imported meanwhile
    if name in sys.modules or _HQQ in sys.modules:
        return
    sys.modules[_HQQ] = _HqqModule(_HQQ)
    try:
        importlib.import_module(name)
    finally:
        del sys.modules[_HQQ]


def _import_models() -> None:
    """Import `transformers.models` with the names that `transformers` has found in the files of all its models.

    By itself it reads those 2,000 files a second time, which takes 0.2 s.
    """
    name, prefix = "transformers.models", "models."
    utils: Any = importlib.import_module("transformers.utils.import_utils")
    if name in sys.modules:
        return
    find = utils.define_import_structure  # keeps what it has found
    folder = Path(utils.__file__).parents[1] / "models"
    found = {
        needed: {file.removeprefix(prefix): names for file, names in files.items() if file.startswith(prefix)}
        for needed, files in find(folder, prefix="models").items()
    }
    if not found[frozenset()]:
        return
    known = {str(folder / "__init__.py"): found}
    utils.define_import_structure = lambda path, *rest: known.pop(str(path), None) or find(path, *rest)
    try:
        importlib.import_module(name)
    finally:
        utils.define_import_structure = find


def _quantizer() -> Any:
    return importlib.import_module(_HQQ).Quantizer


class _HqqModule(ModuleType):
    """What `transformers.cache_utils` imports in place of hqq's module."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.Quantizer = _Quantizer()


class _Quantizer:
    """hqq's `Quantizer`, a class of class methods, imported when one of them is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_quantizer(), name)

    def __reduce__(self) -> Any:  # a copy is the class itself
        return _quantizer, ()
