"""What the cache of a run takes, found by a dry run: the real cache takes the steps of the run with tensors on the meta
device, which have no values. No backend needs a formula, so a new backend is planned like the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import cast

import caches
from caches import EngineCache
from caches.attention.dispatch import FEW_TOKENS
from caches.attention.kv_view import KeyValueView, rows_of
from caches.attention.segments import DenseSegment
from caches.core.layer import Layer
from caches.core.wrapped_layer import WrappedLayer
from caches.protocol import attention_view
from caches.registry import build_layers
from caches.stores.recurrent_state import RecurrentState
from caches.stores.store import Store
from configs import CacheConfig
from engine.memory.cache_size import empty_cache
from engine.memory.model_footprint import CacheWrite, MeasuredCache, ModelFootprint
from engine.model.masks import check_takes_masks
from engine.request.run_shape import RunShape
from engine.tables import lengths
from strategies import repeat_rows_index

_MOST_TOKENS = 2**24  # of a row; a dry run of so many takes about a minute
_KINDS = {"all": "full attention", "window": "sliding window", "chunk": "chunks", "own": "transformers' own"}


@dataclass(frozen=True)
class UsageSample:
    """Bytes of a cache at one moment.

    by_place: see `Cache.bytes_by_place`. by_kind: by kind of layer, without memory that layers share. in_prompt: before
    the first new token is read.
    """

    by_place: dict[str, int]
    by_kind: dict[str, int]
    in_prompt: bool = True

    def at(self, tiers: Iterable[str]) -> int:
        return sum(self.by_place.get(tier, 0) for tier in tiers)

    def joined(self, sample: UsageSample) -> UsageSample:
        """The most of both."""
        by_place, by_kind = _larger(self.by_place, sample.by_place), _larger(self.by_kind, sample.by_kind)
        return UsageSample(by_place, by_kind, self.in_prompt)


@dataclass(frozen=True)
class CacheUsage:
    """What a cache takes in a run.

    samples: at the moments when it may be largest. final: at the end of the run. materialized_bytes: of the one tensor
    that attention makes of a layer in a step of many tokens, where the layer is not kept as one. chunk_tokens: those of
    the prompt's longest step, 0 without a cache. positions: how many the model tells apart. pinned: see `DryRun`.
    """

    samples: tuple[UsageSample, ...]
    final: UsageSample
    materialized_bytes: int
    chunk_tokens: int
    positions: int
    pinned: bool

    @property
    def most(self) -> UsageSample:
        return max(self.samples, key=lambda sample: sample.at(sample.by_place))

    def at(self, *tiers: str) -> int:
        """The most bytes in these places together."""
        return max(sample.at(tiers) for sample in self.samples)

    @property
    def device_bytes(self) -> int:
        """The most bytes in the memory of the device that computes. On a CPU that is the host's."""
        return max(self.device_bytes_in(prompt) for prompt in (True, False))

    def device_bytes_in(self, prompt: bool) -> int:
        """The same while the prompt is read, or afterwards."""
        tiers = ("device", "staging") if self.pinned else ("device", "staging", "host")
        return max((sample.at(tiers) for sample in self.samples if sample.in_prompt is prompt), default=0)


class DryRun:
    """The cache of this configuration in a run. It raises what building and using the cache raises.

    pinned: host memory is pinned, as where an accelerator computes.
    """

    def __init__(self, footprint: ModelFootprint, config: CacheConfig, run_shape: RunShape, pinned: bool):
        self._footprint, self._run_shape, self._pinned = footprint, run_shape, pinned
        self.cache = cast(MeasuredCache, empty_cache(config, run_shape, self._build))
        check_takes_masks(footprint.model, self.cache)
        if self.cache.max_tokens is not None and self.cache.max_tokens < run_shape.kept:
            raise caches.CapacityError(
                f"the {config.name} cache holds at most {self.cache.max_tokens:,} tokens, but "
                f"{lengths(run_shape.prompt_tokens, run_shape.new_tokens)} need {run_shape.kept:,}: raise max_cache_len"
            )
        self._rows, self._in_prompt = run_shape.prompts, True
        self._samples = [UsageSample({"device": 0}, {})]
        self._materialized_bytes = self._chunk = 0

    @property
    def positions(self) -> int:
        """How many positions the model has to tell apart."""
        return attention_view(self.cache).positions_needed(self._run_shape.kept)

    def usage(self) -> CacheUsage:
        """Take the steps of the run. Call it once."""
        if self.cache.handle is not None:
            self._check_length()
            self._read_prompt()
            self._branch()
            self._decode()
        samples, final = tuple(self._samples), self._samples[0] if self.cache.handle is None else self._sample()
        return CacheUsage(samples, final, self._materialized_bytes, self._chunk, self.positions, self._pinned)

    def _build(self, config: CacheConfig) -> EngineCache:
        config = config.without_kernels() if self._pinned else config
        return build_layers(config.name, self._footprint.specs, self._footprint.is_encoder_decoder, config)

    def _check_length(self) -> None:
        tokens = self._run_shape.kept + self._run_shape.source_tokens
        if tokens > _MOST_TOKENS and not self._windows()[1]:
            raise caches.CapacityError(
                f"{tokens:,} tokens per row are too many for a plan, which takes at most {_MOST_TOKENS:,} unless every "
                "layer keeps only a window: plan fewer tokens, the cache grows in proportion to them"
            )

    def _read_prompt(self) -> None:
        tokens, writes = self._run_shape.prompt_tokens, self._footprint.first
        max_step = attention_view(self.cache).max_step_tokens
        self._chunk = min(tokens, self._run_shape.chunk_tokens or tokens, max_step or tokens)
        full, remainder = divmod(tokens, self._chunk)
        windows, all_evict = self._windows()
        if all_evict:  # after some windows the size no longer changes
            full = min(full, 3 * max(windows) // self._chunk + 3)
        steps = [self._chunk] * full + [remainder] * (remainder > 0)
        for number, count in enumerate(steps):
            is_last = number == len(steps) - 1
            is_sampled = number in (0, full - 1) or is_last
            self._step(count, writes, reads=is_last, is_sampled=is_sampled)
            writes = tuple(write for write in writes if write.part == 0)

    def _branch(self) -> None:
        times = self._run_shape.branches
        if times == 1:
            return
        if self._run_shape.shares:
            self.cache.fork(times)
        else:
            self.cache.select_rows(repeat_rows_index(self._rows, times))
        self._rows *= times
        self._in_prompt = False
        self._samples.append(self._sample())

    def _decode(self) -> None:
        """Steps of one token, most of them joined to longer steps that take the same room."""
        tokens, self._in_prompt = self._run_shape.new_tokens - 1, False
        windows, all_evict = self._windows()
        if all_evict:
            tokens = min(tokens, 3 * max(windows) + 3)
        if tokens > 0 and self._run_shape.branches > 1 and not all(self._footprint.shares):
            self._step(1, self._footprint.later, reads=True, is_sampled=True)
            tokens -= 1
            for subcache, shares in zip(self.cache.parts, self._footprint.shares, strict=True):
                if not shares:
                    subcache.unshare()
        stride = max(16, min(64, min(windows) // 8)) if windows else tokens
        while tokens > 2:
            count = min(stride, tokens - 2)
            if self._run_shape.ends_early or self._run_shape.branches > 1:  # room is made as single tokens come
                for total in range(self.cache.total_tokens + 1, self.cache.total_tokens + count + 1):
                    self.cache.reserve(total)
            # Joined steps may write more at once than a window has room for, which single ones do not.
            self._step(count, self._footprint.later, is_sampled=not windows)
            tokens -= count
        for remaining in reversed(range(tokens)):
            self._step(1, self._footprint.later, reads=remaining == 0, is_sampled=remaining == 0)

    def _step(self, tokens: int, writes: Iterable[CacheWrite], reads: bool = False, is_sampled: bool = False) -> None:
        """reads: whether attention reads what the cache returns, which may allocate scratch memory. is_sampled: whether
        the cache may be at its largest, before the step ends."""
        self.cache.begin(tokens)
        for write in writes:
            result = write.repeat(self.cache, self._rows, self._run_shape.source_tokens if write.part else tokens)
            returned = result if reads and isinstance(result, tuple) else ()
            views = [tensor for tensor in returned if isinstance(tensor, KeyValueView)]
            for view in views:
                for segment in rows_of(view).segments():
                    # For few queries there are kernels, where attention takes segments at all.
                    in_full = tokens > 1 or not self._footprint.shares[write.part]
                    if in_full and not isinstance(segment, DenseSegment):
                        segment.materialize()
            if tokens > FEW_TOKENS:  # then attention reads a quantized or offloaded layer as one tensor
                materialized = sum(prod(view.base) * view.dtype.itemsize for view in views)
                self._materialized_bytes = max(self._materialized_bytes, materialized)
        open_sample = self._sample() if is_sampled else None
        self.cache.commit()
        if open_sample is not None:  # what is prefetched for the next step comes as what this one has kept goes
            self._samples.append(open_sample.joined(self._sample()))

    def _windows(self) -> tuple[list[int], bool]:
        """The windows of the layers that evict tokens, and whether all layers do."""
        bounds = [layer.timeline.retention.bound for subcache in self.cache.parts for layer in subcache.layers]
        windows = [bound for bound in bounds if bound is not None]
        return windows, 0 < len(windows) == len(bounds)

    def _sample(self) -> UsageSample:
        by_place, by_kind = Counter(device=0), Counter[str]()
        for component, tier, size in self._sizes():
            by_place[tier] += size
            if tier != "staging":
                by_kind[component] += size
        return UsageSample(dict(by_place), dict(by_kind), self._in_prompt)

    def _sizes(self) -> Iterator[tuple[str, str, int]]:
        """Kind of layer, place and bytes of each tensor of the cache."""
        for number, subcache in enumerate(self.cache.parts):
            for layer, count in zip(subcache.layers, self._footprint.counts, strict=True):
                tiers = {id(tensor): buffer.tier for buffer in layer.offloaded_buffers() for tensor in buffer.tensors()}
                for component, holder in _holders(layer, number):
                    for tensor in holder.tensors():
                        tier = tiers.get(id(tensor), "device")
                        size = tensor.nbytes
                        if tier == "host" and self._pinned and size:  # torch rounds pinned bytes up to a power of two
                            size = 1 << (size - 1).bit_length()
                        yield component, tier, round(count * size)
            yield from (("", "staging", tensor.nbytes) for tensor in subcache.scratch.tensors())
        per_row, per_token = self._footprint.own_layer_bytes
        if per_row or per_token:
            yield _KINDS["own"], "device", int(self._rows * (per_row + per_token * self.cache.total_tokens))


def _larger(sizes: dict[str, int], later_sizes: dict[str, int]) -> dict[str, int]:
    return {name: max(sizes.get(name, 0), later_sizes.get(name, 0)) for name in sizes | later_sizes}


def _holders(layer: Layer | WrappedLayer, number: int) -> Iterator[tuple[str, Store | RecurrentState]]:
    """The stores and the state of a layer, each with its kind. A layer of transformers' own classes has none."""
    if isinstance(layer, WrappedLayer):
        return
    for name, store in layer.stores.items():
        component = "index" if name == "index" else _KINDS[layer.spec.attention_span.kind]
        yield "cross attention" if number else component, store
    if layer.state is not None:
        yield "states", layer.state
