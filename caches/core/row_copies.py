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
    copied = cache.empty_like()
    for stack, source in zip(copied.stacks, cache.stacks, strict=True):
        _fill(
            stack,
            [source],
            len(chosen),
            lambda states: chosen_rows(states[0], chosen),
            lambda logs: logs[0].select_rows(chosen),
        )
    return copied


def join_rows(parts: Sequence[C]) -> C:
    """A cache with the rows of all `parts`.

    Raises `StepError` unless they have the same backend and layers, as many tokens, and codes of one format.
    """
    if not parts:
        raise StepError("there is nothing to join")
    for cache in parts:
        check_has_layers_of_ours(cache)
    for cache in parts:
        cache.unshare()
        for stack, peer in zip(cache.stacks, parts[0].stacks, strict=True):
            _check_alike(stack, peer, f"{cache!r} cannot be joined with {parts[0]!r}")
    joined = parts[0].empty_like()
    for number, stack in enumerate(joined.stacks):
        sources = [cache.stacks[number] for cache in parts]
        _fill(stack, sources, sum(source.batch_size for source in sources), joined_rows, TokenLog.joined)
    return joined


def _check_alike(stack: LayerStack, peer: LayerStack, problem: str) -> None:
    if (stack.total_tokens, stack.specs, stack.layout.name) != (peer.total_tokens, peer.specs, peer.layout.name):
        raise StepError(f"{problem}: they need the same layers and tokens")
    detail = _other_options(stack, peer)
    if _formats(stack) != _formats(peer):
        raise StepError(
            f"{problem}: {detail or 'their codecs differ'}, so one cannot hold the codes of the other. Build them with "
            "the same options, or convert them to cache='dynamic'"
        )
    if stack.placements != peer.placements:
        raise StepError(
            f"{problem}: {detail or 'tokens were taken back in one of them'} and its blocks are others. Join them "
            "before, or convert them to cache='dynamic'"
        )


def _formats(stack: LayerStack) -> list[object]:
    layers = [layer for layer in stack.layers if isinstance(layer, Layer)]
    return [store.storage_format for layer in layers for store in layer.stores.values()]


def _other_options(stack: LayerStack, peer: LayerStack) -> str:
    """The options in which they differ, with both values; "" where none are known."""
    values, peers = ({} if source.layout.config is None else source.layout.config.to_dict() for source in (stack, peer))
    names = values.keys() & peers.keys() - set(PlacedCacheConfig.option_names())
    return ", ".join(
        f"{name}={values[name]} and {peers[name]}" for name in values if name in names and values[name] != peers[name]
    )


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
    states = (of_states([layer.state_dict() for layer in source_layers]) for source_layers in layers)
    empty.load_state_dict([timeline.state_dict() for timeline in sources[0].timelines], rows, states, hook_state)
    logs = [source.log for source in sources if source.log is not None]
    empty.log = of_logs(logs) if len(logs) == len(sources) else None
