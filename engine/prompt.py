"""`Prompt`: all forms of a prompt are read into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Number
from typing import TYPE_CHECKING, Any

import torch

from caches.platform.as_tensor import as_tensor
from caches.platform.warn_once import warn_once
from engine.chat_template import DEFAULTS, TemplateOptions, ids_of, is_message, written
from engine.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ENCODED = "mm_encoder_outputs"  # transformers' name for the outputs of a model's image and sound encoders
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
PER_TOKEN = ("position_ids", *_TOKEN_TYPES)  # model inputs with one entry per prompt token in their last dimension


@dataclass(frozen=True)
class Prompt:
    """ids: LongTensor [rows, tokens], left-padded. mask: [rows, tokens or more], None when the caller gave none; wider
    than `ids` when the columns before them are in the cache already. model_kwargs: whatever else the model takes.

    embeds: [rows, columns, hidden_size], fed in place of ids; `ids` then name the last of these columns, or none.
    """

    ids: torch.Tensor
    mask: torch.Tensor | None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    embeds: torch.Tensor | None = None

    @property
    def columns(self) -> int:
        return self.ids.shape[1] if self.embeds is None else self.embeds.shape[1]

    @property
    def columns_without_ids(self) -> int:
        """Columns at the beginning that have an embedding but no id."""
        return self.columns - self.ids.shape[1]

    def to(self, device: torch.device) -> Prompt:
        mask, embeds = (None if tensor is None else tensor.to(device) for tensor in (self.mask, self.embeds))
        return Prompt(self.ids.to(device), mask, move(self.model_kwargs, device), embeds)


def without_padding(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Ids [rows, tokens] as inputs in which no token is padding."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class EncodedPrompt(dict[str, Any]):
    """`without_padding` of ids [1, tokens] whose text this package has read.

    is_chat: whether they are the messages of a chat. stops_in_prompt: whether a stop string may begin in the prompt, as
    in transformers.
    """

    def __init__(self, ids: torch.Tensor, is_chat: bool, stops_in_prompt: bool = True):
        super().__init__(without_padding(ids))
        self.is_chat, self.stops_in_prompt = is_chat, stops_in_prompt


def is_chat(inputs: Any) -> bool:
    """Whether the inputs of a call are chat messages, in one row at least."""
    if isinstance(inputs, EncodedPrompt):
        return inputs.is_chat
    if not isinstance(inputs, Sequence) or isinstance(inputs, (str, bytes)):
        return False
    return any(is_message(row) or (isinstance(row, (list, tuple)) and any(map(is_message, row))) for row in inputs)


def move(model_kwargs: Mapping[str, object], device: torch.device) -> dict[str, Any]:
    """`model_kwargs` with their tensors on `device`."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in model_kwargs.items()
    }


def read_prompt(
    inputs: object,
    model_kwargs: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    bos_id: int | None,
    pad_left: bool = True,
    pad_id: object = None,
    options: TemplateOptions = DEFAULTS,
) -> Prompt:
    """Text, texts, chat messages, ids, or a mapping with `input_ids` or `inputs_embeds`, as a `Prompt`.

    model_kwargs: model inputs given as keywords, also `input_ids`, `inputs_embeds` and `attention_mask`. bos_id: the
    prompt when there is none. pad_left: whether ragged rows are padded on the left. pad_id: fills up ragged rows of ids
    without a tokenizer; default 0. options: of chat messages. Raises `InputError`.
    """
    inputs, model_kwargs = merged(inputs, model_kwargs)
    model_kwargs = {name: value for name, value in model_kwargs.items() if value is not None or name not in _OPTIONAL}
    ids = model_kwargs.pop("input_ids", None)
    if inputs is not None and ids is not None:
        raise InputError("the prompt was given twice: as inputs and as input_ids")
    embeds = as_embeds(model_kwargs.pop("inputs_embeds", None))
    if embeds is not None and inputs is None and ids is None:
        ids = torch.empty(len(embeds), 0, dtype=torch.long, device="cpu")
    elif inputs is None and ids is None:
        if bos_id is None:
            raise InputError("there is no prompt, and the model has no bos_token_id to begin with")
        ids = torch.tensor([[bos_id]], device="cpu")
        model_kwargs.setdefault(
            "attention_mask", torch.ones_like(ids)
        )  # no pad, also where a model has one id for both
    if inputs is not None:
        ids = inputs
        if not _are_ids(inputs):
            if "attention_mask" in model_kwargs:
                raise InputError("attention_mask was given with a text prompt; the tokenizer makes that mask")
            ids, model_kwargs["attention_mask"] = _tokenize(inputs, tokenizer, pad_left, options)
    ids, model_kwargs = _rectangular(ids, model_kwargs, _pad_id(tokenizer, pad_id), pad_left)
    mask = model_kwargs.pop("attention_mask", None)
    return Prompt(as_ids(ids), None if mask is None else as_mask(mask), model_kwargs, embeds)


_OPTIONAL = ("input_ids", "inputs_embeds", "attention_mask")


def merged(inputs: object, model_kwargs: Mapping[str, object]) -> tuple[object, dict[str, object]]:
    """The inputs that are no mapping, and those by name: given as keywords or in a mapping. Raises `InputError`."""
    if not isinstance(inputs, Mapping) or is_message(inputs):
        return inputs, dict(model_kwargs)
    for name in inputs:
        if not isinstance(name, str):
            raise InputError(f"the inputs are a mapping with {name!r:.40} among its names, which are texts")
    twice = sorted(set(inputs) & set(model_kwargs))
    if twice:
        raise InputError(f"{', '.join(twice)} given twice: in the inputs and as a keyword")
    return None, {**model_kwargs, **inputs}


def _are_ids(value: object) -> bool:
    """Whether it is an integer, a tensor, an array, or lists that begin with one of these or another number."""
    entry = _first(value)
    return hasattr(entry, "tolist") or isinstance(entry, Integral if entry is value else Number)


def _first(value: object) -> object:
    """What comes first in lists of lists; None where there is nothing."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return value
    return next((entry for entries in value if (entry := _first(entries)) is not None), None)


def as_ids(ids: Any, noun: str = "token ids") -> torch.Tensor:
    """LongTensor [rows, tokens] of ids in any form. noun: they are called so in errors. Raises `InputError`."""
    if isinstance(ids, (list, tuple)):
        _check_integers(ids, noun)
    ids = _tensor(ids, f"{noun} are a rectangular array of integers")
    if ids.ndim == 0:
        raise InputError(f"{noun} are integers [rows, tokens], but this is {ids.item()}: one number has no rows")
    if ids.ndim == 1:
        ids = ids[None]
    if ids.numel() == 0 and ids.ndim == 2:  # of no data type in particular
        return ids.long()
    if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InputError(f"{noun} are integers [rows, tokens], but these are {ids.dtype} {list(ids.shape)}")
    return ids.long()


def _check_integers(rows: Sequence[Any], noun: str = "token ids") -> None:
    """Refuse what a tensor would take for integers: a list of ids, or one for each row."""
    for row, tokens in enumerate(rows if all(isinstance(row, (list, tuple)) for row in rows) else [rows]):
        for token in tokens:
            if isinstance(token, bool) or not (isinstance(token, (Integral, Sequence)) or hasattr(token, "tolist")):
                raise InputError(f"{noun} are integers, but row {row} holds {token!r:.40}")


def _tensor(value: Any, description: str) -> torch.Tensor:
    """A tensor of an array or lists in any form. description: of it, in errors. Raises `InputError`."""
    try:
        tensor = as_tensor(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise InputError(f"{description}, but: {error}") from error
    if tensor.layout != torch.strided or tensor.is_meta:
        form = "on the device 'meta', without numbers" if tensor.is_meta else f"a tensor of layout {tensor.layout}"
        raise InputError(f"{description}, but it is {form}: give a dense tensor on a real device")
    return tensor


def as_embeds(embeds: object) -> torch.Tensor | None:
    """Embeddings [rows, columns, hidden_size], or None. Raises `InputError`."""
    if embeds is None or (isinstance(embeds, torch.Tensor) and embeds.ndim == 3 and embeds.is_floating_point()):
        return embeds
    form = f"{embeds.dtype} {list(embeds.shape)}" if isinstance(embeds, torch.Tensor) else type(embeds).__name__
    raise InputError(f"inputs_embeds are a floating-point tensor [rows, columns, hidden size], not {form}")


def as_mask(mask: Any, noun: str = "attention_mask") -> torch.Tensor:
    """A tensor [rows, tokens] of a mask in any form. noun: its name in errors. Raises `InputError`."""
    mask = _tensor(mask, f"{noun} is a rectangular array of zeros and ones")
    return mask[None] if mask.ndim == 1 else mask


def _pad_id(tokenizer: PreTrainedTokenizerBase, pad_id: object) -> int:
    """What fills up a ragged batch: the tokenizer's, or else `pad_id`, or else 0."""
    if tokenizer is None:
        return pad_id if isinstance(pad_id, int) else 0
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)


def _rectangular(ids: object, companions: dict[str, Any], pad: int, pad_left: bool) -> tuple[object, dict[str, object]]:
    """Lists of ids, padded where some are longer than others, and what goes with them: masks and token types."""
    rows = _rows(ids)
    if rows is None:
        return ids, companions
    companions, lengths = dict(companions), list(map(len, rows))
    is_ragged = len(set(lengths)) > 1
    for name in [name for name in companions if name == "attention_mask" or name.endswith("token_type_ids")]:
        values = _rows(companions[name])
        if companions[name] is None:
            continue
        if values is not None and list(map(len, values)) == lengths:
            companions[name] = _padded(values, 0, pad_left, f"{name} is a rectangular array of integers")[0]
        elif is_ragged:
            raise InputError(
                f"{name} has no entry for each id of {len(rows)} lists of {sorted(set(lengths))} ids: leave it out, or "
                "give it as lists of the same lengths"
            )
    if not is_ragged:
        return rows, companions
    _check_integers(rows)
    padded, mask = _padded(rows, pad, pad_left)
    return padded, {"attention_mask": mask} | companions


def _rows(value: object) -> list[list[object]] | None:
    """The rows of a list of lists, tensors or arrays; None for anything else."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in value]
    if not all(isinstance(row, Sequence) and not isinstance(row, str) for row in rows):
        return None
    return [list(row) for row in rows]


def _padded(
    rows: list[list[Any]], pad: int, pad_left: bool, description: str = "token ids are a rectangular array of integers"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows as long as the longest, [rows, columns], and their mask. description: of the rows, in errors."""
    for row, tokens in enumerate(rows):
        if not tokens:
            raise InputError(f"prompt {row} is empty: the model needs at least one token to begin with")
    longest = max(map(len, rows))

    def filled(row: list[object], value: int) -> list[object]:
        gap = [value] * (longest - len(row))
        return gap + row if pad_left else row + gap

    mask = [filled([1] * len(row), 0) for row in rows]
    return _tensor([filled(row, pad) for row in rows], description), torch.tensor(mask, device="cpu")


def _tokenize(
    inputs: object, tokenizer: PreTrainedTokenizerBase, pad_left: bool, options: TemplateOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    if is_message(inputs):
        raise InputError("a prompt is a list of chat messages, and this is one message: give [message]")
    if not isinstance(inputs, (str, Sequence)) or isinstance(inputs, bytes):
        raise InputError(
            f"a prompt is a text, texts, chat messages, a tensor or a mapping, not a {type(inputs).__name__}"
        )
    if (entry := _first(inputs)) is not None and not isinstance(entry, (str, Mapping)):
        raise InputError(f"a prompt is texts, chat messages or token ids, but it begins with {entry!r:.40}")
    if entry is None and None in inputs:
        raise InputError("a prompt is a text, chat messages or token ids, which are integers, but one of these is None")
    if tokenizer is None:
        raise InputError(
            "a text prompt needs a tokenizer: pass tokenizer=..., give the model as a path, or pass token ids"
        )
    if isinstance(inputs, str) or (len(inputs) > 0 and is_message(inputs[0])):
        inputs = [inputs]
    if len(inputs) == 0:
        raise InputError("the list of prompts is empty")
    return _padded([_token_ids(row, tokenizer, options) for row in inputs], _pad_id(tokenizer, None), pad_left)


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a text that is a prompt. Raises `InputError`."""
    try:
        ids = list(tokenizer(text)["input_ids"])
    except (TypeError, ValueError) as error:  # half of a surrogate pair
        raise InputError(f"the prompt {text!r:.80} is no text in Unicode: {error}") from error
    begin = getattr(tokenizer, "bos_token_id", None)
    is_twice = begin is not None and ids[:2] == [begin, begin]
    if is_twice and list(tokenizer(text, add_special_tokens=False)["input_ids"])[:2] != [begin, begin]:
        warn_once(
            f"a prompt begins with two {tokenizer.bos_token!r}: one is in the text, as chat templates write it, and "
            "the tokenizer adds another. Models are trained with one: take it off the text, or give the messages"
        )
    return ids


def _token_ids(prompt: object, tokenizer: PreTrainedTokenizerBase, options: TemplateOptions) -> list[int]:
    if isinstance(prompt, str):
        return text_ids(prompt, tokenizer)
    if isinstance(prompt, Sequence) and len(prompt) == 0:
        return []
    if isinstance(prompt, Sequence) and all(map(is_message, prompt)):
        if not getattr(tokenizer, "chat_template", None):
            raise InputError("chat messages need a tokenizer with a chat_template, and this one has none")
        return ids_of(tokenizer, written(tokenizer, prompt, options), options)
    raise InputError(f"a row of prompts is a text or a list of chat messages, not {prompt!r:.80}")
