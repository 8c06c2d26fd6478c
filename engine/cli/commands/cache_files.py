"""`engine cache`: what is in a file that a cache or a chat was saved to."""

from __future__ import annotations

import dataclasses

from configs.cache_file import inspect
from engine import tables
from engine.cli import options, output
from engine.errors import OptionError


@options.takes({None: options.CACHE_FILE})
def cache(action: str | None, path: str | None, as_json: bool) -> None:
    """Say what is in a file that a cache or a chat was saved to (no weights are loaded): engine cache inspect FILE."""
    if action != "inspect" or path is None:
        raise OptionError("there is one action, with the path of a file: engine cache inspect FILE")
    saved = inspect(path)
    if as_json:
        output.say_json(dataclasses.asdict(saved) | {"path": str(saved.path)})
        return
    options_text = ", ".join(f"{name}={value}" for name, value in saved.options.items() if value is not None)
    facts = [("cache", saved.backend), ("options", options_text or "none")]
    facts += [("rows", f"{saved.rows:,}"), ("tokens per row", f"{saved.total_tokens:,}")]
    facts += [("layers", str(saved.layers)), ("file", f"{saved.bytes:,} bytes")]
    facts += [(name, value[:16] if name == "weights" else value) for name, value in saved.model.items()]
    if "messages" in saved.notes:
        facts += [("messages", str(len(saved.notes["messages"])))]
    output.say(tables.facts(facts, tables.terminal_width(100)))
