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
    package = Path(package_file).absolute().parent  # which may be a link, or be made of links to files
    folder = package.parent
    for name in names:
        module = sys.modules.get(name)
        spec = find_spec(name) if module is None else getattr(module, "__spec__", None)
        if module is None and spec is None:
            continue  # not there at all: the import that follows says so
        if spec is None:
            raise ImportError(
                f"{module} in sys.modules, which was not imported, hides the package {name!r} of kvengine in "
                f"{folder / name}: give it another name there"
            )
        found = [Path(place).resolve() for place in spec.submodule_search_locations or [spec.origin or name]]
        if not {(folder / name).resolve(), package.resolve().parent / name} & set(found):
            raise ImportError(
                f"{found[0]} hides the package {name!r} of kvengine in {folder / name}: Python finds it first, as it "
                "does with folders in the working directory. Run from another folder, rename that one, or keep the "
                "working directory off the path with `python -P` or PYTHONSAFEPATH=1 (Python 3.11 and later)"
            )
