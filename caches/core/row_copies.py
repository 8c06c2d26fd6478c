"""New caches of the same backend from the rows of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from caches.core.layer import Layer
from caches.core.layer_stack import LayerStack
from caches.core.prefix_sharing import PrefixSharing
from caches.core.row_selection import checked_index
from caches.errors import StepError
from caches.protocol import TokenLog, check_has_layers_of_ours
from caches.stores.store import chosen_rows, joined_rows
from configs import PlacedCacheConfig


class Copyable(Protocol):
    """A cache of one or two stacks of layers: `Cache`, `EncoderDecoder`."""

    @property
    def stacks(self) -> tuple[LayerStack, ...]: ...

    def unshare(self) -> None: ...

    def empty_like(self: C, max_rows: int | None = None) -> C: ...


C = TypeVar("C", bound=Copyable)


def select_rows(cache: C, index: torch.Tensor | Sequence[int]) -> C:
    """A cache of the same backend with copies of the rows `index`, which shares nothing with `cache`.

    A preallocated one has room for these rows. Raises `StepError` where `index` names none, or rows that are not there.
    """
    check_has_layers_of_ours(cache)
    rows = cache.stacks[0].batch_size
    chosen = checked_index(index, rows) if rows != -1 else torch.arange(0, device="cpu")
    cache.unshare()
    new = cache.empty_like()
    for stack, source in zip(new.stacks, cache.stacks, strict=True):
        _fill(
            stack,
            [source],
            len(chosen),
            lambda states: chosen_rows(states[0], chosen),
            lambda logs: logs[0].select_rows(chosen),
        )
    return new


def join_rows(parts: Sequence[C]) -> C:
    """A cache with the rows of all `parts`.

    Raises `StepError` unless they have the same backend and layers, as many tokens, and codes of one format.
    """
    if not parts:
        raise StepError("there is nothing to join")
    for part in parts:
        check_has_layers_of_ours(part)
    for part in parts:
        part.unshare()
        for stack, first in zip(part.stacks, parts[0].stacks, strict=True):
            _check_alike(stack, first, f"{part!r} cannot be joined with {parts[0]!r}")
    new = parts[0].empty_like()
    for number, stack in enumerate(new.stacks):
        sources = [part.stacks[number] for part in parts]
        _fill(stack, sources, sum(source.batch_size for source in sources), joined_rows, TokenLog.joined)
    return new


def _check_alike(stack: LayerStack, first: LayerStack, problem: str) -> None:
    if (stack.total_tokens, stack.specs, stack.layout.name) != (first.total_tokens, first.specs, first.layout.name):
        raise StepError(f"{problem}: they need the same layers and tokens")
    other = _other_options(stack, first)
    if _formats(stack) != _formats(first):
        raise StepError(
            f"{problem}: {other or 'their codecs differ'}, so one cannot hold the codes of the other. Build them with "
            "the same options, or convert them to cache='dynamic'"
        )
    if stack.placements != first.placements:
        raise StepError(
            f"{problem}: {other or 'tokens were taken back in one of them'} and its blocks are others. Join them "
            "before, or convert them to cache='dynamic'"
        )


def _formats(stack: LayerStack) -> list[object]:
    layers = [layer for layer in stack.layers if isinstance(layer, Layer)]
    return [store.storage_format for layer in layers for store in layer.stores.values()]


def _other_options(stack: LayerStack, first: LayerStack) -> str:
    """The options in which they differ, with both values; "" where none are known."""
    own, other = ({} if one.layout.config is None else one.layout.config.to_dict() for one in (stack, first))
    names = own.keys() & other.keys() - set(PlacedCacheConfig.option_names())
    found = [f"{name}={own[name]} and {other[name]}" for name in own if name in names and own[name] != other[name]]
    return ", ".join(found)


def _fill(
    empty: LayerStack,
    sources: Sequence[LayerStack],
    rows: int,
    of_states: Callable[[list[Any]], Any],
    of_logs: Callable[[list[TokenLog]], TokenLog],
) -> None:
    """Fill `empty`, of the same layout, with what `of_states` makes of the states of a layer in each of `sources`."""
    if sources[0].batch_size == -1:
        return
    PrefixSharing(empty).share_like(sources[0].timelines)  # encoded suffixes are not merged when rows stop sharing
    layers = zip(*(source.layers for source in sources), strict=True)
    hook_state = of_states([source.hook.state_dict(source.batch_size) for source in sources])
    # One layer at a time: the sources may be on a device with more memory.
    states = (of_states([layer.state_dict() for layer in same]) for same in layers)
    empty.load_state_dict([one.state_dict() for one in sources[0].timelines], rows, states, hook_state)
    logs = [source.log for source in sources if source.log is not None]
    empty.log = of_logs(logs) if len(logs) == len(sources) else None
