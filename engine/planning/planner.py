"""What each backend takes for a run, whether that fits, and how much more would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

import caches
from configs import CacheConfig, ConfigError
from engine.decoding.token_buffer import reads_late
from engine.planning.cache_size import RunShape, fresh_cache
from engine.planning.dry_run import CacheUsage, dry_run
from engine.planning.free_memory import Free
from engine.planning.model_footprint import ModelFootprint

_MARGIN = 1.1  # for what is not counted: fragments, libraries, other processes
_MOST_TOKENS, _MOST_PROMPTS = 2**20, 2**14  # where searches end
_HOLES = 2  # a CPU's allocator leaves holes between what stays: as much again, from half to one and a half of it


@dataclass(frozen=True)
class PlannedModel:
    """The model of a plan. is_loaded: its weights are in memory. has_end: a token may end a text early."""

    config: PreTrainedConfig
    footprint: ModelFootprint
    device: torch.device
    weight_bytes: int
    is_loaded: bool
    has_end: bool


@dataclass(frozen=True, eq=False)
class BackendPlan:
    """What a run takes with one backend. One equals only itself, as of a `Plan`.

    Attributes
    ----------
    cache : str
        The backend's name.
    options : dict
        Those of its options that are not the defaults.
    cache_bytes : dict of str to int
        What it keeps when that is most, by place: "device", "host", "disk", and "staging", which is on the device.
    kind_bytes : dict of str to int
        The same by kind of layer, staging left out.
    working_bytes : int
        What a forward works with beside the cache and the logits.
    need_bytes : dict of str to int
        Of the whole run by place; on a CPU the host is the device.
    fits : bool or None
        Whether that is free, with a tenth to spare; None where that is unknown.
    longest_context : int or None
        Tokens of a row that would still fit, those of the prompt and the new ones, to about 1 %. The last new one is
        never read, so that they may be one more than the model has positions.
    largest_batch : int or None
        Prompts of this length that would still fit, to about 1 %.
    refused : str or None
        Why it is not for this model or this run; None where it is.
    """

    cache: str
    options: dict[str, Any] = field(default_factory=dict)
    cache_bytes: dict[str, int] = field(default_factory=dict)
    kind_bytes: dict[str, int] = field(default_factory=dict)
    working_bytes: int = 0
    need_bytes: dict[str, int] = field(default_factory=dict)
    fits: bool | None = None
    longest_context: int | None = None
    largest_batch: int | None = None
    refused: str | None = None

    @property
    def total_bytes(self) -> int:
        """Of the cache, wherever it is."""
        return sum(self.cache_bytes.values())

    @property
    def title(self) -> str:
        return ", ".join([self.cache, *(f"{name}={value}" for name, value in self.options.items())])


def lossless(device: torch.device, compiled: bool = False) -> list[CacheConfig]:
    """The caches that a choice is made of, the fastest first. A graph can only have one that stays where it is."""
    if compiled:
        return [caches.recipe("static").options()]
    away = {"residency": "disk"} if device.type == "cpu" else {}  # there host memory is what runs out
    return [caches.recipe("dynamic").options(), caches.recipe("offloaded").options.from_dict(away)]


class Planner:
    def __init__(self, subject: PlannedModel, free: Free):
        self._subject, self._free = subject, asdict(free)
        self._on_cpu = subject.device.type == "cpu"

    def backend(self, config: CacheConfig, run_shape: RunShape, search: bool = False) -> BackendPlan:
        """What the run takes with the cache of this configuration. search: also what else would fit."""
        options = {name: value for name, value in config.to_dict(use_diff=True).items() if name != "name"}
        found = BackendPlan(config.name, options)
        try:
            kept = self._rehearse(config, run_shape)
        except (caches.CacheError, ConfigError) as error:
            return replace(found, refused=str(error))
        need = self._need(kept, run_shape)
        found = replace(
            found,
            cache_bytes=kept.most.by_place,
            kind_bytes=kept.most.by_kind,
            working_bytes=self._working(kept, run_shape),
            need_bytes=need,
            fits=self._fits(need),
        )
        if not search or found.fits is None:
            return found
        longest, largest = self._longest_context(config, run_shape, kept), self._largest_batch(kept, run_shape)
        return replace(found, longest_context=longest, largest_batch=largest)

    def _need(self, kept: CacheUsage, run_shape: RunShape) -> dict[str, int]:
        """Bytes of the whole run by place."""
        weights = 0 if self._subject.is_loaded else self._subject.weight_bytes
        beside = self._working(kept, run_shape) + self.logits_bytes(run_shape) + weights
        if self._on_cpu:
            need = {"device": kept.at("device", "staging", "host"), "disk": kept.at("disk")}
        else:
            need = {"device": kept.at("device", "staging"), "host": kept.at("host"), "disk": kept.at("disk")}
        need["device"] += beside
        return {place: size for place, size in need.items() if size}

    def logits_bytes(self, run_shape: RunShape) -> int:
        """Those after the last token of every row, with the copies that a choice works with, in float32.

        Where tokens are read late there are those of the step before too.
        """
        copies = run_shape.score_copies + reads_late(self._subject.device)
        return run_shape.rows * self._subject.footprint.vocabulary * copies * torch.float32.itemsize

    def _rehearse(self, config: CacheConfig, run_shape: RunShape) -> CacheUsage:
        footprint = self._subject.footprint
        if not footprint.takes_cache and config.name != "none":
            raise caches.UnsupportedLayerError(
                f"{footprint.name} takes no cache of keys and values (it keeps none, or a state of its own kind): use "
                "cache='none'"
            )
        self._check_positions(config, run_shape)
        try:
            return dry_run(footprint, config, run_shape, pinned=not self._on_cpu)
        except (caches.CacheError, ConfigError):
            # In terms of the model's own layers, of which the rehearsal has a few.
            fresh_cache(config, run_shape, partial(caches.build, config.name, self._subject.config))
            raise

    def _check_positions(self, config: CacheConfig, run_shape: RunShape) -> None:
        """Raise `CapacityError` where the text is longer than the model can count: rehearsing it would take long."""
        most = self._subject.footprint.positions
        if most is None or run_shape.held <= most:
            return
        # A short run_shape builds any cache at once; a window of its own needs fewer positions.
        build = partial(caches.build, config.name, self._subject.config)
        cache = fresh_cache(config, replace(run_shape, prompt_tokens=1, new_tokens=1), build)
        needed = caches.protocol.attention_view(cache).positions_needed(run_shape.held)
        if needed > most:
            raise caches.CapacityError(
                f"{run_shape.prompt_tokens:,} prompt tokens and {run_shape.new_tokens:,} new ones need {needed:,} "
                f"positions, "
                f"but the model has {most:,}: its longest context is {most + 1:,} tokens, prompt and new ones together "
                "(the last one is never read)"
            )

    def _working(self, kept: CacheUsage, run_shape: RunShape) -> int:
        return self._working_at_once(kept, run_shape) * (_HOLES if self._on_cpu else 1)

    def _working_at_once(self, kept: CacheUsage, run_shape: RunShape) -> int:
        footprint, working = self._subject.footprint, self._subject.footprint.working
        if run_shape.source_tokens:
            return working.bytes(run_shape.prompts, run_shape.source_tokens, run_shape.source_tokens)
        if not kept.chunk_tokens:  # no cache: every step reads everything
            return working.bytes(run_shape.rows, run_shape.held, run_shape.held)
        reading = working.bytes(run_shape.prompts, kept.chunk_tokens, run_shape.prompt_tokens) + kept.together
        read_apart = run_shape.prompts if all(footprint.shares) else run_shape.rows
        return max(reading, working.of_one(run_shape.rows, read_apart, run_shape.held))

    def _fits(self, need: dict[str, int]) -> bool | None:
        known = [(size, self._free[place]) for place, size in need.items() if size]
        if any(free is not None and size * _MARGIN > free for size, free in known):
            return False
        return None if any(free is None for _, free in known) else True

    def _longest_context(self, config: CacheConfig, run_shape: RunShape, kept: CacheUsage) -> int:
        positions = self._subject.footprint.positions

        def read(tokens: int) -> RunShape:
            if run_shape.source_tokens:
                return replace(run_shape, source_tokens=tokens)
            return replace(run_shape, prompt_tokens=tokens)

        is_limited = not run_shape.source_tokens and kept.positions == run_shape.held
        begin, new = (
            (run_shape.source_tokens, 0) if run_shape.source_tokens else (run_shape.prompt_tokens, run_shape.new_tokens)
        )
        far = max(_MOST_TOKENS, begin)
        most = far if positions is None or not is_limited else positions - run_shape.new_tokens + 1
        longest = _largest(lambda tokens: self.backend(config, read(tokens)).fits is True, begin, most)
        return longest + new if longest else 0

    def _largest_batch(self, kept: CacheUsage, run_shape: RunShape) -> int:
        def fits(prompts: int) -> bool:
            return (
                self._fits(self._need(kept.times(prompts / run_shape.prompts), replace(run_shape, prompts=prompts)))
                is True
            )

        return _largest(fits, run_shape.prompts, _MOST_PROMPTS)


def _largest(fits: Callable[[int], bool], begin: int, most: int) -> int:
    """About the largest number, not above `most`, that fits, where all below one that fits do. 0: not even 1 does."""
    if fits(most):
        return most
    low, high = 0, min(begin, most)
    while high < most and fits(high):
        low, high = high, min(2 * high, most)
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def choose(found: Sequence[BackendPlan], free: Free) -> tuple[BackendPlan | None, str]:
    """The first that fits, or the one that needs least; and why, in a sentence."""
    possible = [one for one in found if one.refused is None]
    if not possible:
        reasons = {one.refused for one in found}
        which = "it" if len(found) == 1 else "every cache that loses nothing"
        why = f": {reasons.pop()}" if len(reasons) == 1 else " for this model or this run"
        return None, f"{which} is refused{why}"
    first, taken = possible[0], next((one for one in possible if one.fits is not False), None)
    before = "" if taken is first else f"{first.title} would need {_in_words(first, free)}, which does not fit; "
    if taken is not None:
        doubt = "may fit, how much is free is unknown" if taken.fits is None else "fits"
        return taken, f"{before}{taken.title} loses nothing and {doubt}: it needs {_in_words(taken, free)}"
    least = min(possible, key=lambda one: one.need_bytes["device"])
    return least, f"no cache that loses nothing fits; {least.title} needs least: {_in_words(least, free)}"


def _in_words(one: BackendPlan, free: Free) -> str:
    known = asdict(free)
    places = {place: size for place, size in one.need_bytes.items() if size}
    return ", ".join(
        f"{size:,} bytes on the {place}" + (f" of {known[place]:,} free" if known[place] is not None else "")
        for place, size in places.items()
    )
