"""`engine caches`: the backends, their sizes for a model, and the meaning of their options."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from configs import CacheConfig, PlacedCacheConfig
from engine.cli import options, output
from engine.cli.libraries import start_libraries
from engine.cli.progress import Work
from engine.tables import Column, facts, fitted, megabytes, terminal_width, wrapped

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@options.takes({None: options.CACHES})
def caches(name: str | None, model: str | None, tokens: int, as_json: bool) -> None:
    """List the cache backends: what each is for, its options, and its size for a model (no weights are loaded)."""
    with Work() as work:
        start_libraries(work, model)
        import caches
        from engine.loading.load import SHIPPED_MODEL, load_config
        from engine.memory.model_footprint import inspect_model

        work.doing("reading the model's configuration")
        recipes = [caches.recipe(backend) for backend in ([name] if name else caches.names())]
        config = load_config(SHIPPED_MODEL if model is None else model)
        entries = []
        for recipe in recipes:
            work.doing(f"measuring {recipe.name}")
            entries.append(_entry(recipe, config, tokens))
        dtype = str(inspect_model(config).model.dtype).removeprefix("torch.")
    report = {"model": str(model or "shipped"), "tokens": tokens, "dtype": dtype, "caches": entries}
    width = terminal_width(100)
    shown = one_as_text(report, recipes[0].options, width) if name else all_as_text(report, width)
    output.say_json(report) if as_json else output.say(shown)


def _entry(recipe: Any, model_config: PreTrainedConfig, tokens: int) -> dict[str, object]:
    """A backend's name, summary and options, with its size for the model or the reason why it is refused."""
    from caches import CacheError
    from engine.memory.plan import cache_bytes

    entry = {"name": recipe.name, "summary": recipe.summary, "options": recipe.options.defaults()}
    sizes = []
    for count in (tokens // 2, tokens):
        options = {"max_cache_len": count} if recipe.has_a_size else {}
        source = count if model_config.is_encoder_decoder else 0
        try:
            bytes_by_place = cache_bytes(model_config, recipe.name, options, tokens=count, source_tokens=source)
        except CacheError as error:
            return entry | {"refused": str(error)}
        sizes.append(sum(bytes_by_place.values()))
    return entry | {"bytes": sizes[1], "bytes_per_token": (sizes[1] - sizes[0]) / (tokens - tokens // 2)}


def all_as_text(report: dict[str, Any], width: int) -> str:
    """A line or a block per backend that can serve the model, and the names of the others."""
    columns = [Column("cache"), Column("bytes per\ntoken"), Column(f"{report['tokens']:,}\ntokens"),
               Column("what it is", wraps=True)]  # fmt: skip
    rows = [
        [entry["name"], f"{entry['bytes_per_token']:,.0f}", megabytes(entry["bytes"]), entry["summary"]]
        for entry in report["caches"]
        if "refused" not in entry
    ]
    refused = [entry["name"] for entry in report["caches"] if "refused" in entry]
    closing = [f"For other models, or with an option that has to be given: {', '.join(refused)}."] if refused else []
    closing.append("`engine caches NAME` tells the options of one, and what it asks for.")
    return "\n\n".join([fitted(columns, rows, width), "\n".join(wrapped(line, width) for line in closing)])


def one_as_text(report: dict[str, Any], config: type[CacheConfig], width: int) -> str:
    """One backend with its options, and its size for the model or the reason why it is refused."""
    [entry] = report["caches"]
    if "refused" in entry:
        size = f"For this model there is no size: {entry['refused'].rstrip('.')}."
    else:
        size = (
            f"For this model, in {report['dtype']}: {entry['bytes_per_token']:,.0f} bytes per token, "
            f"{megabytes(entry['bytes'])} for {report['tokens']:,} tokens."
        )
    paragraphs = [wrapped(f"{entry['name']}: {entry['summary']}", width), wrapped(size, width)]
    if not entry["options"]:
        return "\n\n".join([*paragraphs, "It has no options."])
    paragraphs.append(wrapped("Options: --cache-option NAME=VALUE, in Python cache_config={...}.", width))
    meanings, common = config.meanings(), PlacedCacheConfig.option_names()
    names = sorted(entry["options"], key=lambda name: name in common)  # its own options come first
    rows = [(f"  {name}", f"{meanings[name]}\n{_values(config, name)}") for name in names]
    return "\n\n".join([*paragraphs, facts(rows, width)])


def _values(config: type[CacheConfig], name: str) -> str:
    """The values that an option may have, and its default."""
    default, words = config.defaults()[name], config.values()[name]
    may_be = f"One of {', '.join(words)}" if name in config.choices else " or ".join(words).capitalize()
    shown = default if default is None or isinstance(default, str) else json.dumps(default)  # as typed
    return f"{may_be}; default {shown}."
