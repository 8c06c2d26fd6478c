"""A model and its tokenizer, given or loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from configs import EngineConfig
from engine.errors import InputError

SHIPPED_MODEL = Path(__file__).parent / "shipped"
"""Folder of the small model that comes with the package: a Llama trained on Python's standard library."""


def load(model: PreTrainedModel | str | Path, tokenizer: Any, config: EngineConfig) -> tuple[PreTrainedModel, Any]:
    """`model`, out of its PEFT wrapper, and `tokenizer`; loaded when `model` is a local path or a hub id."""
    if not isinstance(model, (str, Path)):
        return _unwrapped(model), tokenizer
    trust = {"trust_remote_code": config.trust_remote_code}  # unsaid, transformers asks on standard input
    with _told_in_one_line(model):
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(model, **trust)
        try:
            kind = auto_class(AutoConfig.from_pretrained(model, **trust))
        except ValueError:  # a folder with an adapter names its model elsewhere
            kind = AutoModelForCausalLM
        loaded = kind.from_pretrained(model, dtype=config.dtype, device_map=config.device_map, **trust)
    return loaded.eval(), tokenizer


def _unwrapped(model: Any) -> PreTrainedModel:
    """The model inside PEFT's wrapper, if it is in one: the adapters are in its layers and stay there."""
    if isinstance(model, PreTrainedModel) or not hasattr(model, "peft_config"):
        return model
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
    texts = type(config) in AutoModelForSeq2SeqLM._model_mapping
    return AutoModelForSeq2SeqLM if texts else AutoModelForSpeechSeq2Seq


def load_config(model: str | Path) -> PreTrainedConfig:
    """The configuration alone of the model at a local path or a hub id. Code that comes with it never runs."""
    with _told_in_one_line(model):
        return AutoConfig.from_pretrained(model, trust_remote_code=False)


@contextmanager
def _told_in_one_line(model: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{str(model)!r} brings Python code of its own, and running it was not allowed: read that code, then "
                "load the model with Generator(..., config=EngineConfig(trust_remote_code=True))"
            ) from error
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"no model could be loaded from {str(model)!r}: {reason}") from error
