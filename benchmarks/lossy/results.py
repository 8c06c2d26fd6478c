"""The rows that were measured so far, also in a file: a long run that is stopped loses one row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

_MEASURED = ("full", "caches", "weights", "peer", "stream")


class Results:
    """Rows by name, with those that the file `out` has from earlier runs. of: what both have to agree in, the model and
    its texts. Raises `typer.BadParameter` where they do not."""

    def __init__(self, out: Path | None, of: dict[str, Any]):
        self._out, of = out, json.loads(json.dumps(of))
        earlier = json.loads(out.read_text()) if out is not None and out.exists() else of
        if not of.items() <= earlier.items():
            raise typer.BadParameter(f"{out} has results of another model or of other texts: give another --out")
        self.rows: dict[str, Any] = of | {name: earlier[name] for name in _MEASURED if name in earlier}

    def add(self, **rows: Any) -> None:
        self.rows = _merged(self.rows, json.loads(json.dumps(rows)))
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(json.dumps(self.rows, indent=2) + "\n")


def _merged(earlier: Any, later: Any) -> Any:
    if not (isinstance(earlier, dict) and isinstance(later, dict)):
        return later
    return earlier | {name: _merged(earlier.get(name), value) for name, value in later.items()}
