"""A model and its tokenizer, given or loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from configs import EngineConfig
from engine.errors import InputError

SHIPPED_MODEL = Path(__file__).parent / "shipped"
"""Folder of the small model that comes with the package: a Llama trained on Python's standard library."""


def load(model: PreTrainedModel | str | Path, tokenizer: Any, config: EngineConfig) -> tuple[PreTrainedModel, Any]:
    """`model` and `tokenizer` as they are, or loaded when `model` is a local path or a hub id."""
    if not isinstance(model, (str, Path)):
        return model, tokenizer
    with _told_in_one_line(model):
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(model)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=config.dtype, device_map=config.device_map)
    return loaded.eval(), tokenizer


def load_config(model: str | Path) -> PreTrainedConfig:
    """The configuration alone of the model at a local path or a hub id."""
    with _told_in_one_line(model):
        return AutoConfig.from_pretrained(model)


@contextmanager
def _told_in_one_line(model: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"no model could be loaded from {str(model)!r}: {reason}") from error
