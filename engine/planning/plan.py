"""What a run will take and whether that fits, said before anything runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, TopKLogitsWarper

import caches
import strategies
from configs import CacheConfig, EngineConfig
from engine.errors import OptionError
from engine.model.accelerate_hooks import prompt_device
from engine.model.loading import load, load_config
from engine.model.placement import read_device, read_dtype
from engine.notebook import plan_as_html, plan_in_short
from engine.planning.dry_run import dry_run
from engine.planning.free_memory import find_free
from engine.planning.model_footprint import inspect_model, weight_bytes
from engine.planning.planner import BackendPlan, PlannedModel, Planner, choose, lossless
from engine.request.run_shape import RunShape
from engine.request.strategy import score_copies


@dataclass(frozen=True, eq=False)
class Plan:
    """What a run will take: see `engine.plan`. Printed, it is a table; iterated over, it is its `backends`.

    A plan equals only itself: compare `to_dict()` of two.

    Attributes
    ----------
    model, dtype, device : str
        The model's class, its data type and where it computes.
    prompt_tokens, max_new_tokens, batch_size : int
        What was asked about.
    rows : int
        What the prompts of the batch become.
    weight_bytes : int
        Of parameters and buffers, those that are tied once; they count as needed unless they are loaded.
    weights_are_loaded : bool
        Whether the model was given, not its configuration or its name.
    logits_bytes : int
        Of the logits after the last tokens, with what the strategy makes of them.
    free_bytes : dict of str to int or None
        By place ("device", "host", "disk"), None where that is unknown.
    backends : tuple of BackendPlan
        Those that were asked about.
    choice : str or None
        The title of the one to take, None where all are refused.
    why : str
        Why, in a sentence.
    """

    model: str
    dtype: str
    device: str
    prompt_tokens: int
    max_new_tokens: int
    batch_size: int
    rows: int
    weight_bytes: int
    weights_are_loaded: bool
    logits_bytes: int
    free_bytes: dict[str, int | None]
    backends: tuple[BackendPlan, ...]
    choice: str | None
    why: str

    def __getitem__(self, name: str) -> BackendPlan:
        """The first backend of this name or title. Raises `KeyError`."""
        for backend in self.backends:
            if name in (backend.cache, backend.title):
                return backend
        raise KeyError(f"the plan has no backend {name!r}: {', '.join(backend.title for backend in self.backends)}")

    def __contains__(self, name: object) -> bool:
        """Whether there is a backend of this name or title."""
        return any(name in (backend.cache, backend.title) for backend in self)

    def __iter__(self) -> Iterator[BackendPlan]:
        return iter(self.backends)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can have it."""
        return asdict(self)

    def __str__(self) -> str:
        from engine.planning.report import plan_as_text

        return plan_as_text(self)

    def __repr__(self) -> str:
        return plan_in_short(self)

    def _repr_html_(self) -> str:
        return plan_as_html(self)


def plan(
    model: PreTrainedModel | PreTrainedConfig | str | Path,
    *,
    prompt_tokens: int,
    max_new_tokens: int,
    cache: str | CacheConfig | None = None,
    cache_config: dict[str, Any] | CacheConfig | None = None,
    batch_size: int = 1,
    num_beams: int = 1,
    num_return_sequences: int = 1,
    do_sample: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    free_bytes: int | None = None,
    prefill_chunk_tokens: int | None = None,
) -> Plan:
    """What a run will take, and whether that fits. Nothing is generated and no weights are loaded.

    The bytes of a cache are found by rehearsing the run: the real cache goes through its steps with tensors that have
    no numbers. Those that a forward works with are counted in a few forwards of the same kind.

    Parameters
    ----------
    model : PreTrainedModel, PreTrainedConfig, str or Path
        A model, its configuration, or a local path or hub id of which only the configuration is read.
    prompt_tokens : int
        Tokens of a prompt; of an encoder-decoder model, those that its encoder reads.
    max_new_tokens : int
        New tokens of each row.
    cache, cache_config : str or CacheConfig, and dict or CacheConfig, optional
        One backend and its options, as for `generate`. Default: all backends are looked at.
    batch_size : int, default 1
        Prompts.
    num_beams, num_return_sequences : int, default 1
        What makes several rows of a prompt.
    do_sample : bool, default False
        Whether tokens are drawn, which takes more memory for scores; several texts without beams always are.
    dtype, device : str, torch.dtype, torch.device, optional
        How a model would be loaded that is not. Default: as its configuration says, and onto the accelerator where
        there is one.
    free_bytes : int, optional
        On the device, 0 or more. Default: what is found to be free there. (On a CPU the least of what the machine, the
        control group and the limits of the process leave.)
    prefill_chunk_tokens : int, optional
        How many tokens of the prompt are read at once. Default: all.

    Raises
    ------
    InputError, OptionError, ConfigError, caches.UnknownCacheError
        Before any work.
    """
    _check_numbers(
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        num_beams=num_beams,
        num_return_sequences=num_return_sequences,
        prefill_chunk_tokens=prefill_chunk_tokens,
    )
    _check_numbers(0, free_bytes=free_bytes)
    if 1 < num_beams < num_return_sequences:
        raise OptionError(
            f"num_return_sequences={num_return_sequences} texts cannot come from num_beams={num_beams}: ask for fewer"
        )
    configs = _asked_about(cache, cache_config)
    subject = read_planned_model(model, dtype, device)
    is_encoder_decoder = subject.footprint.is_encoder_decoder
    run_shape = RunShape(
        prompt_tokens=1 if is_encoder_decoder else prompt_tokens,
        source_tokens=prompt_tokens if is_encoder_decoder else 0,
        new_tokens=max_new_tokens,
        prompts=batch_size,
        branches=num_beams if num_beams > 1 else num_return_sequences,
        chunk_tokens=prefill_chunk_tokens,
        ends_early=subject.has_end,
        score_copies=_score_copies(num_beams, num_return_sequences, do_sample),
    )
    chosen_from = lossless(subject.device)
    if cache is None:
        configs += [config for config in chosen_from if config not in configs]
    free = find_free(subject.device, getattr(configs[0], "folder", None))
    if free_bytes is not None:
        free = replace(free, device=free_bytes)
    planner = Planner(subject, free)
    backends = [planner.backend(config, run_shape, search=True) for config in configs]
    candidates = backends if cache is not None else [backends[configs.index(config)] for config in chosen_from]
    if cache is None and all(one.refused is not None for one in candidates):  # a model that takes no cache
        candidates = [one for one in backends if one.cache == "none"]
    choice, why = choose(candidates, free)
    return Plan(
        model=subject.footprint.name,
        dtype=str(subject.footprint.model.dtype).removeprefix("torch."),
        device=str(subject.device),
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        rows=run_shape.rows,
        weight_bytes=subject.weight_bytes,
        weights_are_loaded=subject.is_loaded,
        logits_bytes=planner.logits_bytes(run_shape),
        free_bytes=asdict(free),
        backends=tuple(backends),
        choice=None if choice is None else choice.title,
        why=why,
    )


def choose_cache(model: PreTrainedModel, run_shape: RunShape, compiled: bool) -> CacheConfig:
    """What `cache="auto"` is for this run: the first of `lossless` that fits, or else the one that needs least."""
    subject = read_planned_model(model, None, None)
    free, found = find_free(subject.device), []
    planner, configs = Planner(subject, free), lossless(subject.device, compiled)
    for config in configs:
        found.append(planner.backend(config, run_shape))
        if found[-1].refused is None and found[-1].fits is not False:
            return config
    choice, why = choose(found, free)
    if choice is None:
        return caches.recipe("none").options()
    logging.getLogger("engine").warning(f"cache='auto': {why}")
    return configs[found.index(choice)]


def cache_bytes(
    model_config: PreTrainedConfig,
    name: str,
    options: dict[str, Any] | None = None,
    *,
    rows: int = 1,
    tokens: int,
    source_tokens: int = 0,
    dtype: torch.dtype | None = None,
    device_type: str = "cpu",
) -> dict[str, int]:
    """Bytes of the backend `name`, by place, once it holds `tokens` tokens in each of `rows` rows.

    source_tokens: what an encoder has read. Raises `caches.CacheError` where it is refused.
    """
    config = caches.recipe(name).options.from_dict(options or {})
    # The last ones come one by one: what a cache only needs to read what it holds is there then too.
    single = min(2, tokens - 1)
    run_shape = RunShape(tokens - single, single + 1, prompts=rows, source_tokens=source_tokens)
    return dry_run(inspect_model(model_config, dtype), config, run_shape, pinned=device_type != "cpu").most.by_place


def _score_copies(num_beams: int, num_return_sequences: int, do_sample: bool) -> int:
    """Those of the strategy that these options ask for. Sampling has processors by default: top_k."""
    warpers = [TopKLogitsWarper(top_k=50)]
    if num_beams > 1:
        return score_copies(strategies.Beam(num_beams=num_beams, do_sample=do_sample), warpers if do_sample else [])
    if do_sample or num_return_sequences > 1:
        return score_copies(strategies.Sampling(), warpers)
    return score_copies(strategies.Greedy())


def _check_numbers(least: int = 1, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise OptionError(f"{name}={value!r}, but a plan is for a whole number, {least} or more")


def _asked_about(cache: str | CacheConfig | None, options: dict[str, Any] | CacheConfig | None) -> list[CacheConfig]:
    """The configuration of the cache that was named, or of all there are."""
    if cache is None:
        if options is not None:
            raise OptionError("cache_config are the options of one cache, and none was named: give cache too")
        return [caches.recipe(name).options() for name in caches.names()]
    recipe = caches.recipe(cache if isinstance(cache, str) else cache.name)
    values = {} if isinstance(cache, str) else cache.to_dict()
    return [recipe.options.from_dict(values | dict(options or {}))]


def read_planned_model(
    model: PreTrainedModel | PreTrainedConfig | str | Path,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
) -> PlannedModel:
    model = load_config(model) if isinstance(model, (str, Path)) else model
    wanted = None if dtype is None else read_dtype(dtype)
    planned = _device(device)
    if isinstance(model, PreTrainedConfig):
        footprint = inspect_model(model, wanted)
        return PlannedModel(model, footprint, planned, weight_bytes(footprint.model), False, _has_end(model))
    model, _ = load(model, None, EngineConfig())
    is_loaded = model.device.type != "meta"
    if is_loaded and (dtype is not None or device is not None):
        raise OptionError(
            f"dtype and device say how a model would be loaded, but this one is: in {model.dtype} on {model.device}. "
            "Leave them out, or give its configuration"
        )
    where = prompt_device(model) if is_loaded else planned
    has_end = model.generation_config.eos_token_id is not None
    footprint = inspect_model(model.config, wanted or model.dtype, type(model))
    return PlannedModel(model.config, footprint, where, weight_bytes(model), is_loaded, has_end)


def _device(device: torch.device | str | None) -> torch.device:
    """The one that was named, or the one that a model would be loaded onto."""
    if device is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return read_device(device)


def _has_end(config: PreTrainedConfig) -> bool:
    configs = (config, config.get_text_config(decoder=True))
    return any(getattr(one, "eos_token_id", None) is not None for one in configs)
