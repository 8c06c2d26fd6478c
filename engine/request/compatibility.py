"""Checks of a request against the model and the cache that it runs on, before any work."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from caches import CapacityError, EngineCache
from caches.platform.accelerate_hooks import is_dispatched, prompt_device
from caches.protocol import attention_view, capabilities
from caches.transfer.convert import can_migrate
from engine.compiling.full_step import makes_graphs
from engine.errors import InputError, OptionError
from engine.model.masks import check_takes_masks
from engine.model.model_runner import ModelRunner
from engine.model.rope_probe import check_rope
from engine.request.inputs.checks import check_positions, is_fixed
from engine.request.inputs.guidance import check_padding_is_neutral
from engine.request.request import Request
from engine.tables import lengths


def check_together(runner: ModelRunner, cache: EngineCache, request: Request, compile: str) -> None:
    """Refuse what model, cache and request cannot do together: `OptionError`, `InputError`, `caches.CacheError`."""
    model = runner.model
    model_prompt, mask = request.read
    check_positions(model, cache, mask.shape[1], request.columns, request.cached_columns)
    _check_room_for_rows(cache, len(request.prompt.ids), len(model_prompt.ids), request.rows)
    check_takes_masks(model, cache)
    _check_places(cache, mask, model_prompt.model_kwargs.get("position_ids"))
    check_rope(runner, cache)
    if cache.handle is not None and not runner.takes_cache:
        raise OptionError(
            f"{type(model).__name__} takes no cache of keys and values (it keeps none, or a state of its own "
            f"kind), so the {cache.name} cache has nothing to hold: use cache='none'"
        )
    has_media = not request.prompt.model_kwargs.keys().isdisjoint(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
    if cache.handle is None and has_media and request.rows > len(request.prompt.ids):
        raise OptionError(
            f"{request.strategy.name} makes several rows of each prompt, and rows of a prompt with images or sounds "
            "cannot change places without a cache: use cache='dynamic'"
        )
    if cache.total_tokens > 0 and request.needs.hidden_states:
        raise OptionError(
            f"{request.strategy.name} compares with the hidden states of all tokens, and those of the "
            f"{cache.total_tokens} in the cache are not known: start with an empty cache"
        )
    if request.needs.verifies:
        _check_rolls_back(runner, cache, request)
    _check_cache(model, cache, request)
    _check_facts(runner, cache, request)
    _check_placement(model, cache)
    if makes_graphs(compile):
        if request.config.disable_compile:
            raise OptionError(f"disable_compile=True contradicts EngineConfig(compile={compile!r})")
        check_compiles(cache, compile)
    if request.guidance is not None:
        check_padding_is_neutral(runner, request.guidance)


def _check_placement(model: PreTrainedModel, cache: EngineCache) -> None:
    """Raise `caches.StepError` where the cache's options name a device or a data type that keys will not have."""
    if not can_migrate(cache) or is_dispatched(model) or torch.is_autocast_enabled(prompt_device(model).type):
        return
    for stack in cache.stacks:
        if stack.layout.expected is not None and model.dtype.is_floating_point:
            stack.layout.expected.check(0, torch.empty(0, dtype=model.dtype, device=prompt_device(model)))


def check_compiles(cache: EngineCache, compile: str) -> None:
    """Whether steps on this cache can be compiled."""
    if cache.why_not_compiled is not None:
        raise OptionError(
            f"compile={compile!r} cannot be with the {cache.name} cache: {cache.why_not_compiled}. Use cache='static', "
            "or leave compile off"
        )


def _check_cache(model: PreTrainedModel, cache: EngineCache, request: Request) -> None:
    """Whether the cache has room for the run and can do what the request asks for."""
    mask = request.read[1]
    if cache.max_tokens is not None and cache.max_tokens < request.cached_columns:
        raise CapacityError(
            f"the {cache.name} cache holds at most {cache.max_tokens:,} tokens, but "
            f"{lengths(mask.shape[1], request.lengths.new)} need {request.cached_columns:,}: raise max_cache_len or "
            "ask for fewer"
        )
    text_config = model.config.get_text_config(decoder=True)
    by_id = getattr(text_config, "hidden_size_per_layer_input", None)
    if request.prompt.embeds is not None and cache.handle is None and by_id:
        raise OptionError(
            f"{type(model).__name__} looks up more of every token by its id, so embeddings and ids cannot be "
            "computed again together: use a cache"
        )
    if request.chunk_tokens is not None and cache.handle is None:
        raise OptionError(
            f"reading the prompt in pieces of {request.chunk_tokens} tokens needs a cache to keep them in"
        )


def _check_facts(runner: ModelRunner, cache: EngineCache, request: Request) -> None:
    """Refuse what would be wrong texts of this model. Trials may run it."""
    name, facts = type(runner.model).__name__, runner.facts
    waiting, of_cache = request.read[1].shape[1] - cache.total_tokens, attention_view(cache).max_step_tokens
    max_tokens = min((tokens for tokens in (request.chunk_tokens, of_cache) if tokens is not None), default=waiting)
    reason = facts.why_not_cut if max_tokens < waiting else None
    if reason is not None:
        remedy = "read it at once, without prefill_chunk_tokens or prefill_chunk_size"
        raise OptionError(
            f"the prompt is to be read in pieces of {max_tokens} tokens of {waiting}, and in {name} "
            f"{reason}: {remedy if max_tokens == request.chunk_tokens else 'use another cache than ' + cache.name}"
        )
    reason = facts.why_not_all_logits if request.needs.verifies or request.needs.hidden_states else None
    if reason is not None:
        raise OptionError(
            f"{request.strategy.name} needs logits behind every token, and in {name} {reason}: use another"
        )
    reason = facts.why_not_states if request.needs.hidden_states else None
    if reason is not None:
        raise OptionError(f"{request.strategy.name} compares hidden states, and in {name} {reason}: use another")
    reason = facts.why_not_reordered if request.needs.rows_per_prompt > 1 and cache.handle is not None else None
    if reason is not None:
        raise OptionError(
            f"{request.strategy.name} makes several rows of each prompt, and in {name} {reason}: use cache='none'"
        )


def _check_room_for_rows(cache: EngineCache, prompts: int, begin_rows: int, rows: int) -> None:
    """Whether the rows that `prompts` are to become fit in a cache made for fewer. begin_rows: rows when it begins."""
    room = begin_rows if cache.max_rows is None and is_fixed(cache) else cache.max_rows
    if room is not None and rows > room:
        become = "" if rows == prompts else f" are to become {rows} rows"
        raise CapacityError(
            f"{prompts} prompts{become}, but this {cache.name} cache has room for {room}: build it "
            f"with max_batch_size={rows}, or ask for its name instead"
        )


def _check_places(cache: EngineCache, mask: torch.Tensor, positions: torch.Tensor | None) -> None:
    """Refuse gaps in a text of which the first tokens are to move with a window: by how much is counted in tokens."""
    if not attention_view(cache).rotations:
        return
    holes = (mask[:, 1:] < mask[:, :-1]).any(dim=1).nonzero().flatten().tolist()
    if holes:
        raise InputError(
            f"attention_mask has padding after the first token of row {holes[0]}, which the {cache.name} cache would "
            "count as tokens: pad on the left only, or use another cache"
        )
    if positions is None:
        return
    gaps = (positions.diff(dim=-1) != 1) & (mask[:, 1:] * mask[:, :-1] != 0)
    if bool(gaps.any()):
        raise InputError(
            f"position_ids do not count the tokens one by one, which moving the first ones in a {cache.name} cache "
            "relies on: leave them out, or use another cache"
        )


def _check_rolls_back(runner: ModelRunner, cache: EngineCache, request: Request) -> None:
    """Raise `OptionError` where `cache` cannot roll back rejected tokens."""
    reason = capabilities(cache).rollback_blocker
    if reason is not None:
        raise OptionError(
            f"{request.strategy.name} rolls back rejected tokens, and {reason}: give a name instead, such as "
            "cache='static', or use another strategy"
        )
    if request.lengths.cached > 0 and runner.facts.why_not_several is not None:
        raise OptionError(
            f"{request.strategy.name} rolls back rejected tokens, and {type(runner.model).__name__} then has to "
            f"read all again, but the {request.lengths.cached} tokens in the cache were not given: give the whole "
            "conversation"
        )
