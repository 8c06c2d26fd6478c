"""What a file that a cache was saved to says of it: its header, which is read without torch."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from configs.errors import CacheFileError

VERSION = 5  # a new default of an option that says how codes are read needs a new version
UNKNOWN_DIGEST = "0" * 64  # in place of the digest while it is computed


@dataclass(frozen=True)
class CacheFile:
    """What a file says about its cache.

    Attributes
    ----------
    path : Path
        Of the file.
    backend : str
        The name of the cache.
    options : dict
        Those of the backend.
    model : dict
        What tells the model from others: its class, data type, rotation, adapters, digests of its weights, of the
        buffers that are not saved, of the classes and settings of its modules, and of what its layers keep.
    rows, total_tokens : int
        Rows, and tokens per row.
    layers : int
        The number of layers.
    bytes : int
        Of the file.
    notes : dict
        What was saved with it.
    """

    path: Path
    backend: str
    options: dict[str, object]
    model: dict[str, str]
    rows: int
    total_tokens: int
    layers: int
    bytes: int
    notes: dict[str, Any]


def inspect(path: str | Path) -> CacheFile:
    """What a file says about its cache. Raises `CacheFileError` if it is damaged or no saved cache."""
    header = read_header(Path(path))
    stack = header["stacks"][0]["dict"]
    (name, options), size = header["backends"][0], Path(path).stat().st_size
    rows, layers = stack["rows"], len(stack["specs"])
    tokens = stack["total_tokens"]
    return CacheFile(Path(path), name, options, header["model"], rows, tokens, layers, size, header["notes"])


def read_header(path: Path) -> dict[str, Any]:
    """The header of a file all of whose bytes are as they were written."""
    with open(path, "rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:  # changes stay in memory
                length = int.from_bytes(content[:8], "little")
                metadata = json.loads(content[8 : 8 + length])["__metadata__"]
                digest = metadata["sha256"]
                at = content.find(f'"sha256":"{digest}"'.encode(), 8, 8 + length) + len('"sha256":"')
                content[at : at + len(UNKNOWN_DIGEST)] = UNKNOWN_DIGEST.encode()
                is_intact = sha256(content).hexdigest() == digest
            header = json.loads(metadata["kvengine"])
        except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
            raise CacheFileError(f"{path} is no saved cache, or damaged ({type(error).__name__}: {error})") from error
    if not is_intact:
        raise CacheFileError(f"{path} is damaged: its bytes are not those that were written")
    if header.get("version") != VERSION:
        raise CacheFileError(
            f"{path} has version {header.get('version')} of the format, and this release reads {VERSION}: read the "
            "tokens again"
        )
    return cast(dict[str, Any], header)
