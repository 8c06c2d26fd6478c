"""A model and its tokenizer, given or loaded."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from caches.torch_api import inside_compiled
from configs import EngineConfig
from engine.errors import InputError
from engine.model.location import locate
from engine.model.placement import check_here, read_dtype
from engine.out_of_memory import first_line

SHIPPED_MODEL = Path(__file__).parents[1] / "shipped"
"""Folder of the small model that comes with the package: a Llama trained on Python's standard library."""


def load(model: PreTrainedModel | str | Path, tokenizer: Any, config: EngineConfig) -> tuple[PreTrainedModel, Any]:
    """`model`, out of its wrappers, and `tokenizer`; loaded when `model` is a local path or a hub id.

    Raises `InputError` for anything else than these, `OptionError` for a data type or a device that is not there.
    """
    if not isinstance(model, (str, Path)):
        return unwrapped(model), tokenizer
    dtype = config.dtype if config.dtype == "auto" else read_dtype(config.dtype)
    check_here(config.device_map)
    model = locate(model)
    trust = {"trust_remote_code": config.trust_remote_code}  # unsaid, transformers asks on standard input
    remedy = (
        "and running it was not allowed: read that code, then load the model with Generator(..., "
        "config=EngineConfig(trust_remote_code=True)), on the command line with --trust-remote-code"
    )
    with _told_in_one_line(model, remedy):
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(model, **trust)
        try:
            kind = auto_class(AutoConfig.from_pretrained(model, **trust))
        except ValueError:  # a folder with an adapter names its model elsewhere
            kind = AutoModelForCausalLM
        loaded = kind.from_pretrained(model, dtype=dtype, device_map=config.device_map, **trust)
    return loaded.eval(), tokenizer


def unwrapped(model: Any) -> PreTrainedModel:
    """The model inside the wrappers of PEFT, `torch.compile`, DataParallel and DistributedDataParallel.

    Raises `InputError` where no `PreTrainedModel` is inside.
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if (compiled := inside_compiled(inner)) is not None:
            inner = compiled
            _say_once(
                "the model is in torch.compile's wrapper, which is left out: use EngineConfig(compile=...) with "
                "cache='static' to compile its decode steps"
            )
        elif isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = inner.module
        elif hasattr(inner, "peft_config"):
            inner = _out_of_peft(inner)
        else:
            raise InputError(_what_is_expected(model))
    return inner


def _what_is_expected(given: Any) -> str:
    if isinstance(given, type):
        what, remedy = f"the class {given.__name__}", f": load it with {given.__name__}.from_pretrained(...)"
    else:
        what, inner = f"a {type(given).__name__}", getattr(given, "model", None)
        remedy = ": give its .model" if isinstance(inner, PreTrainedModel) else ""
    return (
        "model is a transformers PreTrainedModel (also inside PEFT's, torch.compile's or DistributedDataParallel's "
        f"wrapper), or a local path or hub id, but {what} was given{remedy}"
    )


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger("engine").warning(message)


def _out_of_peft(model: Any) -> Any:
    """What is in PEFT's wrapper: the adapters are in its layers and stay there."""
    tuner = model.base_model
    for adapter, config in model.peft_config.items():
        # aLoRA looks for its words in the prompt; methods like Poly do their part in a forward around the model's.
        reads_prompt = config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None)
        if reads_prompt or "forward" in vars(type(tuner)):
            raise InputError(
                f"the PEFT adapter {adapter!r} ({type(config).__name__}) is more than layers of the model: PEFT puts "
                "something into the prompt, the cache or every forward. Call the wrapper's own generate()"
            )
    return tuner.model


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class that makes the model which generates text for this configuration."""
    if not config.is_encoder_decoder:
        return AutoModelForCausalLM
    texts = type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    return AutoModelForSeq2SeqLM if texts else AutoModelForSpeechSeq2Seq


def load_config(model: str | Path) -> PreTrainedConfig:
    """The configuration alone of the model at a local path or a hub id. Code that comes with it never runs."""
    remedy = (
        "that never runs where only the configuration is read: this takes models of transformers' own by name, and "
        "engine.plan also one that was loaded with Generator(..., config=EngineConfig(trust_remote_code=True))"
    )
    model = locate(model)
    with _told_in_one_line(model, remedy):
        return AutoConfig.from_pretrained(model, trust_remote_code=False)


@contextmanager
def _told_in_one_line(model: str | Path, remedy: str) -> Iterator[None]:
    """remedy: where the repository brings code that may not run."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            raise InputError(f"{str(model)!r} brings Python code of its own, {remedy}") from error
        raise InputError(f"no model could be loaded from {str(model)!r}: {first_line(error)}") from error
