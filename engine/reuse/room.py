"""Room for a call in a cache of fixed size that an earlier call has filled."""

from __future__ import annotations

from typing import Any, Protocol

from caches import convert
from caches.transfer.convert import can_migrate
from configs import EngineConfig
from engine.errors import EngineError
from engine.model.facts import ModelFacts
from engine.request.call import read_call, read_parameters
from engine.request.read_request import read_request

SIZES = ("max_cache_len", "max_batch_size")  # options of a cache


class HasModel(Protocol):
    """A `Generator`."""

    model: Any
    tokenizer: Any

    @property
    def config(self) -> EngineConfig: ...

    @property
    def facts(self) -> ModelFacts: ...

    def with_draft(self, parameters: dict[str, Any]) -> dict[str, Any]: ...


def with_room_for(cache: Any, generator: HasModel, inputs: Any, parameters: dict[str, Any]) -> Any:
    """The cache, or a copy with room for the rows of a call, and for twice as many tokens if it needs more."""
    tokens, rows = cache.max_tokens, cache.max_rows
    if tokens is None and rows is None:
        return cache
    call = read_call(inputs, **{"tokenizer": generator.tokenizer} | generator.with_draft(parameters))
    try:
        request = read_request(
            generator.model, read_parameters(call), cache, draft=call.assistant_model, chunk_tokens=None
        )
    except EngineError:  # the call raises it too
        return cache
    has_tokens, has_rows = tokens is None or tokens >= request.cached_columns, (rows or 1) >= request.rows
    if has_tokens and has_rows:
        return cache
    tokens = tokens if has_tokens else max(2 * tokens, request.columns)
    return with_room(cache, tokens, max(request.rows, rows or 1))


def with_room(cache: Any, tokens: int | None, rows: int | None) -> Any:
    """A copy of the cache, with its options, that has room for so many tokens and rows; None: what it has."""
    config = cache.stacks[0].layout.config if can_migrate(cache) else None
    options = {} if config is None else config.to_dict()
    sizes = dict(zip(SIZES, (tokens, rows), strict=True))
    options |= {name: size for name, size in sizes.items() if size}
    return convert(cache, options.pop("name", cache.name), **options)
