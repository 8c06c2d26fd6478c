"""Rows of one cache dealt to several, and those of several gathered in one, store by store.

What has arrived is freed where it was, so no more than about one layer is there twice. Rows go on sharing prefixes.
Everything is taken as it is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from caches.core.layer import TensorHolder
from caches.errors import StepError
from caches.hf.cache import Cache
from caches.hf.encoder_decoder import EncoderDecoder
from caches.protocol import TokenLog
from caches.stores.recurrent_state import RecurrentState
from caches.stores.store import chosen_rows, joined_rows
from caches.timeline.shared_timeline import ForkedTimeline
from caches.transfer.migrate import TensorMigration, adopt, carry_out, compact

C = TypeVar("C", Cache, EncoderDecoder)


def deal_rows(cache: C, sizes: Sequence[int], rooms: Sequence[int | None]) -> list[C]:
    """Caches of the same backend: the first has the first `sizes[0]` rows of `cache`, which is empty afterwards.

    rooms: for how many rows each has room, None for any number. Raises `StepError` before anything has changed where
    rows cannot be dealt out. Whatever fails later, `cache` gets back what it had: see `caches.migrate`.
    """
    dealt = [cache.empty_like(room) for room in rooms]
    steps = [
        TensorMigration(share.full, True, share.deal, share.gather, share.release_parts)
        for share in _shares(cache, dealt, sizes)
    ]
    carry_out([cache], steps, "dealing out the rows of")
    return dealt


def gather_rows(caches: Sequence[C]) -> C:
    """A cache with the rows of all `caches`, which are empty afterwards.

    Raises `StepError` where they do not hold the same layers after equally many tokens, before anything has changed.
    """
    for section in (section for cache in caches for section in cache.parts):
        _check_between_steps(section)
    for sections in zip(*(cache.parts for cache in caches), strict=True):
        if not _share_alike(sections):
            for section in sections:
                section.unshare()
        first_section = sections[0]
        if any(
            (section.total_tokens, section.specs, section.stack.placements)
            != (first_section.total_tokens, first_section.specs, first_section.stack.placements)
            for section in sections
        ):
            raise StepError(
                f"{', '.join(map(repr, sections))} cannot be put together: they need the same layers and tokens"
            )
        for states in zip(*(_states_of(section) for section in sections), strict=True):
            RecurrentState.agree(states)
    full = caches[0].empty_like()
    # The decoder's part may be empty still, where the encoder's has rows.
    sizes = [max(0, *(section.batch_size for section in cache.parts)) for cache in caches]
    steps = [
        TensorMigration(share.parts[0], True, share.gather, share.deal, share.full.release)
        for share in _shares(full, caches, sizes, like=caches[0])
    ]
    carry_out(caches, steps, "putting together")
    return full


def _states_of(cache: Cache) -> list[RecurrentState]:
    holders = (holder for layer in cache.layers for holder in layer.row_holders())
    return [holder for holder in holders if isinstance(holder, RecurrentState)]


def _check_between_steps(cache: Cache) -> None:
    cache.selection.check_finished()
    if cache.stack.is_open:
        raise StepError(f"a step of the {cache.name} cache is open: commit() or abort() it first")


def _share_alike(caches: Sequence[Cache]) -> bool:
    """Whether the same groups of layers share prefixes in all of them, each with as many rows per prefix."""
    patterns = {
        tuple(
            timeline.rows_per_prefix if isinstance(timeline, ForkedTimeline) else None
            for timeline in cache.stack.timelines
        )
        for cache in caches
    }
    return len(patterns) == 1


@dataclass(eq=False)
class _Share:
    """One store, or the states of a layer, full and in parts. indexes: the rows of each part.

    `deal` and `gather` free what they read.
    """

    full: TensorHolder
    parts: list[TensorHolder]
    indexes: list[torch.Tensor]

    def deal(self) -> None:
        states = self.full.state_dict()
        if states:
            for holder, index in zip(self.parts, self.indexes, strict=True):
                holder.load_state_dict(chosen_rows(states, index))
        del states
        self.full.release()

    def gather(self) -> None:
        states = [holder.state_dict() for holder in self.parts]
        if all(states):  # a store that no step used holds nothing
            self.full.load_state_dict(joined_rows(states))
        del states
        self.release_parts()

    def release_parts(self) -> None:
        for holder in self.parts:
            holder.release()


def _shares(full: C, caches: Sequence[C], sizes: Sequence[int], like: C | None = None) -> list[_Share]:
    """What there is to deal out of `full`, or to gather in it. The timelines of the takers are set already.

    like: which of them to be like, `full` by default.
    """
    shares = []
    for number, section in enumerate(full.parts):
        pattern = section if like is None else like.parts[number]
        sections = [cache.parts[number] for cache in caches]
        _check_between_steps(pattern)
        if pattern.batch_size != -1:
            shares += _shares_of(section, sections, sizes, pattern)
    return shares


def _shares_of(full: Cache, caches: Sequence[Cache], sizes: Sequence[int], pattern: Cache) -> list[_Share]:
    is_dealt = pattern is full
    if any(
        forked.rows_per_prefix > 1 and any(size % forked.rows_per_prefix for size in sizes)
        for forked in full.stack.shared_timelines
    ):
        full.unshare()
    givers, takers, rows = ([full], list(caches), list(sizes)) if is_dealt else (list(caches), [full], [sum(sizes)])
    for giver in givers:
        giver.scratch.release()
        compact(giver.stack, takers[0].stack)
    _hand_over_hooks_and_logs(full, caches, sizes, is_dealt)
    for taker, count in zip(takers, rows, strict=True):
        taker.sharing.share_like(pattern.stack.timelines)
        for timeline, like in zip(taker.stack.timelines, pattern.stack.timelines, strict=True):
            adopt(timeline, like, count)
    rows_per_prefix = {forked.prefix: forked.rows_per_prefix for forked in pattern.stack.shared_timelines}
    pairs = zip(_holders(full), *map(_holders, caches), strict=True)
    shares = []
    for (full_holder, *holders), pattern_holder in zip(pairs, _holders(pattern), strict=True):
        times = rows_per_prefix.get(pattern_holder.timeline, 1)
        indexes = torch.arange(sum(sizes) // times, device="cpu").split([size // times for size in sizes])
        shares.append(_Share(full_holder, holders, list(indexes)))
    return shares


def _holders(cache: Cache) -> list[TensorHolder]:
    return [holder for layer in cache.layers for holder in layer.row_holders()]


def _hand_over_hooks_and_logs(full: Cache, caches: Sequence[Cache], sizes: Sequence[int], is_dealt: bool) -> None:
    if is_dealt:
        state = full.stack.hook.state_dict(sum(sizes))
        for cache, index in zip(caches, torch.arange(sum(sizes), device="cpu").split(list(sizes)), strict=True):
            cache.stack.hook.load_state_dict(chosen_rows(state, index))
            cache.log = None if full.log is None else full.log.select_rows(index)
    else:
        states = [cache.stack.hook.state_dict(size) for cache, size in zip(caches, sizes, strict=True)]
        full.stack.hook.load_state_dict(joined_rows(states))
        logs = [cache.log for cache in caches if cache.log is not None]
        full.log = TokenLog.joined(logs) if len(logs) == len(caches) else None
