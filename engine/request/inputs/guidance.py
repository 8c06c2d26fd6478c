"""Classifier-free guidance (arXiv 2306.17806): conditional minus unconditional logits, as rows of one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from caches import EngineCache
from engine.errors import InputError, OptionError
from engine.model.model_runner import ModelRunner
from engine.prompt import Prompt, read_prompt
from engine.request.inputs.checks import check_vocabulary
from engine.request.inputs.model_kwargs import complete_model_kwargs

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


def check_guidance(model: PreTrainedModel, scale: object, arguments: Mapping[str, object]) -> None:
    """Refuse arguments that contradict each other or the model. arguments: the `ARGUMENTS` of the call."""
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if scale is None or scale == 1:
        if arguments:
            raise OptionError(
                f"{' and '.join(arguments)} cannot apply: guidance_scale={scale} means no guidance. Give another, such "
                "as guidance_scale=1.5"
            )
        return
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise OptionError(f"guidance_scale={scale!r}, but it is a finite number")
    if model.config.is_encoder_decoder:
        raise OptionError(
            f"guidance_scale={scale} compares with the text without its prompt, but {type(model).__name__} reads its "
            "prompt with an encoder and cannot do without: leave it out"
        )
    if {"negative_prompt", "negative_prompt_ids"} <= set(arguments):
        raise OptionError("negative_prompt and negative_prompt_ids both say what to steer away from: leave one out")
    if "negative_prompt_attention_mask" in arguments and "negative_prompt_ids" not in arguments:
        raise OptionError("negative_prompt_attention_mask is the mask of negative_prompt_ids, which were not given")


def read_guidance(
    model: PreTrainedModel,
    prompt: Prompt,
    mask: torch.Tensor,
    config: GenerationConfig,
    arguments: Mapping[str, object],
    tokenizer: PreTrainedTokenizerBase,
    cache: EngineCache | None,
    infer_mask: Callable[[torch.Tensor], torch.Tensor],
) -> Guidance | None:
    """The guidance of `config`, which is removed there. arguments: `ARGUMENTS`. infer_mask: of ids without a mask."""
    scale, config.guidance_scale = config.guidance_scale, None
    if scale is None or scale == 1:
        return None
    rows = len(prompt.ids)
    _check_alone(prompt, cache, scale)
    ids, other_mask = prompt.ids[:, -1:], mask[:, -1:]
    if arguments["negative_prompt"] is not None or arguments["negative_prompt_ids"] is not None:
        ids, other_mask = _read_negative(arguments, tokenizer, infer_mask, mask.device)
        check_vocabulary(model, ids, "negative_prompt_ids: ")
        if len(ids) not in (1, rows):
            raise InputError(
                f"there are {len(ids)} negative prompts for {rows} prompts: give one for each, or one for all"
            )
        ids, other_mask = (tensor.expand(rows, -1) for tensor in (ids, other_mask))
    columns = max(prompt.columns, ids.shape[1])
    joined_ids, joined_mask = (
        torch.cat([pad(tensor, (columns - tensor.shape[1], 0)) for tensor in tensors])
        for tensors in ((prompt.ids, ids), (mask, other_mask))
    )
    joined_prompt, joined_mask = complete_model_kwargs(model, Prompt(joined_ids, None), joined_mask, cache, config)
    return Guidance(float(scale), joined_prompt, joined_mask, columns - prompt.columns, prompt.columns != ids.shape[1])


def _check_alone(prompt: Prompt, cache: EngineCache | None, scale: object) -> None:
    """Whether the prompts are token ids alone, and the cache is empty and has room for both texts."""
    inputs = ["inputs_embeds"] if prompt.embeds is not None else sorted(prompt.model_kwargs)
    if inputs:
        raise OptionError(
            f"guidance_scale={scale} needs to know what the text without its prompt has in place of "
            f"{', '.join(inputs)}, and nothing says so: give token ids alone, or leave guidance_scale out"
        )
    if cache is None:
        return
    if cache.total_tokens > 0:
        raise OptionError(
            f"guidance_scale={scale} needs the text without its prompt from the beginning, and the cache holds "
            f"{cache.total_tokens} tokens of the prompts' side alone: start with an empty cache and give the whole "
            "conversation"
        )
    rows = 2 * len(prompt.ids)
    if cache.batch_size not in (-1, rows):
        raise OptionError(
            f"guidance_scale={scale} takes two rows for each of {len(prompt.ids)} prompts, but the {cache.name} cache "
            f"was made for {cache.batch_size} rows: give its name instead, or one with room for {rows}"
        )


def _read_negative(
    arguments: Mapping[str, object],
    tokenizer: PreTrainedTokenizerBase,
    infer_mask: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of the negative prompts and their mask, [any, columns], without columns of padding in all rows."""
    named = "negative_prompt" if arguments["negative_prompt_ids"] is None else "negative_prompt_ids"
    mask = arguments["negative_prompt_attention_mask"]
    try:
        negative = read_prompt(
            arguments[named], {} if mask is None else {"attention_mask": mask}, tokenizer, bos_id=None
        )
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
    first_column = int(real.any(dim=0).int().argmax())
    return ids[:, first_column:], real[:, first_column:]


def check_padding_is_neutral(runner: ModelRunner, guidance: Guidance) -> None:
    """Refuse a model whose logits change with left padding."""
    reason = runner.facts.why_not_padded if guidance.has_padding else None
    if reason is not None:
        rows, columns = guidance.mask.shape
        raise OptionError(
            f"guidance_scale={guidance.scale} needs pad tokens before texts shorter than {columns} tokens, and in "
            f"{type(runner.model).__name__} {reason}: give negative_prompt_ids with as many tokens as the prompt has, "
            f"{columns - guidance.lead}, for all {rows // 2} rows"
        )
