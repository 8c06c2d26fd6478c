"""Further inputs of a model (pixels, sounds, token types, positions), completed by transformers' own functions."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import GenerationConfig, PreTrainedModel

from caches import EngineCache
from caches.platform.transformers_api import has_own_position_ids, prepare_encoder_kwargs, prepare_position_ids
from engine.errors import InputError
from engine.model.model_lock import turn_of
from engine.prompt import PER_TOKEN, Prompt

_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


def complete_model_kwargs(
    model: PreTrainedModel, prompt: Prompt, mask: torch.Tensor, cache: EngineCache | None, config: GenerationConfig
) -> tuple[Prompt, torch.Tensor]:
    """The prompt, ready to be fed, and its mask: media are encoded once, and the model's own positions added."""
    if model.config.is_encoder_decoder:
        return prompt, mask
    cached = 0 if cache is None else cache.total_tokens
    model_kwargs = dict(prompt.model_kwargs)
    if cached > 0 and not _has_new_media(model, prompt, mask, cached):
        model_kwargs = {
            name: value for name, value in model_kwargs.items() if name in PER_TOKEN or name.endswith("_mask")
        }
    with turn_of(model), torch.no_grad():
        if "position_ids" not in model_kwargs and has_own_position_ids(model):
            model_kwargs["position_ids"] = _own_positions(
                model, replace(prompt, model_kwargs=model_kwargs), mask, cache
            )
        model_kwargs = prepare_encoder_kwargs(model, config, "input_ids", prompt.ids, model_kwargs)
    return replace(prompt, mask=None, model_kwargs=model_kwargs), mask


def _has_new_media(model: PreTrainedModel, prompt: Prompt, mask: torch.Tensor, cached: int) -> bool:
    """Whether a column that the cache does not hold stands for a part of an image, a video or a sound."""
    types = prompt.model_kwargs.get("mm_token_type_ids")
    if types is not None:
        return bool(types[:, cached:].any())
    ids = prompt.ids[:, cached - mask.shape[1] :]
    return not _placeholders(model) or has_placeholders(model, ids)


def _placeholders(model: PreTrainedModel) -> list[int]:
    tokens = [getattr(model.config, name, None) for name in _PLACEHOLDERS]
    return [token for token in tokens if token is not None]


def has_placeholders(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    """Whether some of the ids are known to stand for parts of images, videos or sounds."""
    return bool(torch.isin(ids, torch.tensor(_placeholders(model), dtype=torch.long, device=ids.device)).any())


def _own_positions(
    model: PreTrainedModel, prompt: Prompt, mask: torch.Tensor, cache: EngineCache | None
) -> torch.Tensor | None:
    """Position ids of a model that computes its own, those of cached tokens from the log; None: it wants none."""
    model_kwargs = prompt.model_kwargs
    cached = 0 if cache is None else cache.total_tokens
    log = None if cache is None else cache.log
    has_media = any(name not in PER_TOKEN for name in model_kwargs)
    if cached > 0 and not has_media and log is not None and log.positions is not None:
        logged = log.positions[..., :cached].to(mask.device)
        return torch.cat([logged, logged[..., -1:] + mask[:, cached:].cumsum(dim=1)], dim=-1)
    handle = None if cache is None or has_media or cached == 0 else cache.handle
    inputs = prompt.ids if prompt.embeds is None else prompt.embeds
    try:
        return prepare_position_ids(
            model, inputs, model_kwargs | {"attention_mask": mask, "past_key_values": handle, "input_ids": prompt.ids}
        )
    except (StopIteration, IndexError, RuntimeError, ValueError) as error:
        raise InputError(
            f"{type(model).__name__} cannot tell the positions of this prompt ({type(error).__name__}: {error}): begin "
            "with an empty cache and give the whole conversation with all its images"
        ) from error
