"""Classifier-free guidance (arXiv 2306.17806): conditional minus unconditional logits, as rows of one batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import GenerationConfig, PreTrainedModel

from caches import EngineCache
from engine.errors import InputError, OptionError
from engine.model.model_runner import ModelRunner
from engine.prompt import Prompt, read_prompt
from engine.request.checks import check_vocabulary
from engine.request.model_kwargs import complete_model_kwargs

ARGUMENTS = ("negative_prompt", "negative_prompt_ids", "negative_prompt_attention_mask")


@dataclass(frozen=True)
class Guidance:
    """scale: the guided scores are scale * (own - other) + other, of the log-probabilities of both texts.

    prompt, mask: [2 * rows, columns], the prompts, then the first tokens of the other texts, all left-padded to equal
    lengths. lead: columns that the prompts alone would not have. has_padding: whether any text was padded for this.
    """

    scale: float
    prompt: Prompt
    mask: torch.Tensor
    lead: int
    has_padding: bool

    @property
    def other_tokens(self) -> int:
        """First tokens of the other texts, all rows together."""
        return int(self.mask.chunk(2)[1].sum())


def check_guidance(model: PreTrainedModel, scale: Any, given: dict[str, Any]) -> None:
    """Refuse arguments that contradict each other or the model. given: the `ARGUMENTS` of the call."""
    given = {name: value for name, value in given.items() if value is not None}
    if scale is None or scale == 1:
        if given:
            raise OptionError(
                f"{' and '.join(given)} cannot apply: guidance_scale={scale} means no guidance. Give another, such as "
                "guidance_scale=1.5"
            )
        return
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise OptionError(f"guidance_scale={scale!r}, but it is a finite number")
    if model.config.is_encoder_decoder:
        raise OptionError(
            f"guidance_scale={scale} compares with the text without its prompt, but {type(model).__name__} reads its "
            "prompt with an encoder and cannot do without: leave it out"
        )
    if {"negative_prompt", "negative_prompt_ids"} <= set(given):
        raise OptionError("negative_prompt and negative_prompt_ids both say what to steer away from: leave one out")
    if "negative_prompt_attention_mask" in given and "negative_prompt_ids" not in given:
        raise OptionError("negative_prompt_attention_mask is the mask of negative_prompt_ids, which were not given")


def read_guidance(
    model: PreTrainedModel,
    prompt: Prompt,
    mask: torch.Tensor,
    config: GenerationConfig,
    given: dict[str, Any],
    tokenizer: Any,
    cache: EngineCache | None,
    infer_mask: Callable[[torch.Tensor], torch.Tensor],
) -> Guidance | None:
    """The guidance of `config`, which is removed there. given: the `ARGUMENTS`. infer_mask: of ids without a mask."""
    scale, config.guidance_scale = config.guidance_scale, None
    if scale is None or scale == 1:
        return None
    rows = len(prompt.ids)
    _check_alone(prompt, cache, scale)
    ids, other_mask = prompt.ids[:, -1:], mask[:, -1:]
    if given["negative_prompt"] is not None or given["negative_prompt_ids"] is not None:
        ids, other_mask = _read_negative(given, tokenizer, infer_mask, mask.device)
        check_vocabulary(model, ids, "negative_prompt_ids: ")
        if len(ids) not in (1, rows):
            raise InputError(
                f"there are {len(ids)} negative prompts for {rows} prompts: give one for each, or one for all"
            )
        ids, other_mask = (part.expand(rows, -1) for part in (ids, other_mask))
    columns = max(prompt.columns, ids.shape[1])
    both, both_mask = (
        torch.cat([pad(part, (columns - part.shape[1], 0)) for part in parts])
        for parts in ((prompt.ids, ids), (mask, other_mask))
    )
    read, both_mask = complete_model_kwargs(model, Prompt(both, None), both_mask, cache, config)
    return Guidance(float(scale), read, both_mask, columns - prompt.columns, prompt.columns != ids.shape[1])


def _check_alone(prompt: Prompt, cache: EngineCache | None, scale: Any) -> None:
    """Whether the prompts are token ids alone, and the cache is empty and has room for both texts."""
    more = ["inputs_embeds"] if prompt.embeds is not None else sorted(prompt.model_kwargs)
    if more:
        raise OptionError(
            f"guidance_scale={scale} needs to know what the text without its prompt has in place of {', '.join(more)}, "
            "and nothing says so: give token ids alone, or leave guidance_scale out"
        )
    if cache is None:
        return
    if cache.total_tokens > 0:
        raise OptionError(
            f"guidance_scale={scale} needs the text without its prompt from the beginning, and the cache holds "
            f"{cache.total_tokens} tokens of the prompts' side alone: start with an empty cache and give the whole "
            "conversation"
        )
    both = 2 * len(prompt.ids)
    if cache.batch_size not in (-1, both):
        raise OptionError(
            f"guidance_scale={scale} takes two rows for each of {len(prompt.ids)} prompts, but the {cache.name} cache "
            f"was made for {cache.batch_size} rows: give its name instead, or one with room for {both}"
        )


def _read_negative(
    given: dict[str, Any], tokenizer: Any, infer_mask: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of the negative prompts and their mask, [any, columns], without columns of padding in all rows."""
    named = "negative_prompt" if given["negative_prompt_ids"] is None else "negative_prompt_ids"
    mask = given["negative_prompt_attention_mask"]
    try:
        negative = read_prompt(given[named], {} if mask is None else {"attention_mask": mask}, tokenizer, bos_id=None)
    except InputError as error:
        raise InputError(f"{named}: {error}") from error
    ids = negative.ids.to(device)
    real = infer_mask(ids) if negative.mask is None else (negative.mask != 0).long().to(device)
    shape = list(ids.shape)
    if list(real.shape) != shape:
        raise InputError(f"negative_prompt_attention_mask has shape {list(real.shape)}, but the ids have {shape}")
    empty = (real.sum(dim=1) == 0).nonzero().flatten().tolist()
    if empty or 0 in shape:
        raise InputError(
            f"{named}: row {empty[0] if empty else 0} of {shape[0]} is empty, and the text without its prompt has to "
            "begin with something: give a token, such as the beginning-of-sequence id, or leave it out"
        )
    if bool((real[:, -1] == 0).any()):
        raise InputError(f"{named}: padded on the right, where the text goes on: pad on the left")
    first = int(real.any(dim=0).int().argmax())
    return ids[:, first:], real[:, first:]


def check_padding_is_neutral(runner: ModelRunner, guidance: Guidance) -> None:
    """Refuse a model whose logits change with left padding."""
    why = runner.facts.why_not_padded if guidance.has_padding else None
    if why is not None:
        rows, columns = guidance.mask.shape
        raise OptionError(
            f"guidance_scale={guidance.scale} needs pad tokens before texts shorter than {columns} tokens, and in "
            f"{type(runner.model).__name__} {why}: give negative_prompt_ids with as many tokens as the prompt has, "
            f"{columns - guidance.lead}, for all {rows // 2} rows"
        )
