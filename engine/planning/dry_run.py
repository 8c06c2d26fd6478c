"""What the cache of a run takes, found out by rehearsing it: the real cache goes through the run's steps with tensors
that have no numbers. There is no formula for any backend, so what holds for one holds for those to come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import caches
from caches import EngineCache
from caches.attention.segmented_tensor import SegmentedTensor, segments_of
from caches.protocol import attention_view
from caches.registry import build_layers
from configs import CacheConfig
from engine.model.masks import check_takes_masks
from engine.planning.cache_size import RunShape, fresh_cache
from engine.planning.model_footprint import CacheWrite, ModelFootprint
from strategies import repeat_rows_index

_FEW_QUERIES = 64  # with more of them attention wants its columns together
_MOST_TOKENS = 2**24  # of a row; rehearsing them takes about a minute
_KINDS = {"all": "full attention", "window": "sliding window", "chunk": "chunks", "own": "transformers' own"}


@dataclass(frozen=True)
class UsageSample:
    """Bytes of a cache at some time. by_place: see `LegacyNames.bytes_by_place`. by_kind: by what kind of layer keeps
    them, memory that layers take turns in left out.
    """

    by_place: dict[str, int]
    by_kind: dict[str, int]

    def at(self, places: Iterable[str]) -> int:
        return sum(self.by_place.get(place, 0) for place in places)

    def times(self, number: float) -> UsageSample:
        """The same of so many times the rows."""
        place, kind = ({name: int(number * n) for name, n in of.items()} for of in (self.by_place, self.by_kind))
        return UsageSample(place, kind)


@dataclass(frozen=True)
class CacheUsage:
    """What a cache takes in a run, at the times when it may be most. together: bytes of what a step of many tokens puts
    together of one layer in order to read it. chunk_tokens: how many tokens were read at once, 0 without a cache.
    positions: how many the model has to tell apart."""

    moments: tuple[UsageSample, ...]
    together: int
    chunk_tokens: int
    positions: int

    @property
    def most(self) -> UsageSample:
        return max(self.moments, key=lambda moment: moment.at(moment.by_place))

    def at(self, *places: str) -> int:
        """The most bytes that there are in these places together."""
        return max(moment.at(places) for moment in self.moments)

    def times(self, number: float) -> CacheUsage:
        """The same of so many times the rows: everything a cache keeps it keeps for each of them."""
        moments = tuple(moment.times(number) for moment in self.moments)
        return replace(self, moments=moments, together=int(number * self.together))


def dry_run(footprint: ModelFootprint, config: CacheConfig, run_shape: RunShape, pinned: bool = False) -> CacheUsage:
    """What the cache of this configuration takes in a run. Raises what building and using it raises.

    pinned: what is in host memory is pinned, as it is where an accelerator computes.
    """
    run = _Rehearsal(footprint, config, run_shape, pinned)
    if run.cache.handle is not None:
        run.check_length()
        run.read_prompt()
        run.branch()
        run.decode()
    return run.kept()


class _Rehearsal:
    def __init__(self, footprint: ModelFootprint, config: CacheConfig, run_shape: RunShape, pinned: bool):
        self._anatomy, self._course, self._pinned = footprint, run_shape, pinned
        self.cache: Any = fresh_cache(config, run_shape, self._build)
        check_takes_masks(footprint.model, self.cache)
        if self.cache.max_tokens is not None and self.cache.max_tokens < run_shape.held:
            raise caches.CapacityError(
                f"the {config.name} cache holds at most {self.cache.max_tokens} tokens, but {run_shape.prompt_tokens} "
                f"prompt tokens and {run_shape.new_tokens} new ones need {run_shape.held}: raise max_cache_len"
            )
        self._rows = run_shape.prompts
        self._moments = [UsageSample({"device": 0}, {})]
        self._together = self._chunk = 0

    def _build(self, config: CacheConfig) -> EngineCache:
        return build_layers(config.name, self._anatomy.specs, self._anatomy.is_encoder_decoder, config)

    def kept(self) -> CacheUsage:
        positions = attention_view(self.cache).positions_needed(self._course.held)
        return CacheUsage(tuple(self._moments), self._together, self._chunk, positions)

    # The run.

    def check_length(self) -> None:
        tokens = self._course.held + self._course.source_tokens
        if tokens > _MOST_TOKENS and not self._windows()[1]:
            raise caches.CapacityError(
                f"{tokens:,} tokens of a row are more than a plan is made for, which are {_MOST_TOKENS:,} unless the "
                "cache only keeps windows: plan with fewer, what is kept grows with them"
            )

    def read_prompt(self) -> None:
        tokens, calls = self._course.prompt_tokens, self._anatomy.first
        most = attention_view(self.cache).max_step_tokens
        self._chunk = min(tokens, self._course.chunk_tokens or tokens, most or tokens)
        whole, rest = divmod(tokens, self._chunk)
        windows, all_forget = self._windows()
        if all_forget:  # after some windows nothing changes any more
            whole = min(whole, 3 * max(windows) // self._chunk + 3)
        steps = [self._chunk] * whole + [rest] * (rest > 0)
        for number, count in enumerate(steps):
            is_last = number == len(steps) - 1
            self._step(count, calls, looks=is_last)
            calls = tuple(call for call in calls if call.part == 0)
            if number == 0 or is_last:
                self._weigh()

    def branch(self) -> None:
        times = self._course.branches
        if times == 1:
            return
        if self._course.shares:
            self.cache.fork(times)
        else:
            self.cache.select_rows(repeat_rows_index(self._rows, times))
        self._rows *= times
        self._weigh()

    def decode(self) -> None:
        """Steps of one token, most of them several at a time where that takes no other room."""
        tokens = self._course.new_tokens - 1
        windows, all_forget = self._windows()
        if all_forget:
            tokens = min(tokens, 3 * max(windows) + 3)
        if tokens > 0 and self._course.branches > 1 and not all(self._anatomy.shares):
            self._step(1, self._anatomy.later, looks=True)
            self._weigh()
            tokens -= 1
            for part, shares in zip(self.cache.parts, self._anatomy.shares, strict=True):
                if not shares:
                    part.unshare()
        stride = max(16, min(64, min(windows) // 8)) if windows else tokens
        while tokens > 2:
            count = min(stride, tokens - 2)
            if self._course.ends_early or self._course.branches > 1:  # room is made as single tokens come
                for seen in range(self.cache.total_tokens + 1, self.cache.total_tokens + count + 1):
                    self.cache.reserve(seen)
            self._step(count, self._anatomy.later)
            tokens -= count
        for left in reversed(range(tokens)):
            self._step(1, self._anatomy.later, looks=left == 0)
        self._weigh()

    def _step(self, tokens: int, calls: Iterable[CacheWrite], looks: bool = False) -> None:
        """looks: whether attention reads what it is handed, and takes the memory that this needs."""
        self.cache.begin(tokens)
        for call in calls:
            found = call.repeat(self.cache, self._rows, self._course.source_tokens if call.part else tokens)
            views = (
                [view for view in found if isinstance(view, SegmentedTensor)]
                if looks and isinstance(found, tuple)
                else []
            )
            for view in views:
                for _ in segments_of(view):
                    pass
            if tokens > _FEW_QUERIES:
                self._together = max(self._together, sum(prod(view.base) * view.dtype.itemsize for view in views))
        self.cache.commit()

    def _windows(self) -> tuple[list[int], bool]:
        """How many columns layers keep that forget some, and whether all layers do."""
        bounds = [layer.timeline.retention.bound for part in self.cache.parts for layer in part.layers]
        known = [bound for bound in bounds if bound is not None]
        return known, 0 < len(known) == len(bounds)

    # What it takes.

    def _weigh(self) -> None:
        by_place, by_kind = Counter(device=0), Counter[str]()
        for kind, place, size in self._sizes():
            by_place[place] += size
            if place != "staging":
                by_kind[kind] += size
        self._moments.append(UsageSample(dict(by_place), dict(by_kind)))

    def _sizes(self) -> Iterator[tuple[str, str, int]]:
        """Kind, place and bytes of everything there is."""
        for number, part in enumerate(self.cache.parts):
            for layer, count in zip(part.layers, self._anatomy.counts, strict=True):
                for kind, thing in _things(layer, number):
                    away: Any = getattr(thing, "offloaded_buffers", tuple)()
                    places = {id(tensor): buffer.tier for buffer in away for tensor in buffer.tensors()}
                    for tensor in thing.tensors():
                        place = places.get(id(tensor), "device")
                        size = tensor.nbytes
                        if place == "host" and self._pinned and size:  # torch takes a power of two of pinned bytes
                            size = 1 << (size - 1).bit_length()
                        yield kind, place, round(count * size)
            yield from (("", "staging", tensor.nbytes) for tensor in part.scratch.tensors())
        per_row, per_token = self._anatomy.wrapped
        if per_row or per_token:
            yield _KINDS["own"], "device", int(self._rows * (per_row + per_token * self.cache.total_tokens))


def _things(layer: Any, part: int) -> Iterator[tuple[str, Any]]:
    """The stores and the states of a layer, each with a word for what it keeps."""
    for name, store in getattr(layer, "stores", {}).items():
        yield (
            ("cross attention" if part else "index" if name == "index" else _KINDS[layer.spec.attention_span.kind]),
            store,
        )
    if getattr(layer, "state", None) is not None:
        yield "states", layer.state
