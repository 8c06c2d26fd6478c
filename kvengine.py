"""Where the packages `configs`, `caches`, `strategies` and `engine` come from. Each asks when it is imported.

A module of its own: their names are so common that a folder of the user's may hide any of them.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def check_siblings(package_file: str, *names: str) -> None:
    """Raise `ImportError` where one of the packages called `names` is not in the folder of the package that asks.

    package_file: its `__file__`.
    """
    folder = Path(package_file).resolve().parent.parent
    for name in names:
        spec = getattr(sys.modules.get(name), "__spec__", None) or find_spec(name)
        if spec is None:
            continue  # not there at all: the import that follows says so
        found = [Path(place).resolve() for place in spec.submodule_search_locations or [spec.origin or name]]
        if folder / name not in found:
            raise ImportError(
                f"{found[0]} hides the package {name!r} of kvengine in {folder / name}: Python finds it first, as it "
                "does with folders in the working directory. Run from another folder, rename that one, or keep the "
                "working directory off the path with `python -P` or PYTHONSAFEPATH=1 (Python 3.11 and later)"
            )
