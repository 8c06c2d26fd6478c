"""Stored prefixes in a folder: for each a file that `Cache.save` writes, and a small one that says how it begins."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from caches import CacheError, EngineCache, load
from caches.layers.fingerprint import fingerprint
from caches.platform.machine import write_atomically
from caches.platform.out_of_memory import is_out_of_memory

_STALE_S = 600.0  # without a write: the process that wrote a partial file has ended


@dataclass(frozen=True)
class StoredFile:
    """What is known of a file without reading it. kind, ids, ...: see `prefix_store.StoredCache`."""

    kind: str
    ids: tuple[int, ...]
    prompt_tokens: int
    common_tokens: int
    is_croppable: bool


class PrefixFiles:
    """The files of one model in `folder`, which only this user can read. most_bytes: of all of them."""

    def __init__(self, model: Any, folder: str | Path, most_bytes: int):
        name = sha256(json.dumps(fingerprint(model), sort_keys=True).encode()).hexdigest()[:16]
        self._model, self._folder, self._most = model, Path(folder) / name, most_bytes
        for partial in self._folder.glob(".*"):
            if time.time() - _modified(partial) > _STALE_S:
                _unlink(partial)

    def __iter__(self) -> Iterator[StoredFile]:
        for path in sorted(self._folder.glob("*.json"), key=_modified):
            try:
                content = json.loads(path.read_text())
                file = StoredFile(**content | {"ids": tuple(content["ids"])})
                is_right = path.stem == name_of(file.kind, file.ids)
                is_right &= type(file.prompt_tokens) is type(file.common_tokens) is int
            except OSError:
                continue
            except (ValueError, TypeError, KeyError, RecursionError):
                is_right = False
            if is_right:
                yield file
            else:  # damaged; without it the file is made again
                _unlink(path)

    def write(self, file: StoredFile, cache: Any) -> set[str]:
        """Save the cache, and remove the oldest files where all together are too large. Raises `OSError`, `CacheError`.

        Returns the names of those that were removed: see `name_of`.
        """
        path = self._path(file)
        index = path.with_suffix(".json")  # written last: without it a process was killed in between
        if path.exists() and index.exists():
            return set()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been emptied
        needed, free = sum(cache.bytes_by_place.values()), shutil.disk_usage(self._folder).free
        if free < needed:  # to find out by writing takes as long as writing
            raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, and {free:,} free", str(self._folder))
        cache.save(path, self._model)
        write_atomically(index, json.dumps(asdict(file)).encode())
        sizes = {}
        for stored in self._folder.glob("*.safetensors"):
            with suppress(OSError):  # removed by another process
                sizes[stored] = stored.stat().st_size
        removed = set()
        for stored in sorted(sizes, key=_modified):
            if sum(sizes.values()) <= self._most:
                break
            _remove(stored)
            del sizes[stored]
            removed.add(stored.stem)
        return removed

    def read(self, file: StoredFile) -> EngineCache | None:
        """The cache in it; None where it cannot be read. A file that is gone, damaged, of another release or of other
        tokens is removed.

        Raises the error of memory that is out.
        """
        path = self._path(file)
        try:
            cache: Any = load(path, self._model)
        except (CacheError, OSError) as error:
            if is_out_of_memory(error):
                raise
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError):
                _remove(path)
            return None
        if cache.log is None or cache.log.ids[0, : cache.total_tokens].tolist() != list(file.ids):
            _remove(path)
            return None
        with suppress(OSError):  # of another user, or not to be written
            os.utime(path)
        return cache

    def remove(self, file: StoredFile) -> None:
        _remove(self._path(file))

    def _path(self, file: StoredFile) -> Path:
        return self._folder / f"{name_of(file.kind, file.ids)}.safetensors"


def name_of(key: str, ids: tuple[int, ...]) -> str:
    """The name of the file of a cache, without its ending."""
    return sha256(repr((key, ids)).encode()).hexdigest()[:32]


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed by another process
        return 0.0


def _remove(path: Path) -> None:
    for file in (path.with_suffix(".json"), path):
        _unlink(file)


def _unlink(path: Path) -> None:
    with suppress(OSError):
        os.unlink(path)
