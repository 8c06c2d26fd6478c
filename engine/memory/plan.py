"""Planning a run: which memory it will take with each cache, and whether that is free."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel, TopKLogitsWarper

import caches
import strategies
from caches.platform.accelerate_hooks import prompt_device
from configs import CacheConfig, EngineConfig
from configs.cache import NO_CACHE
from engine.errors import InputError, OptionError
from engine.kernels.low_bit_linears import ENCODERS
from engine.kernels.weight_conversion import convert_linears, weights_in_words
from engine.loading.gguf import put_codes_without_values
from engine.loading.load import gguf_file, load, load_config
from engine.loading.placement import read_device, read_dtype
from engine.memory.dry_run import DryRun
from engine.memory.free_memory import Free, find_free
from engine.memory.model_footprint import inspect_model, meta_model
from engine.memory.plan_table import Plan
from engine.memory.planner import PlannedModel, Planner, choose, lossless
from engine.model.facts import stored_whys
from engine.parallel.ranks import OneProcess, ranks_of
from engine.parallel.tensor_parallel import check_divides, config_of_rank, part_of, weight_bytes
from engine.request.run_shape import RunShape
from engine.request.strategy import score_copies


def plan(
    model: PreTrainedModel | PreTrainedConfig | str | Path,
    *,
    prompt_tokens: int,
    max_new_tokens: int,
    cache: str | CacheConfig | None = None,
    cache_config: Mapping[str, object] | CacheConfig | None = None,
    batch_size: int = 1,
    num_beams: int = 1,
    num_return_sequences: int = 1,
    do_sample: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    free_bytes: int | None = None,
    prefill_chunk_tokens: int | None = None,
    weights: str = "file",
    tp: int = 1,
) -> Plan:
    """What a run will take, and whether that fits. Nothing is generated and no weights are loaded.

    The bytes of a cache come from a dry run: the real cache takes the steps of the run with tensors that have no
    values. The bytes that forwards work with are measured in a few forwards of the same kind.

    Parameters
    ----------
    model : PreTrainedModel, PreTrainedConfig, str or Path
        A model, its configuration, or a local path or hub id, of which only the configuration is read.
    prompt_tokens : int
        Tokens per prompt; of an encoder-decoder model, those that its encoder reads.
    max_new_tokens : int
        New tokens per row.
    cache, cache_config : str or CacheConfig, and dict or CacheConfig, optional
        One backend and its options, as for `generate`. Default: all backends are planned.
    batch_size : int, default 1
        Number of prompts.
    num_beams, num_return_sequences : int, default 1
        Rows per prompt, as for `generate`.
    do_sample : bool, default False
        Whether tokens are sampled, which takes more memory for scores. Several sequences without beams are always
        sampled.
    dtype, device : str, torch.dtype, torch.device, optional
        How a model that is not loaded would be loaded. Default: the configuration's dtype, and the accelerator if there
        is one.
    free_bytes : int, optional
        Free memory of the device, 0 or more. Default: what is found. (On a CPU, the least of what the machine, the
        control group and the limits of the process leave.)
    prefill_chunk_tokens : int, optional
        Tokens of the prompt per step. Default: all.
    weights : str, default "file"
        As of `EngineConfig`, for a model that is not loaded: "file" counts the codes of a GGUF file, whose header is
        read; "full", "int8", "int4".
    tp : int, default 1
        Processes that compute the model together (tensor parallel): the plan is that of one of them. For a model that
        is not loaded.

    Raises
    ------
    InputError, OptionError, ConfigError, caches.UnknownCacheError
        Before any work.
    """
    _check_integers(
        1, prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens, batch_size=batch_size, num_beams=num_beams,
        num_return_sequences=num_return_sequences, prefill_chunk_tokens=prefill_chunk_tokens, tp=tp,
    )  # fmt: skip
    _check_integers(0, free_bytes=free_bytes)
    if 1 < num_beams < num_return_sequences:
        raise OptionError(
            f"num_return_sequences={num_return_sequences} texts cannot come from num_beams={num_beams}: ask for fewer"
        )
    configs = _configs_to_plan(cache, cache_config)
    EngineConfig(weights=weights, tp=tp)  # refuses others
    planned = read_planned_model(model, dtype, device, weights, tp)
    is_encoder_decoder = planned.footprint.is_encoder_decoder
    run_shape = RunShape(
        prompt_tokens=1 if is_encoder_decoder else prompt_tokens,
        source_tokens=prompt_tokens if is_encoder_decoder else 0,
        new_tokens=max_new_tokens,
        prompts=batch_size,
        branches=num_beams if num_beams > 1 else num_return_sequences,
        chunk_tokens=prefill_chunk_tokens,
        ends_early=planned.has_end,
        score_copies=_score_copies(num_beams, num_return_sequences, do_sample),
    )
    free = find_free(planned.device, getattr(configs[0], "folder", None))
    if free_bytes is not None:
        free = replace(free, device=free_bytes)
    return _planned(planned, run_shape, configs, free, chooses=cache is None)


def _planned(planned: PlannedModel, run_shape: RunShape, configs: list[CacheConfig], free: Free, chooses: bool) -> Plan:
    """The plan of these backends. chooses: the choice is made of the lossless ones, which are planned too."""
    candidates = lossless(planned.device) if chooses else configs
    configs = configs + [config for config in candidates if config not in configs]
    planner = Planner(planned, free)
    backends = [planner.backend(config, run_shape, search=True) for config in configs]
    possible = [backends[configs.index(config)] for config in candidates]
    if chooses and all(backend.refused is not None for backend in possible):  # the model takes no cache
        possible = [backend for backend, config in zip(backends, configs, strict=True) if config.keeps_nothing]
    choice, reason = choose(possible, free, is_named=not chooses)
    return Plan(
        model=planned.footprint.name,
        dtype=str(planned.footprint.model.dtype).removeprefix("torch."),
        device=str(planned.device),
        weights=planned.weights,
        prompt_tokens=run_shape.source_tokens or run_shape.prompt_tokens,
        max_new_tokens=run_shape.new_tokens,
        batch_size=run_shape.prompts,
        rows=run_shape.rows,
        weight_bytes=planned.weight_bytes,
        weights_are_loaded=planned.is_loaded,
        logits_bytes=planner.logits_bytes(run_shape),
        free_bytes=asdict(free),
        backends=tuple(backends),
        choice=None if choice is None else choice.title,
        why=reason,
        not_so=tuple(stored_whys(planned.footprint.model, planned.config, planned.device)),
    )


def choose_cache(model: PreTrainedModel, run_shape: RunShape, compiled: bool) -> CacheConfig:
    """The cache that `cache="auto"` chooses: the first of `lossless` that fits, or else the one that needs least."""
    planned = read_planned_model(model, None, None)
    free, plans = _agreed(find_free(planned.device), ranks_of(model)), []
    planner, configs = Planner(planned, free), lossless(planned.device, compiled)
    for config in configs:
        plans.append(planner.backend(config, run_shape))
        if plans[-1].refused is None and plans[-1].fits is not False:
            return config
    choice, reason = choose(plans, free)
    if choice is None:
        return caches.recipe(NO_CACHE).options()
    logging.getLogger("engine").warning(f"cache='auto': {reason}")
    return configs[plans.index(choice)]


def usable_caches(model: PreTrainedModel) -> list[str]:
    """The names of the backends that the model can have with their default options; all where no plan can say it."""
    try:
        planner, one_token = Planner(read_planned_model(model, None, None), Free(None, None, None)), RunShape(1, 1)
    except InputError:
        return caches.names()
    plans = (planner.backend(caches.recipe(name).options(), one_token) for name in caches.names())
    return [plan.cache for plan in plans if plan.refused is None]


def _agreed(free: Free, ranks: OneProcess) -> Free:
    """The least that is free on any of the ranks, which have to choose the same."""
    return Free(*(None if size is None else -ranks.most(-size) for size in (free.device, free.host, free.disk)))


def cache_bytes(
    model_config: PreTrainedConfig,
    name: str,
    options: Mapping[str, object] | None = None,
    *,
    rows: int = 1,
    tokens: int,
    source_tokens: int = 0,
    dtype: torch.dtype | None = None,
    device_type: str = "cpu",
) -> dict[str, int]:
    """Bytes of the backend `name`, by place, once it holds `tokens` tokens in each of `rows` rows.

    source_tokens: tokens that an encoder has read. Raises `caches.CacheError` where the backend is refused.
    """
    config = caches.recipe(name).options.from_dict(dict(options or {}))
    # The last tokens come one by one, as in a run: memory that a cache needs for such steps is counted too.
    single = min(2, tokens - 1)
    run_shape = RunShape(tokens - single, single + 1, prompts=rows, source_tokens=source_tokens)
    run = DryRun(inspect_model(model_config, dtype), config, run_shape, pinned=device_type != "cpu")
    return run.usage().final.by_place


def _score_copies(num_beams: int, num_return_sequences: int, do_sample: bool) -> int:
    """Copies of the scores that the strategy of these options makes. Sampling has a processor by default: top_k."""
    warpers = [TopKLogitsWarper(top_k=50)]
    if num_beams > 1:
        return score_copies(strategies.Beam(num_beams=num_beams, do_sample=do_sample), warpers if do_sample else [])
    if do_sample or num_return_sequences > 1:
        return score_copies(strategies.Sampling(), warpers)
    return score_copies(strategies.Greedy())


def _check_integers(min_value: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < min_value):
            raise OptionError(f"{name}={value!r}, but a plan is for a whole number, {min_value} or more")


def _configs_to_plan(
    cache: str | CacheConfig | None, options: Mapping[str, object] | CacheConfig | None
) -> list[CacheConfig]:
    """The configuration of the cache that was named, or those of all backends."""
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
    weights: str = "file",
    tp: int = 1,
) -> PlannedModel:
    """The model that is planned, by default for the device that it would be loaded onto.

    Raises `OptionError` when how it would be loaded is said of a loaded model, and for few bits off a CPU.
    """
    source = model
    model = load_config(model) if isinstance(model, (str, Path)) else model
    torch_dtype = None if dtype is None else read_dtype(dtype)
    if device is None:
        target = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    else:
        target = read_device(device)
    if weights in ENCODERS and target.type != "cpu":
        raise OptionError(f"weights={weights!r}: products of that kind are for CPUs, and this plan is for {target}")
    if isinstance(model, PreTrainedConfig):
        if tp > 1:
            check_divides(model, tp)
        footprint, configs = inspect_model(model, torch_dtype), (model, model.get_text_config(decoder=True))
        has_end = any(getattr(config, "eos_token_id", None) is not None for config in configs)
        coded = None if tp > 1 else _coded_model(source, model, torch_dtype, target, weights)
        weighed = coded or footprint.model
        size, words = weight_bytes(weighed, tp), weights_in_words(weighed)
        if tp > 1:
            footprint = inspect_model(part_of(model, tp), torch_dtype)
        return PlannedModel(model, footprint, target, words, size, False, has_end)
    if tp > 1:
        raise OptionError(f"tp={tp} plans a model that is not loaded: give its path or its configuration")
    model, _ = load(model, None, EngineConfig())
    is_loaded = model.device.type != "meta"
    if is_loaded and (dtype, device, weights) != (None, None, "file"):
        raise OptionError(
            f"dtype, device and weights say how a model would be loaded, but this one is: in {model.dtype} on "
            f"{model.device}. Leave them out, or give its configuration"
        )
    if is_loaded:
        target = prompt_device(model)
    has_end = model.generation_config.eos_token_id is not None
    footprint = inspect_model(config_of_rank(model), torch_dtype or model.dtype, type(model))
    words, size = weights_in_words(model), weight_bytes(model)
    return PlannedModel(model.config, footprint, target, words, size, is_loaded, has_end)


def _coded_model(
    source: object, config: PreTrainedConfig, dtype: torch.dtype | None, device: torch.device, weights: str
) -> PreTrainedModel | None:
    """The model without values, with the codes that it would keep of its weights; None where it keeps none."""
    reads_file = weights == "file" and device.type == "cpu"
    file = gguf_file(source) if reads_file and isinstance(source, (str, Path)) else None
    if file is None and weights not in ENCODERS:
        return None
    model = meta_model(config, dtype)
    if file is None:
        convert_linears(model, weights)
    else:
        put_codes_without_values(file, model)
    return model
