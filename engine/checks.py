"""Whether a model can be given a prompt: checked before any work, and told with numbers when it cannot."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from engine.errors import InputError, OptionError
from engine.inputs import Prompt
from engine.runner import PER_TOKEN_EXTRAS


def check_model(model: PreTrainedModel) -> None:
    if model.training:
        raise InputError("the model is in training mode, where dropout makes its text random: call model.eval() first")
    if model.config.is_encoder_decoder:
        raise InputError(f"{type(model).__name__} is an encoder-decoder model; only decoder-only models are supported")


def check_ids(model: PreTrainedModel, ids: torch.Tensor) -> None:
    rows, tokens = ids.shape
    if ids.numel() == 0:
        raise InputError(f"the prompt is empty ({rows} rows of {tokens} tokens): the model needs a token to begin with")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise InputError(
            f"token id {wrong} is outside the model's vocabulary of {vocabulary} tokens (0 to {vocabulary - 1})"
        )


def check_mask(ids: torch.Tensor, mask: torch.Tensor, cache_seen: int) -> int:
    """How many columns `mask` covers before the first of `ids`: those in the cache, when only new tokens were given."""
    rows, tokens = ids.shape
    before = cache_seen if cache_seen > 0 and list(mask.shape) == [rows, cache_seen + tokens] else 0
    if before == 0 and mask.shape != ids.shape:
        raise InputError(
            f"attention_mask has shape {list(mask.shape)}, but the token ids have {list(ids.shape)}: "
            "it needs one entry per token"
        )
    if bool((mask[:, -1] == 0).any()):
        raise InputError(
            "the prompts are padded on the right, so the model would continue after pads: "
            "pad on the left (tokenizer.padding_side = 'left')"
        )
    if cache_seen >= before + tokens:
        raise InputError(
            f"the cache holds {cache_seen} tokens and the prompt has {before + tokens}: nothing is left to feed. "
            "Give the whole conversation, with at least one token that the cache has not seen"
        )
    return before


def check_extras(prompt: Prompt, mask: torch.Tensor) -> None:
    for name in ("position_ids", *PER_TOKEN_EXTRAS):
        value = prompt.extras.get(name)
        if value is not None and value.shape[-1] != mask.shape[1]:
            raise InputError(
                f"{name} has shape {list(value.shape)}, but the mask covers {mask.shape[1]} tokens: "
                "its last dimension needs one entry per token"
            )


def check_length(model: PreTrainedModel, prompt_columns: int, total: int) -> None:
    if total <= prompt_columns:
        raise OptionError(
            f"max_length={total} leaves no room after {prompt_columns} prompt tokens: raise it, or use max_new_tokens"
        )
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    # The last new token is never fed, so it needs no position.
    if positions is not None and total - 1 > positions:
        raise InputError(
            f"{prompt_columns} prompt tokens and {total - prompt_columns} new ones need {total - 1} positions, but the "
            f"model has {positions}: shorten the prompt or max_new_tokens (or raise config.max_position_embeddings if "
            "its positions are known to reach further)"
        )


def check_pieces(prompt: Prompt, chunk_tokens: int | None) -> None:
    raw = sorted(set(prompt.extras) & set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL))
    if chunk_tokens is not None and raw:
        raise OptionError(
            f"{', '.join(raw)} cannot be cut into pieces of {chunk_tokens} tokens: read the prompt at once, without "
            "prefill_chunk_tokens or prefill_chunk_size"
        )
