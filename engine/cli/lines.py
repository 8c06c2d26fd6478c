"""Many prompts of `engine generate` together, a line of JSON for each: printed, or in a file that can be resumed."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli import output
from engine.cli.rendering import as_json
from engine.errors import EngineError, OptionError
from engine.tables import counted

if TYPE_CHECKING:
    from engine.generator import Generator

# How lines begin, with 0 for any index; those of earlier versions have no digest.
_BEGINNINGS = (b'{"index": 0, "digest": "', b'{"index": 0, "rows": [', b'{"index": 0, "error": "')


@dataclass(frozen=True)
class Lines:
    """Lines of JSON for many prompts.

    path: the file of `--jsonl`; None for standard output. digests: of each prompt and what shapes its text. labels: of
    each prompt, which its line has too. writes: False where another rank of the model writes the lines. done: the
    prompts that have their text in the file.
    """

    path: Path | None
    digests: list[str]
    labels: list[dict[str, object]]
    writes: bool
    done: frozenset[int] = frozenset()


def opened(lines: Lines, path: Path, files: list[Path]) -> Lines:
    """Read the file at `path`, and remove a last line that was not finished from it. files: those of the prompts.

    Raises `OptionError` if it has other lines than `--jsonl` writes, or texts of other prompts or options.
    """
    for file in files:
        if path.exists() and file.exists() and path.samefile(file):
            raise OptionError(f"--jsonl {path} has the prompts of --file {file}: name another file")
    content = path.read_bytes() if path.is_file() else b""  # a pipe has nothing to resume, and reading it would wait
    *complete, unfinished = content.split(b"\n")
    written_lines = [line for line in (_read(path, line) for line in complete) if "rows" in line]
    _check_digests(path, written_lines, lines.digests)
    if unfinished:
        _check_unfinished(path, unfinished)
        if lines.writes:
            os.truncate(path, len(content) - len(unfinished))
    return replace(lines, done=frozenset(line["index"] for line in written_lines))


def write_lines(generator: Generator, prompts: list[Any], lines: Lines, parameters: dict[str, Any]) -> None:
    """Generate for the prompts that have no text in the file yet, and add a line for each as it ends."""
    path = lines.path if lines.writes else Path(os.devnull)
    missing = [index for index in range(len(prompts)) if index not in lines.done]
    if lines.done and lines.writes:
        output.tell(f"({len(prompts) - len(missing)} of {len(prompts)} prompts have their text in {path} already)")
    failed = 0
    requests = generator.generate_many(
        [prompts[index] for index in missing], progress=lines.writes and sys.stderr.isatty(), **parameters
    )
    with nullcontext() if path is None else path.open("a", encoding="utf-8") as file:
        for request in requests:
            index, error = missing[request.index], request.error
            if error is None:
                fields = request.result().to_dict()
            else:
                fields, failed = {"error": " ".join(str(error).split())}, failed + 1
            line = {"index": index, "digest": lines.digests[index]} | lines.labels[index] | fields
            if file is None:
                output.say_json(line)
            else:
                file.write(as_json(line) + "\n")
                file.flush()
    if failed:
        where = "the lines of these" if path is None else f"{path}; run it again for these"
        raise EngineError(f"{failed} of {counted(len(prompts), 'prompt')} failed: their errors are in {where}")


def digests_of(prompts: list[object], shapes: object) -> list[str]:
    """A digest for each prompt. shapes: what shapes the texts of all of them, as values of JSON."""
    shared, digests = sha256(_as_bytes(shapes)), []
    for prompt in prompts:
        digest = shared.copy()
        digest.update(_as_bytes(prompt))
        digests.append(digest.hexdigest()[:16])
    return digests


def _as_bytes(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _read(path: Path, line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
        is_written = type(fields["index"]) is int and (
            isinstance(fields.get("rows"), list) or isinstance(fields.get("error"), str)
        )
    except (ValueError, TypeError, KeyError):
        is_written = False
    if not is_written:
        raise _not_written(path, line)
    return fields


def _check_unfinished(path: Path, unfinished: bytes) -> None:
    """Raise `OptionError` if what is behind the last complete line is no beginning of one."""
    begins = re.sub(rb"\d+", b"0", unfinished, count=1)
    if not any(begins.startswith(beginning) or beginning.startswith(begins) for beginning in _BEGINNINGS):
        raise _not_written(path, unfinished)


def _not_written(path: Path, line: bytes) -> OptionError:
    return OptionError(f"{path} has lines that --jsonl has not written ({line[:40]!r}): name another file")


def _check_digests(path: Path, written_lines: list[dict[str, Any]], digests: list[str]) -> None:
    """Raise `OptionError` for texts of other prompts or options."""
    with_digest = [line for line in written_lines if "digest" in line and line["index"] < len(digests)]
    changed = [line["index"] for line in with_digest if line["digest"] != digests[line["index"]]]
    if changed:
        further = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise OptionError(
            f"{path} has the text of another prompt or of other options for index {changed[0]}{further}: name another "
            "file, or remove this one"
        )
