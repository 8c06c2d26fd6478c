"""Rows of one cache in several, and those of several in one: as copies, or moved store by store.

Everything is taken as it is encoded. Rows that are moved go on sharing prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from caches.core.implicit_steps import ImplicitSteps
from caches.core.layer import Layer
from caches.core.layer_stack import LayerStack
from caches.core.row_selection import checked_index
from caches.core.transfer import C, Share, move, plan
from caches.errors import StepError
from caches.protocol import check_has_layers_of_ours
from caches.timeline.shared_timeline import ForkedTimeline
from configs import PlacedCacheConfig


def select_rows(cache: C, index: torch.Tensor | Sequence[int]) -> C:
    """A cache of the same backend with copies of the rows `index`, which shares nothing with `cache`.

    A preallocated one has room for these rows. Raises `StepError` where `index` names none, or rows that are not there.
    """
    check_has_layers_of_ours(cache)
    rows = _rows_of(cache)
    chosen = checked_index(index, rows) if rows else torch.arange(0, device="cpu")
    unshare(cache.implicit_steps)
    copied = cache.empty_like()
    for source, target in zip(cache.implicit_steps, copied.implicit_steps, strict=True):
        for share in plan([source], [target], [len(chosen)], chosen):
            share.apply()
    return copied


def join_rows(caches: Sequence[C]) -> C:
    """A cache with copies of the rows of all `caches`.

    Raises `StepError` unless they have the same backend and layers, as many tokens, and codes of one format.
    """
    if not caches:
        raise StepError("there is nothing to join")
    for cache in caches:
        check_has_layers_of_ours(cache)
    for cache in caches:
        unshare(cache.implicit_steps)
    joined, shares = _joined(caches, moves=False)
    for share in shares:
        share.apply()
    return joined


def deal_rows(cache: C, sizes: Sequence[int], rooms: Sequence[int | None]) -> list[C]:
    """Caches of the same backend: the first has the first `sizes[0]` rows of `cache`, which is empty afterwards.

    rooms: for how many rows each has room, None for any number. Raises `StepError` before anything has changed where
    rows cannot be dealt out. Whatever fails later, `cache` gets back what it had: see `move`.
    """
    dealt = [cache.empty_like(room) for room in rooms]
    shares = []
    for number, source in enumerate(cache.implicit_steps):
        source.end()
        if any(size % forked.rows_per_prefix for forked in source.stack.shared_timelines for size in sizes):
            unshare([source])
        shares += plan([source], [taker.implicit_steps[number] for taker in dealt], sizes, moves=True)
    move([cache], shares, "dealing out the rows of")
    return dealt


def gather_rows(caches: Sequence[C]) -> C:
    """A cache with the rows of all `caches`, which are empty afterwards.

    Raises `StepError` where they do not hold the same layers after equally many tokens, before anything has changed.
    """
    for cache in caches:
        for steps in cache.implicit_steps:
            steps.end()
    for sources in zip(*(cache.implicit_steps for cache in caches), strict=True):
        if len({_rows_per_prefix(source.stack) for source in sources}) > 1:
            unshare(sources)
    joined, shares = _joined(caches, moves=True)
    move(caches, shares, "putting together")
    return joined


def _joined(caches: Sequence[C], moves: bool) -> tuple[C, list[Share]]:
    """A cache that is set to hold the rows of all `caches`, and what there is to hand over."""
    for cache in caches:
        for steps, peer in zip(cache.implicit_steps, caches[0].implicit_steps, strict=True):
            _check_alike(steps.stack, peer.stack, f"{cache!r} cannot be joined with {caches[0]!r}")
    joined, shares = caches[0].empty_like(), []
    rows = sum(map(_rows_of, caches))
    for number, target in enumerate(joined.implicit_steps):
        sources = [cache.implicit_steps[number] for cache in caches]
        shares += plan(sources, [target], [rows], moves=moves)
    return joined, shares


def _rows_of(cache: Any) -> int:
    """0 before the first step. The decoder's part may be empty still, where the encoder's has rows."""
    return max(0, *(steps.stack.batch_size for steps in cache.implicit_steps))


def unshare(parts: Iterable[ImplicitSteps]) -> None:
    """Every row gets all its tokens for itself. What was encoded since a fork stays in a suffix."""
    for steps in parts:
        steps.end()
        steps.selection.start(steps.selection.plan_unshare())
        steps.selection.finish()


def _rows_per_prefix(stack: LayerStack) -> tuple[int | None, ...]:
    """Of each group of layers; None where rows share none."""
    return tuple(
        timeline.rows_per_prefix if isinstance(timeline, ForkedTimeline) else None for timeline in stack.timelines
    )


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
