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
    parts = [cache.empty_like(room) for room in rooms]
    steps = [
        TensorMigration(share.full, True, share.deal, share.gather, share.release_parts)
        for share in _shares(cache, parts, sizes)
    ]
    carry_out([cache], steps, "dealing out the rows of")
    return parts


def gather_rows(parts: Sequence[C]) -> C:
    """A cache with the rows of all `parts`, which are empty afterwards.

    Raises `StepError` where they do not hold the same layers after equally many tokens, before anything has changed.
    """
    for part in (part for cache in parts for part in cache.parts):
        _check_between_steps(part)
    for same in zip(*(cache.parts for cache in parts), strict=True):
        if not _share_alike(same):
            for part in same:
                part.unshare()
        first = same[0]
        if any(
            (one.total_tokens, one.specs, one.stack.placements)
            != (first.total_tokens, first.specs, first.stack.placements)
            for one in same
        ):
            raise StepError(
                f"{', '.join(map(repr, same))} cannot be put together: they need the same layers and tokens"
            )
        for states in zip(*(_states_of(part) for part in same), strict=True):
            RecurrentState.agree(states)
    full = parts[0].empty_like()
    # The decoder's part may be empty still, where the encoder's has rows.
    sizes = [max(0, *(part.batch_size for part in cache.parts)) for cache in parts]
    steps = [
        TensorMigration(share.parts[0], True, share.gather, share.deal, share.full.release)
        for share in _shares(full, parts, sizes, like=parts[0])
    ]
    carry_out(parts, steps, "putting together")
    return full


def _states_of(part: Cache) -> list[RecurrentState]:
    holders = (holder for layer in part.layers for holder in layer.row_holders())
    return [holder for holder in holders if isinstance(holder, RecurrentState)]


def _check_between_steps(part: Cache) -> None:
    part.selection.check_finished()
    if part.stack.is_open:
        raise StepError(f"a step of the {part.name} cache is open: commit() or abort() it first")


def _share_alike(parts: Sequence[Cache]) -> bool:
    """Whether the same groups of layers share prefixes in all of them, each with as many rows per prefix."""
    found = {
        tuple(one.rows_per_prefix if isinstance(one, ForkedTimeline) else None for one in part.stack.timelines)
        for part in parts
    }
    return len(found) == 1


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
            for part, index in zip(self.parts, self.indexes, strict=True):
                part.load_state_dict(chosen_rows(states, index))
        del states
        self.full.release()

    def gather(self) -> None:
        states = [part.state_dict() for part in self.parts]
        if all(states):  # a store that no step used holds nothing
            self.full.load_state_dict(joined_rows(states))
        del states
        self.release_parts()

    def release_parts(self) -> None:
        for part in self.parts:
            part.release()


def _shares(full: C, parts: Sequence[C], sizes: Sequence[int], like: C | None = None) -> list[_Share]:
    """What there is to deal out of `full`, or to gather in it. The timelines of the takers are set already.

    like: which of them to be like, `full` by default.
    """
    found = []
    for number, one in enumerate(full.parts):
        pattern, others = one if like is None else like.parts[number], [part.parts[number] for part in parts]
        _check_between_steps(pattern)
        if pattern.batch_size != -1:
            found += _shares_of(one, others, sizes, pattern)
    return found


def _shares_of(full: Cache, parts: Sequence[Cache], sizes: Sequence[int], pattern: Cache) -> list[_Share]:
    is_dealt = pattern is full
    if any(
        forked.rows_per_prefix > 1 and any(size % forked.rows_per_prefix for size in sizes)
        for forked in full.stack.shared_timelines
    ):
        full.unshare()
    givers, takers, rows = ([full], list(parts), list(sizes)) if is_dealt else (list(parts), [full], [sum(sizes)])
    for giver in givers:
        giver.scratch.release()
        compact(giver.stack, takers[0].stack)
    _hand_over_hooks_and_logs(full, parts, sizes, is_dealt)
    for taker, count in zip(takers, rows, strict=True):
        taker.sharing.share_like(pattern.stack.timelines)
        for new, like in zip(taker.stack.timelines, pattern.stack.timelines, strict=True):
            adopt(new, like, count)
    rows_per_prefix = {forked.prefix: forked.rows_per_prefix for forked in pattern.stack.shared_timelines}
    pairs = zip(_holders(full), *map(_holders, parts), strict=True)
    found = []
    for (full_holder, *others), old in zip(pairs, _holders(pattern), strict=True):
        times = rows_per_prefix.get(old.timeline, 1)
        own = torch.arange(sum(sizes) // times, device="cpu").split([size // times for size in sizes])
        found.append(_Share(full_holder, others, list(own)))
    return found


def _holders(cache: Cache) -> list[TensorHolder]:
    return [holder for layer in cache.layers for holder in layer.row_holders()]


def _hand_over_hooks_and_logs(full: Cache, parts: Sequence[Cache], sizes: Sequence[int], is_dealt: bool) -> None:
    if is_dealt:
        state = full.stack.hook.state_dict(sum(sizes))
        for part, index in zip(parts, torch.arange(sum(sizes), device="cpu").split(list(sizes)), strict=True):
            part.stack.hook.load_state_dict(chosen_rows(state, index))
            part.log = None if full.log is None else full.log.select_rows(index)
    else:
        states = [part.stack.hook.state_dict(size) for part, size in zip(parts, sizes, strict=True)]
        full.stack.hook.load_state_dict(joined_rows(states))
        logs = [part.log for part in parts if part.log is not None]
        full.log = TokenLog.joined(logs) if len(logs) == len(parts) else None
