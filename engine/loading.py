"""A model and its tokenizer, given or loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from configs import EngineConfig
from engine.errors import InputError

SHIPPED_MODEL = Path(__file__).parent / "shipped"
"""Folder of the small model that comes with the package: a Llama trained on Python's standard library."""


def load(model: PreTrainedModel | str | Path, tokenizer: Any, config: EngineConfig) -> tuple[PreTrainedModel, Any]:
    """`model` and `tokenizer` as they are, or loaded when `model` is a local path or a hub id."""
    if not isinstance(model, (str, Path)):
        return model, tokenizer
    try:
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(model)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=config.dtype, device_map=config.device_map)
    except (OSError, ValueError) as error:
        raise InputError(
            f"no model could be loaded from {str(model)!r}: {str(error).strip().splitlines()[0]}"
        ) from error
    return loaded.eval(), tokenizer
