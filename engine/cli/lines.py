"""`engine generate --jsonl FILE`: many prompts together, a line of JSON for each in a file that can be resumed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli import output, rendering
from engine.errors import EngineError, OptionError

if TYPE_CHECKING:
    from engine.generator import Generator


def write_lines(generator: Generator, prompts: list[Any], path: Path, parameters: dict[str, Any], writes: bool) -> None:
    """Generate for the prompts that `path` has no text of yet, and add a line for each as it ends.

    writes: False where another rank of the model writes the lines.
    """
    done = _done(path, writes)
    missing = [index for index in range(len(prompts)) if index not in done]
    if done and writes:
        output.remark(f"({len(prompts) - len(missing)} of {len(prompts)} prompts have their text in {path} already)")
    failed = 0
    requests = generator.generate_many(
        [prompts[index] for index in missing], progress=writes and sys.stderr.isatty(), **parameters
    )
    with (path if writes else Path(os.devnull)).open("a", encoding="utf-8") as lines:
        for request in requests:
            index, error = missing[request.index], request.error
            if error is None:
                found = rendering.as_dict(request.result())
            else:
                found, failed = {"error": " ".join(str(error).split())}, failed + 1
            lines.write(json.dumps({"index": index} | found) + "\n")
            lines.flush()
    if failed:
        raise EngineError(
            f"{failed} of {len(prompts)} prompts failed: their errors are in {path}; run it again for these"
        )


def _done(path: Path, writes: bool) -> set[int]:
    """The prompts with a text in the file. writes: remove a last line that was not finished from it."""
    if not path.exists():
        return set()
    done: set[int] = set()
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    for line in complete.splitlines():
        try:
            found = json.loads(line)
            if "rows" in found:
                done.add(int(found["index"]))
        except (ValueError, TypeError, KeyError) as error:
            raise OptionError(
                f"{path} has lines that --jsonl has not written ({line[:40]!r}): name another file"
            ) from error
    if writes and len(complete) < len(content):
        os.truncate(path, len(complete))
    return done
