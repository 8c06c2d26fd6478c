"""The forms a prompt can have, turned into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.errors import InputError


@dataclass(frozen=True)
class Prompt:
    """ids: LongTensor [rows, tokens], left-padded. mask: [rows, tokens or more], None when the caller gave none; wider
    than `ids` when the columns before them are in the cache already. extras: whatever else the model takes.

    embeds: [rows, columns, hidden_size], fed in place of ids; `ids` then name the last of these columns, or none.
    """

    ids: torch.Tensor
    mask: torch.Tensor | None
    extras: dict[str, Any] = field(default_factory=dict)
    embeds: torch.Tensor | None = None

    @property
    def columns(self) -> int:
        return self.ids.shape[1] if self.embeds is None else self.embeds.shape[1]

    @property
    def unnamed(self) -> int:
        """Columns at the beginning that have an embedding but no id."""
        return self.columns - self.ids.shape[1]

    def to(self, device: torch.device) -> Prompt:
        mask, embeds = (None if tensor is None else tensor.to(device) for tensor in (self.mask, self.embeds))
        return Prompt(self.ids.to(device), mask, move(self.extras, device), embeds)


def move(extras: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """`extras` with their tensors on `device`."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in extras.items()}


def read_prompt(
    inputs: Any, extras: dict[str, Any], tokenizer: Any, bos_id: int | None, pad_left: bool = True
) -> Prompt:
    """Text, texts, chat messages, ids, or a mapping with `input_ids` or `inputs_embeds`, as a `Prompt`.

    extras: model inputs given as keywords; they may hold `input_ids`, `inputs_embeds` and `attention_mask` themselves.
    bos_id: the prompt when there is none. pad_left: where the pads of a ragged batch go. Raises `InputError`.
    """
    extras = dict(extras)
    if isinstance(inputs, Mapping) and not _is_message(inputs):
        twice = sorted(set(inputs) & set(extras))
        if twice:
            raise InputError(f"{', '.join(twice)} given twice: in the inputs and as a keyword")
        extras.update(inputs)
        inputs = None
    ids, mask = extras.pop("input_ids", None), extras.pop("attention_mask", None)
    if inputs is not None and ids is not None:
        raise InputError("the prompt was given twice: as inputs and as input_ids")
    embeds = extras.pop("inputs_embeds", None)
    if embeds is not None and inputs is None and ids is None:
        ids = torch.empty(len(embeds), 0, dtype=torch.long)
    elif inputs is None and ids is None:
        if bos_id is None:
            raise InputError("there is no prompt, and the model has no bos_token_id to begin with")
        ids = torch.tensor([[bos_id]])
        mask = torch.ones_like(ids)  # no pad, also where a model has one id for both
    if inputs is not None:
        if not isinstance(inputs, torch.Tensor) and not _are_ids(inputs):
            if mask is not None:
                raise InputError("attention_mask was given with a text prompt; the tokenizer makes that mask")
            inputs, mask = _tokenize(inputs, tokenizer, pad_left)
        ids = inputs
    if mask is not None:
        mask = torch.as_tensor(mask)
        mask = mask[None] if mask.ndim == 1 else mask
    return Prompt(_as_ids(ids), mask, extras, embeds)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value


def _are_ids(value: Any) -> bool:
    """Whether it is a list of numbers, or a list of such lists."""
    while isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0:
        value = value[0]
    return isinstance(value, int)


def _as_ids(ids: Any) -> torch.Tensor:
    try:
        ids = torch.as_tensor(ids)
    except (ValueError, TypeError) as error:
        raise InputError(f"token ids are a rectangular array of integers, but: {error}") from error
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or ids.is_floating_point():
        raise InputError(f"token ids are integers [rows, tokens], but these are {ids.dtype} {list(ids.shape)}")
    return ids.long()


def _tokenize(inputs: Any, tokenizer: Any, pad_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(inputs, (str, Sequence)):
        raise InputError(
            f"a prompt is a text, texts, chat messages, a tensor or a mapping, not a {type(inputs).__name__}"
        )
    if tokenizer is None:
        raise InputError(
            "a text prompt needs a tokenizer: pass tokenizer=..., give the model as a path, or pass token ids"
        )
    if isinstance(inputs, str) or (len(inputs) > 0 and _is_message(inputs[0])):
        inputs = [inputs]
    if len(inputs) == 0:
        raise InputError("the list of prompts is empty")
    rows = [_token_ids(row, tokenizer) for row in inputs]
    for row, ids in enumerate(rows):
        if not ids:
            raise InputError(f"prompt {row} is empty: the model needs at least one token to begin with")
    longest = max(map(len, rows))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    gaps = [longest - len(row) for row in rows]
    before = [gap if pad_left else 0 for gap in gaps]
    after = [0 if pad_left else gap for gap in gaps]
    padded = [[pad] * b + row + [pad] * a for b, row, a in zip(before, rows, after, strict=True)]
    mask = [[0] * b + [1] * len(row) + [0] * a for b, row, a in zip(before, rows, after, strict=True)]
    return torch.tensor(padded), torch.tensor(mask)


def _token_ids(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if isinstance(prompt, Sequence) and len(prompt) > 0 and all(_is_message(message) for message in prompt):
        if not getattr(tokenizer, "chat_template", None):
            raise InputError("chat messages need a tokenizer with a chat_template, and this one has none")
        return tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)["input_ids"]
    raise InputError(f"a row of prompts is a text or a list of chat messages, not {prompt!r:.80}")
