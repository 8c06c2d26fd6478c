"""Encoder-decoder models: their source is encoded once, before the decoder's first step.

transformers' own functions do it, those that its `generate` calls too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from caches.out_of_memory import is_out_of_memory
from engine.checks import check_vocabulary
from engine.dispatch import prompt_device
from engine.errors import InputError, OptionError
from engine.gathered import joined
from engine.inputs import Prompt, move, read_prompt
from engine.out_of_memory import Exhausted, empty_allocators, without_frames
from engine.turns import turn_of

Recover = Callable[[BaseException, int, int], int]
"""When memory is out, the error and in how many of so many possible parts rows were encoded: how many to go on with.

Raises `Exhausted` when nothing is left to try.
"""


class NothingEncoded(Exhausted):
    """ids: what the decoder would have begun with, [rows, columns]."""

    def __init__(self, why: str, ids: torch.Tensor):
        super().__init__(why)
        self.ids = ids


@dataclass(frozen=True)
class Source:
    """What the encoder was given, ids [rows, columns] or features [rows, ...]; how many tokens or frames it read."""

    inputs: torch.Tensor
    tokens: int


def encode(
    model: PreTrainedModel,
    inputs: Any,
    extras: dict[str, Any],
    tokenizer: Any,
    config: GenerationConfig,
    device: torch.device,
    recover: Recover,
) -> tuple[Prompt, Source]:
    """The decoder's prompt, whose extras hold what the encoder made of the source; and that source.

    inputs: the source in any form, as the model's main input (text, ids, features). extras: further inputs, among them
    `encoder_outputs` in place of a source and `decoder_input_ids`. recover: what to do when memory is out. Raises
    `InputError` and `NothingEncoded`.
    """
    given = move(_read_source(model, inputs, extras, tokenizer), device)
    if not {_source_name(model), "encoder_outputs", "inputs_embeds"} & set(given):
        raise InputError(f"the encoder of {type(model).__name__} has nothing to read: give {_source_name(model)}")
    if "input_ids" in given:
        check_vocabulary(model.get_encoder(), given["input_ids"])
    with turn_of(model), torch.no_grad():
        try:
            source, name, given = model._prepare_model_inputs(None, config.bos_token_id, given)
            model._prepare_special_tokens(config, "attention_mask" in given, device=device, batch_size=source.shape[0])
        except ValueError as error:
            raise InputError(str(error)) from error
        prepare = getattr(model, "_maybe_prepare_encoder_kwargs_for_generation", None)
        if prepare is None and "encoder_outputs" not in given:  # transformers 5.17
            prepare = model._prepare_encoder_decoder_kwargs_for_generation
        begin = partial(
            model._prepare_decoder_input_ids_for_generation,
            batch_size=source.shape[0],
            model_input_name=name,
            decoder_start_token_id=config._decoder_start_token_tensor,
            device=device,
        )
        if prepare is not None:
            prepare = partial(prepare, model_input_name=name, generation_config=config)
            try:
                given = _encoded(prepare, source, given, recover, largest_matrix_bytes(model))
            except Exhausted as error:
                raise NothingEncoded(str(error), begin(model_kwargs=given)[0]) from error.__cause__
        ids, given = begin(model_kwargs=given)
    mask = given.pop("decoder_attention_mask", None)
    return Prompt(ids, torch.ones_like(ids) if mask is None else mask, given), Source(source, _tokens_read(given))


def _encoded(
    prepare: Callable[..., dict[str, Any]], source: torch.Tensor, given: dict[str, Any], recover: Recover, largest: int
) -> dict[str, Any]:
    """`given` with what the encoder makes of the source: of all rows at once, or of some after the others.

    largest: bytes of the model's largest matrix.
    """
    rows, parts = len(source), 1
    while True:
        try:
            return prepare(source, given) if parts == 1 else _encoded_in(parts, prepare, source, given)
        except Exception as error:
            if not is_out_of_memory(error, largest):
                raise
            failure = without_frames(error)
        # Outside of `except`: the error holds on to all that was made.
        by_row = all(part.shape[:1] == (rows,) for part in given.values() if isinstance(part, torch.Tensor))
        parts = recover(failure, parts, rows if by_row else 1)
        empty_allocators()


def _encoded_in(
    parts: int, prepare: Callable[..., dict[str, Any]], source: torch.Tensor, given: dict[str, Any]
) -> dict[str, Any]:
    rows, found = len(source), []
    for index in torch.arange(rows, device=source.device).tensor_split(parts):
        of_rows = {name: index_rows(value, index, rows) for name, value in given.items()}
        found.append(prepare(source[index], of_rows)["encoder_outputs"])
    return given | {"encoder_outputs": joined(found)}


def largest_matrix_bytes(model: PreTrainedModel) -> int:
    """Of its weights."""
    return max((weight.nbytes for weight in model.parameters()), default=0)


def encode_again(
    model: PreTrainedModel, prompt: Prompt, source: Source, config: GenerationConfig, recover: Recover
) -> dict[str, Any]:
    """The inputs that the decoder of `model`, a draft, needs beside ids: its own encoder reads the same source.

    prompt: as `encode` made it for the model that the draft is for. Raises `OptionError` and `NothingEncoded`.
    """
    name = _source_name(model)
    is_ids = source.inputs.ndim == 2 and not source.inputs.is_floating_point()
    if (name == "input_ids") != is_ids or (is_ids and bool((source.inputs < 0).any())):
        raise OptionError(
            f"the encoder of the draft ({type(model).__name__}) reads {name}, and was given none: give the source "
            f"itself, not encoder_outputs or inputs_embeds, or leave assistant_model out"
        )
    extras = {key: value for key, value in prompt.extras.items() if key != "encoder_outputs"}
    device, takes = prompt_device(model), inspect.signature(model.forward).parameters
    given = {name: source.inputs} | {key: value for key, value in extras.items() if key in takes}
    draft_prompt, _ = encode(model, None, move(given, device), None, copy.deepcopy(config), device, recover)
    return draft_prompt.extras


def _source_name(model: PreTrainedModel) -> str:
    """What the encoder calls its input; models of any two parts have a word of their own for it."""
    return getattr(getattr(model, "encoder", None), "main_input_name", model.main_input_name)


def _read_source(model: PreTrainedModel, inputs: Any, extras: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    name = _source_name(model)
    if inputs is None and ("encoder_outputs" in extras or name != "input_ids"):
        return dict(extras)
    if name != "input_ids":
        twice = sorted(set(inputs) & set(extras)) if isinstance(inputs, Mapping) else [name] if name in extras else []
        if twice:
            raise InputError(f"{', '.join(twice)} given twice: in the inputs and as a keyword")
        return {**extras, **(inputs if isinstance(inputs, Mapping) else {name: inputs})}
    if inputs is None and "inputs_embeds" in extras:
        return dict(extras)
    prompt = read_prompt(inputs, extras, tokenizer, bos_id=None, pad_left=False)
    given = prompt.extras | {"input_ids": prompt.ids, "attention_mask": prompt.mask}
    return {key: value for key, value in given.items() if value is not None}


def _tokens_read(given: dict[str, Any]) -> int:
    states = given["encoder_outputs"][0]
    mask = given.get("attention_mask")
    return int((mask != 0).sum()) if mask is not None else states.shape[0] * states.shape[1]


def source_of(extras: dict[str, Any]) -> torch.Tensor | None:
    """What the encoder made of its source [rows, columns, width]; None without an encoder."""
    outputs = extras.get("encoder_outputs")
    return None if outputs is None else outputs[0]


def index_rows(value: Any, index: torch.Tensor, rows: int) -> Any:
    """`value` with row i replaced by row `index[i]`, where it has `rows` of them: a tensor or a model's outputs."""
    if isinstance(value, torch.Tensor) and value.shape[:1] == (rows,):
        return value[index]
    if isinstance(value, ModelOutput):
        return type(value)(**{name: index_rows(part, index, rows) for name, part in value.items()})
    return value
