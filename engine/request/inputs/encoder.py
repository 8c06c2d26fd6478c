"""Encoder-decoder models: transformers' own functions encode the source once, before the decoder's first step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from caches.platform.accelerate_hooks import input_embeddings, prompt_device
from caches.platform.as_tensor import as_tensor
from caches.platform.out_of_memory import empty_allocators, in_words, recovering
from caches.platform.transformers_api import (
    prepare_decoder_input_ids,
    prepare_encoder_kwargs,
    prepare_model_inputs,
    prepare_special_tokens,
    special_tokens,
)
from engine.chat_template import DEFAULTS, TemplateOptions
from engine.errors import InputError, OptionError
from engine.model.forward_parameters import forward_parameters
from engine.model.model_lock import turn_of
from engine.prompt import Prompt, as_embeds, as_ids, as_mask, merged, move, read_prompt
from engine.request.inputs.checks import check_vocabulary
from engine.rows import index_rows, join_rows

Recover = Callable[[BaseException, int, int], int]
"""When memory is out, the error and in how many of so many possible parts rows were encoded: how many to go on with.

Raises `Exhausted` when nothing is left to try.
"""


@dataclass(frozen=True)
class Source:
    """What an encoder reads: ids [rows, columns] or features [rows, ...], called `name`.

    prepare: runs the encoder, unless its outputs were given. tokens: how many it has read, None before.
    """

    inputs: torch.Tensor
    name: str
    prepare: Callable[..., dict[str, object]]
    tokens: int | None = None

    def __str__(self) -> str:
        return f"{self.name} {list(self.inputs.shape)} of {str(self.inputs.dtype).removeprefix('torch.')}"


def read_source(
    model: PreTrainedModel,
    inputs: object,
    model_kwargs: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    config: GenerationConfig,
    device: torch.device,
    options: TemplateOptions = DEFAULTS,
) -> tuple[Prompt, Source]:
    """The decoder's prompt, and what the encoder is to read for it. Nothing is computed; `encode` comes after.

    inputs: the source in any form, as the model's main input (text, ids, features). model_kwargs: further inputs, among
    them `encoder_outputs` in place of a source and `decoder_input_ids`. options: of chat messages. Raises `InputError`
    and `OptionError`.
    """
    named_inputs = _read_source(model, inputs, model_kwargs, tokenizer, config.pad_token_id, options)
    if "attention_mask" in named_inputs:
        named_inputs["attention_mask"] = as_mask(named_inputs["attention_mask"])
    named_inputs = move(named_inputs, device)
    _check_source(model, named_inputs)
    with turn_of(model), torch.no_grad():
        try:
            source, name, named_inputs = prepare_model_inputs(model, config.bos_token_id, named_inputs)
            rows = source.shape[0]
            prepare_special_tokens(model, config, "attention_mask" in named_inputs, device, rows)
        except (ValueError, OverflowError) as error:
            raise InputError(str(error)) from error
        _check_columns(model, named_inputs, source, name)
        start = special_tokens(config).decoder_start
        assert start is not None  # else transformers has refused it above
        if start.ndim == 1 and len(start) != rows:
            raise OptionError(
                f"decoder_start_token_id has {len(start)} ids for {rows} rows: give one for each, or one for all"
            )
        ids, named_inputs = prepare_decoder_input_ids(model, rows, name, named_inputs, start, device)
    prepare = partial(prepare_encoder_kwargs, model, config, name)
    mask = named_inputs.pop("decoder_attention_mask", None)
    return Prompt(ids, torch.ones_like(ids) if mask is None else mask, named_inputs), Source(source, name, prepare)


def encode(
    model: PreTrainedModel, model_kwargs: dict[str, Any], source: Source, recover: Recover
) -> tuple[dict[str, object], Source]:
    """`model_kwargs` with the encoder's outputs, and the source with its tokens. Raises `Exhausted`, `InputError`."""
    with turn_of(model), torch.no_grad():
        try:
            encoded = _encoded(source, model_kwargs, recover, largest_matrix_bytes(model))
        except (ValueError, RuntimeError, IndexError) as error:  # what shapes it reads, each encoder knows by itself
            raise InputError(
                f"the encoder of {type(model).__name__} ({str(model.dtype).removeprefix('torch.')}) cannot read "
                f"{source}: {in_words(error)}"
            ) from error
    states, mask = encoded["encoder_outputs"][0], encoded.get("attention_mask")
    tokens = states.shape[0] * states.shape[1] if mask is None else int((mask != 0).sum())
    return encoded, replace(source, tokens=tokens)


def _check_source(model: PreTrainedModel, named_inputs: dict[str, Any]) -> None:
    """Whether the encoder can read what was given by name. Without anything to read ids begin with `bos_token_id`."""
    name, encoder = _source_name(model), model.get_encoder()
    if name != "input_ids" and not {name, "encoder_outputs", "inputs_embeds"} & set(named_inputs):
        raise InputError(f"the encoder of {type(model).__name__} has nothing to read: give {name}")
    if "input_ids" in named_inputs:
        if named_inputs["input_ids"].numel() == 0:
            raise InputError(
                f"the prompt is empty ({list(named_inputs['input_ids'].shape)}): the encoder needs a token to read"
            )
        check_vocabulary(encoder, named_inputs["input_ids"])
    if "inputs_embeds" not in named_inputs:
        return
    if "inputs_embeds" not in forward_parameters(encoder):
        raise OptionError(f"the encoder of {type(model).__name__} takes no inputs_embeds: give {name}")
    width = getattr(input_embeddings(encoder), "weight", torch.empty(0)).shape[-1]
    shape = named_inputs["inputs_embeds"].shape
    if width not in (0, shape[-1]):
        raise InputError(
            f"inputs_embeds have shape {list(shape)}, but the encoder of {type(model).__name__} reads [rows, columns, "
            f"{width}]"
        )


def _check_columns(model: PreTrainedModel, named_inputs: dict[str, Any], source: torch.Tensor, name: str) -> None:
    """Whether the mask and what the decoder begins with are for this source, which is called `name`."""
    mask, begun, outputs = (named_inputs.get(key) for key in ("attention_mask", "decoder_input_ids", "encoder_outputs"))
    reads_tokens = name in ("input_ids", "inputs_embeds")
    source_shape, called = list(source.shape[: 2 if reads_tokens else 1]), name
    if outputs is not None:
        _check_states(model, outputs.last_hidden_state, source, name)
        has_mask = hasattr(outputs, "attention_mask")  # udop makes states of images too, and a mask for all
        source_shape = list(outputs.last_hidden_state.shape[: 2 if reads_tokens and not has_mask else 1])
        called = "encoder_outputs"
    if mask is not None and (mask.ndim != 2 or list(mask.shape[: len(source_shape)]) != source_shape):
        expected_shape = source_shape if len(source_shape) > 1 else [*source_shape, "columns"]
        raise InputError(
            f"attention_mask has shape {list(mask.shape)}, but {called} have {expected_shape}: it needs one entry per "
            "token that the encoder reads"
        )
    if begun is not None and len(begun) != len(source):
        raise InputError(
            f"decoder_input_ids have {len(begun)} rows, but {called} have {len(source)}: give as many of both"
        )


def _check_states(model: PreTrainedModel, states: torch.Tensor, source: torch.Tensor, name: str) -> None:
    """Whether the decoder can look at what an encoder is said to have made of the source."""
    config = getattr(model.get_encoder(), "config", None)
    has_more = getattr(config, "add_adapter", False)
    width = getattr(config, "output_hidden_size" if has_more else "hidden_size", None)
    is_image = name == "pixel_values"  # encoders of images have states of several kinds
    if not is_image and (states.ndim != 3 or 0 in states.shape[1:] or width not in (None, states.shape[-1])):
        raise InputError(
            f"encoder_outputs have a last_hidden_state of shape {list(states.shape)}, but the decoder of "
            f"{type(model).__name__} looks at [rows, columns, {width or 'width'}], one column or more"
        )
    if states.dtype != model.dtype and not torch.is_autocast_enabled(states.device.type):
        raise InputError(
            f"encoder_outputs have a last_hidden_state of {states.dtype}, but the model computes in {model.dtype}: "
            "convert it, or run the encoder of this model"
        )
    if len(states) != len(source):
        raise InputError(
            f"encoder_outputs have {len(states)} rows, but {name} have {len(source)}: give as many of both"
        )


def _encoded(source: Source, model_kwargs: dict[str, Any], recover: Recover, largest: int) -> dict[str, Any]:
    """`model_kwargs` with the encoder's outputs, of all rows or in groups. largest: bytes of the largest matrix."""
    rows, groups = len(source.inputs), 1
    while True:
        with recovering(size=largest) as outcome:
            return _in_parts(source, model_kwargs, groups)
        assert outcome.failure is not None
        by_row = all(
            tensor.shape[:1] == (rows,) for tensor in model_kwargs.values() if isinstance(tensor, torch.Tensor)
        )
        groups = recover(outcome.failure, groups, rows if by_row else 1)
        empty_allocators()


def _in_parts(source: Source, model_kwargs: dict[str, Any], groups: int) -> dict[str, Any]:
    prepare, inputs = source.prepare, source.inputs
    if groups == 1:
        return prepare(inputs, dict(model_kwargs))
    outputs, rows = [], len(inputs)
    for index in torch.arange(rows, device=inputs.device).tensor_split(groups):
        of_rows = {name: index_rows(value, index, rows) for name, value in model_kwargs.items()}
        outputs.append(prepare(inputs[index], of_rows)["encoder_outputs"])
    return model_kwargs | {"encoder_outputs": join_rows(outputs)}


def largest_matrix_bytes(model: PreTrainedModel) -> int:
    """Of its weights."""
    return max((weight.nbytes for weight in model.parameters()), default=0)


def source_again(
    model: PreTrainedModel, prompt: Prompt, source: Source, config: GenerationConfig
) -> tuple[dict[str, object], Source]:
    """The same source for the encoder of a draft: its inputs and the source. prompt: of the main model's decoder."""
    name = _source_name(model)
    is_ids = source.inputs.ndim == 2 and not source.inputs.is_floating_point()
    if (name == "input_ids") != is_ids or (is_ids and bool((source.inputs < 0).any())):
        raise OptionError(
            f"the encoder of the draft ({type(model).__name__}) reads {name}, and was given none: give the source "
            f"itself, not encoder_outputs or inputs_embeds, or leave assistant_model out"
        )
    model_kwargs = {key: value for key, value in prompt.model_kwargs.items() if key != "encoder_outputs"}
    device, takes = prompt_device(model), forward_parameters(model)
    named_inputs = {name: source.inputs} | {key: value for key, value in model_kwargs.items() if key in takes}
    draft_prompt, draft_source = read_source(
        model, None, move(named_inputs, device), None, copy.deepcopy(config), device
    )
    return draft_prompt.model_kwargs, draft_source


def _source_name(model: PreTrainedModel) -> str:
    """What the encoder calls its input; models of any two parts have a word of their own for it."""
    return getattr(getattr(model, "encoder", None), "main_input_name", model.main_input_name)


def _read_source(
    model: PreTrainedModel,
    inputs: object,
    model_kwargs: Mapping[str, object],
    tokenizer: PreTrainedTokenizerBase,
    pad_id: object,
    options: TemplateOptions,
) -> dict[str, Any]:
    """All that was given, by name: prompts in any form as what the encoder reads, and the inputs beside them."""
    name = _source_name(model)
    inputs, named_inputs = merged(inputs, model_kwargs)
    if inputs is not None and name in named_inputs:
        raise InputError(f"{name} given twice: in the inputs and as a keyword")
    named_inputs = _complete_given(named_inputs)
    if name != "input_ids":
        named_inputs |= {} if inputs is None else {name: inputs}
        return named_inputs | {name: _as_features(named_inputs[name], name)} if name in named_inputs else named_inputs
    if inputs is None and "input_ids" not in named_inputs:
        return named_inputs
    prompt = read_prompt(inputs, named_inputs, tokenizer, bos_id=None, pad_left=False, pad_id=pad_id, options=options)
    named_inputs = prompt.model_kwargs | {
        "input_ids": prompt.ids,
        "attention_mask": prompt.mask,
        "inputs_embeds": prompt.embeds,
    }
    return {key: value for key, value in named_inputs.items() if value is not None}


def _as_features(value: object, name: str) -> torch.Tensor:
    """A tensor [rows, ...] of features in any form; arrays of double precision in torch's usual one."""
    try:
        features = as_tensor(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise InputError(f"{name} are a rectangular array of numbers, but: {error}") from error
    if features.ndim < 2:
        raise InputError(f"{name} have shape {list(features.shape)}, but the encoder reads [rows, ...]")
    is_double = features.dtype == torch.float64 and not isinstance(value, torch.Tensor)
    return features.to(torch.get_default_dtype()) if is_double else features


def _complete_given(named_inputs: Mapping[str, object]) -> dict[str, Any]:
    """What was given by name, lists as tensors and tuples as outputs; None is nothing. Raises `InputError`."""
    named_inputs = {name: value for name, value in named_inputs.items() if value is not None}
    if "inputs_embeds" in named_inputs:
        named_inputs["inputs_embeds"] = as_embeds(named_inputs["inputs_embeds"])
    if "decoder_input_ids" in named_inputs:
        named_inputs["decoder_input_ids"] = as_ids(named_inputs["decoder_input_ids"], "decoder_input_ids")
    if "decoder_attention_mask" in named_inputs:
        named_inputs["decoder_attention_mask"] = as_mask(
            named_inputs["decoder_attention_mask"], "decoder_attention_mask"
        )
    outputs = named_inputs.get("encoder_outputs")
    if isinstance(outputs, (tuple, list)) and outputs:
        named_inputs["encoder_outputs"] = outputs = BaseModelOutput(*outputs[:3])
    states = getattr(outputs, "last_hidden_state", None)
    if outputs is not None and not isinstance(states, torch.Tensor):
        raise InputError(
            f"encoder_outputs are what the encoder returns: an output with last_hidden_state [rows, columns, width], "
            f"or a tuple that begins with it, not a {type(outputs).__name__} without"
        )
    if states is not None and states.ndim < 3:
        raise InputError(
            f"encoder_outputs have a last_hidden_state of shape {list(states.shape)}, but the decoder looks at [rows, "
            "columns, width]"
        )
    return named_inputs


def encoder_records(model_kwargs: dict[str, Any], flags: dict[str, bool]) -> dict[str, Any]:
    """The encoder's attentions and hidden states that `flags` ask for; their rows are those of the prompts."""
    outputs = model_kwargs.get("encoder_outputs") or {}
    names = [name for name in ("attentions", "hidden_states") if flags.get(f"output_{name}")]
    return {f"encoder_{name}": outputs.get(name) for name in names}


def source_of(model_kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What the encoder made of its source [rows, columns, width]; None without an encoder."""
    outputs = model_kwargs.get("encoder_outputs")
    return None if outputs is None else outputs[0]
