"""What each backend takes for a run, whether that fits, and how much more would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedConfig

import caches
from caches.platform.device_state import reads_late
from configs import CacheConfig, ConfigError
from configs.cache import COMPILED_CACHE, DEFAULT_CACHE
from engine.memory.cache_size import empty_cache
from engine.memory.dry_run import CacheUsage, DryRun
from engine.memory.free_memory import Free
from engine.memory.model_footprint import ModelFootprint
from engine.memory.plan_table import BackendPlan
from engine.request.run_shape import RunShape
from engine.tables import lengths, megabytes

_MARGIN = 1.1  # for what is not counted: fragments, libraries, other processes
_MOST_TOKENS, _MOST_PROMPTS = 2**20, 2**14  # the largest answers
_GAPS = 0.5  # of working memory: what a CPU's allocator cannot use between tensors, about


@dataclass(frozen=True)
class PlannedModel:
    """The model of a plan. weights: what they are, in words. is_loaded: they are in memory. has_end: a token may end a
    text early."""

    config: PreTrainedConfig
    footprint: ModelFootprint
    device: torch.device
    weights: str
    weight_bytes: int
    is_loaded: bool
    has_end: bool


def lossless(device: torch.device, compiled: bool = False) -> list[CacheConfig]:
    """The caches that change no result, the fastest first. A compiled step needs one whose tensors never move."""
    if compiled:
        return [caches.recipe(COMPILED_CACHE).options()]
    default = caches.recipe(DEFAULT_CACHE).options()
    offloaded = default.offloaded("disk" if device.type == "cpu" else "host")  # a CPU's memory is the host's
    return [default] if offloaded is None else [default, offloaded]


class Planner:
    """Plans runs of one model with the memory that is free."""

    def __init__(self, model: PlannedModel, free: Free):
        self._model, self._footprint, self._free = model, model.footprint, asdict(free)
        self._on_cpu = model.device.type == "cpu"
        self._weights = 0 if model.is_loaded else model.weight_bytes  # loaded ones are no longer free memory

    def backend(self, config: CacheConfig, run_shape: RunShape, search: bool = False) -> BackendPlan:
        """What the run takes with the cache of this configuration. search: find the longest context and the largest
        batch that would fit too.
        """
        options = {name: value for name, value in config.to_dict(use_diff=True).items() if name != "name"}
        try:
            usage = self._usage(config, run_shape)
        except (caches.CacheError, ConfigError) as error:
            return BackendPlan(config.name, options, refused=str(error))
        of_prompt, of_token = self._working(usage, run_shape)
        need, peak, working = self._need(usage, run_shape), usage.most, max(of_prompt, of_token)
        gaps = int(_GAPS * working) if self._on_cpu else 0
        plan = BackendPlan(
            config.name, options, peak.by_place, peak.by_kind, working, gap_bytes=gaps, need_bytes=need,
            fits=self._fits(need, gaps), changes_text=config.changes_text,
        )  # fmt: skip
        if not search or plan.fits is None:
            return plan
        longest = self._longest_context(config, run_shape, usage)
        batch = self._largest_batch(need, gaps, run_shape.prompts)
        return replace(plan, longest_context=longest, largest_batch=batch)

    def logits_bytes(self, run_shape: RunShape) -> int:
        """Bytes of the float32 logits after the last token of every row, with the copies that the strategy makes.

        Where the host reads tokens one step late, the logits of the step before are counted too.
        """
        copies = run_shape.score_copies + reads_late(self._model.device)
        return run_shape.rows * self._footprint.vocabulary * copies * torch.float32.itemsize

    def _usage(self, config: CacheConfig, run_shape: RunShape) -> CacheUsage:
        if not self._footprint.takes_cache and not config.keeps_nothing:
            raise caches.UnsupportedLayerError(
                f"{self._footprint.name} takes no cache of keys and values (it keeps none, or a state of its own "
                "kind): use cache='none'"
            )
        try:
            run = DryRun(self._footprint, config, run_shape, pinned=not self._on_cpu)
            self._check_positions(run.positions, run_shape)
            return run.usage()
        except (caches.CacheError, ConfigError):
            # The whole model's layers give the better message: the dry run has only some of them.
            empty_cache(config, run_shape, partial(caches.build, config.name, self._model.config))
            raise

    def _check_positions(self, needed: int, run_shape: RunShape) -> None:
        """Raise `CapacityError` where the model lacks positions: a dry run of such a length would take long."""
        max_positions = self._footprint.positions
        if max_positions is not None and needed > max_positions:
            raise caches.CapacityError(
                f"{lengths(run_shape.prompt_tokens, run_shape.new_tokens)} need {needed:,} positions, but the model "
                f"has {max_positions:,}: its longest context is {max_positions + 1:,} tokens, prompt and new ones "
                "together (the last one is never read)"
            )

    def _need(self, usage: CacheUsage, run_shape: RunShape) -> dict[str, int]:
        """Bytes of the whole run by place: of the device the most while the prompt is read, or afterwards."""
        of_prompt, of_token = self._working(usage, run_shape)
        peak = max(usage.device_bytes_in(prompt=True) + of_prompt, usage.device_bytes_in(prompt=False) + of_token)
        device = peak + self.logits_bytes(run_shape) + self._weights
        need = {"device": device, "host": 0 if self._on_cpu else usage.at("host"), "disk": usage.at("disk")}
        return {tier: size for tier, size in need.items() if size}

    def _working(self, usage: CacheUsage, run_shape: RunShape) -> tuple[int, int]:
        """Bytes that the largest forward of the prompt, and that of a new token, allocate in addition to the cache."""
        working = self._footprint.working
        if run_shape.source_tokens:  # an encoder's forward comes before there is a cache
            encoder = working.of_step(run_shape.prompts, run_shape.source_tokens, run_shape.source_tokens)
            return max(0, encoder - usage.device_bytes_in(prompt=True)), 0
        if not usage.chunk_tokens:  # without a cache every step reads all tokens
            return working.of_step(run_shape.rows, run_shape.kept, run_shape.kept), 0
        prompt = working.of_step(run_shape.prompts, usage.chunk_tokens, run_shape.prompt_tokens)
        distinct_rows = run_shape.prompts if all(self._footprint.shares) else run_shape.rows
        new_token = working.of_one_token(run_shape.rows, distinct_rows, run_shape.kept)
        return prompt + usage.materialized_bytes, new_token

    def _fits(self, need: dict[str, int], gaps: int) -> bool | None:
        sizes = [(size + gaps * (tier == "device"), self._free[tier]) for tier, size in need.items() if size]
        if any(free is not None and size * _MARGIN > free for size, free in sizes):
            return False
        return None if any(free is None for _, free in sizes) else True

    def _longest_context(self, config: CacheConfig, run_shape: RunShape, usage: CacheUsage) -> int:
        """Tokens that fit: of the source, or of the prompt and the new ones."""
        tokens, new_tokens, positions = run_shape.prompt_tokens, run_shape.new_tokens, self._footprint.positions

        def fits(other_shape: RunShape) -> bool:
            return self.backend(config, other_shape).fits is True

        if source := run_shape.source_tokens:
            return _largest(lambda n: fits(replace(run_shape, source_tokens=n)), source, _MOST_TOKENS)
        max_tokens = _MOST_TOKENS
        if positions is not None and usage.positions == run_shape.kept:  # no window: every token needs a position
            max_tokens = positions - new_tokens + 1
        longest = _largest(lambda n: fits(replace(run_shape, prompt_tokens=n)), tokens, max_tokens)
        return longest + new_tokens if longest else 0

    def _largest_batch(self, need: dict[str, int], gaps: int, prompts: int) -> int:
        """Prompts that fit: everything but the weights grows in proportion to them."""
        max_prompts = float(_MOST_PROMPTS)
        for tier, size in need.items():
            size, fixed = (size + gaps, self._weights) if tier == "device" else (size, 0)
            max_prompts = min(max_prompts, prompts * ((self._free[tier] or 0) / _MARGIN - fixed) / (size - fixed))
        return max(0, int(max_prompts))


def _largest(fits: Callable[[int], bool], begin: int, limit: int) -> int:
    """About the largest number up to `limit` that fits, given that all below one that fits do; 0: not even 1 fits."""
    limit = max(begin, limit)
    if fits(limit):
        return limit
    low, high = 0, min(begin, limit)
    while high < limit and fits(high):
        low, high = high, min(2 * high, limit)
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def choose(plans: Sequence[BackendPlan], free: Free, is_named: bool = False) -> tuple[BackendPlan | None, str]:
    """The first that fits, or else the one that needs least; and why, in a sentence.

    plans: of the lossless backends, in the order of preference; is_named: the one backend that was asked for instead.
    """
    possible = [plan for plan in plans if plan.refused is None]
    if not possible:
        reasons = {plan.refused for plan in plans}
        subject = "it" if len(plans) == 1 else "every cache that loses nothing"
        reason = f": {reasons.pop()}" if len(reasons) == 1 else " for this model or this run"
        return None, f"{subject} is refused{reason}"
    top, chosen = possible[0], next((plan for plan in possible if plan.fits is not False), None)
    if is_named:
        verdict = {True: "fits", False: "does not fit", None: "may fit, how much is free is unknown"}[top.fits]
        loss = "" if top.changes_text is None else f"; it can change the text: {top.changes_text}"
        return top, f"it {verdict}: it needs {_in_words(top, free)}{loss}"
    if chosen is not None:
        prelude = "" if chosen is top else f"{top.title} would need {_in_words(top, free)}, which does not fit; "
        verdict = "may fit, how much is free is unknown" if chosen.fits is None else "fits"
        return chosen, f"{prelude}it loses nothing and {verdict}: it needs {_in_words(chosen, free)}"
    smallest = min(possible, key=lambda plan: plan.need_bytes["device"])
    return smallest, f"no cache that loses nothing fits; {smallest.title} needs least: {_in_words(smallest, free)}"


def _in_words(backend: BackendPlan, free: Free) -> str:
    """Megabytes by place; the place is named where it is not the device alone."""
    free_bytes, needs = asdict(free), backend.need_bytes
    amounts = []
    for tier, size in needs.items():
        of = "" if free_bytes[tier] is None else f" of {megabytes(free_bytes[tier])} free"
        amounts.append(megabytes(size) + of + ("" if list(needs) == ["device"] else f" ({tier})"))
    return ", ".join(amounts)
