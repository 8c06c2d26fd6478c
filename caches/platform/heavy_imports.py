"""Imports torch and transformers faster than plain import statements, with the same result."""

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
"""Objects: Python 3.12 freezes 375 by itself. A program that calls `gc.freeze` freezes 5,000 or more."""
_MODULES = (
    "torch",
    "transformers.cache_utils",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto",
)


def import_transformers() -> None:
    """Import the modules that every run needs, unless the program has imported transformers already."""
    if "transformers.modeling_utils" in sys.modules:
        return
    with _collections_paused():
        for shortcut in (_import_cache_utils, _import_models):
            with suppress(Exception):  # if it does not fit the release of transformers, the plain import below does
                shortcut()
        for name in _MODULES:
            importlib.import_module(name)


@contextmanager
def _collections_paused() -> Iterator[None]:
    """A context without garbage collections.

    Imports create several 100,000 objects that stay. Collections during the imports find no garbage and take a quarter
    of their time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() <= _FROZEN_BY_PYTHON:  # or objects that the program froze would be unfrozen
            gc.freeze()
            gc.unfreeze()  # moves them to the oldest generation, as collections would have done
        gc.enable()


def _import_cache_utils() -> None:
    """Import `transformers.cache_utils` without hqq, which it imports if installed.

    hqq imports torch's compiler and is needed only by transformers' own HQQ caches, which import it on first use.
    """
    name = "transformers.cache_utils"
    importlib.import_module("transformers.configuration_utils")  # before the stand-in for hqq is in sys.modules
    if name in sys.modules or _HQQ in sys.modules:
        return
    sys.modules[_HQQ] = _HqqModule(_HQQ)
    try:
        importlib.import_module(name)
    finally:
        del sys.modules[_HQQ]


def _import_models() -> None:
    """Import `transformers.models` with the import structure that `import transformers` has built already.

    Without this, transformers reads its 2,000 model files a second time, which takes 0.2 s.
    """
    name, prefix = "transformers.models", "models."
    utils: Any = importlib.import_module("transformers.utils.import_utils")
    if name in sys.modules:
        return
    find = utils.define_import_structure  # cached
    folder = Path(utils.__file__).parents[1] / "models"
    structure = {
        needed: {file.removeprefix(prefix): names for file, names in files.items() if file.startswith(prefix)}
        for needed, files in find(folder, prefix="models").items()
    }
    if not structure[frozenset()]:
        return
    structures = {str(folder / "__init__.py"): structure}
    utils.define_import_structure = lambda path, *arguments: structures.pop(str(path), None) or find(path, *arguments)
    try:
        importlib.import_module(name)
    finally:
        utils.define_import_structure = find


def _quantizer() -> Any:
    return importlib.import_module(_HQQ).Quantizer


class _HqqModule(ModuleType):
    """Stands in for hqq's module while `transformers.cache_utils` is imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.Quantizer = _Quantizer()


class _Quantizer:
    """hqq's `Quantizer`, a class of class methods, imported when one of them is used."""

    def __getattr__(self, name: str) -> object:
        return getattr(_quantizer(), name)

    def __reduce__(self) -> Any:  # copies and pickles are hqq's class
        return _quantizer, ()
