"""Generation for Hugging Face transformers models with a key-value cache chosen by name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from configs import EngineConfig
    from engine.errors import ConfigError, EngineError, InputError, Interrupted, OptionError
    from engine.export import export_step, step_inputs
    from engine.generator import Generator, Stream
    from engine.loading import SHIPPED_MODEL
    from engine.result import Generation, Piece, Stats

# Imported on first use: torch and transformers take seconds, and `engine --help` needs neither.
_HOME = {
    "SHIPPED_MODEL": "engine.loading",
    "ConfigError": "engine.errors",
    "EngineConfig": "configs",
    "EngineError": "engine.errors",
    "Generation": "engine.result",
    "Generator": "engine.generator",
    "InputError": "engine.errors",
    "Interrupted": "engine.errors",
    "OptionError": "engine.errors",
    "Piece": "engine.result",
    "Stats": "engine.result",
    "Stream": "engine.generator",
    "export_step": "engine.export",
    "step_inputs": "engine.export",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def generate(
    model: PreTrainedModel | str | Path, inputs: Any = None, *, tokenizer: Any = None, **arguments: Any
) -> Generation:
    """Generate text with a cache chosen by name.

    model: a `PreTrainedModel`, in PEFT's wrapper or not, or a local path or hub id.
    inputs: a text, a list of texts, chat messages, a LongTensor [rows, tokens] or a mapping with `input_ids` or
        `inputs_embeds`, `attention_mask` and whatever else the model takes (pixels, ...). Model inputs may also be
        keywords, as in `model.generate`.
    tokenizer: needed for text prompts, text results and stop strings, unless `model` is a path.
    cache: a registered name ("dynamic", "static", "none"), a `CacheConfig`, or a live cache object that holds the
        beginning of the prompt. Default "dynamic", or "none" for a model that keeps no keys and values.
    cache_config: the backend's options, a dict or a `CacheConfig`; without `cache` they change the cache of a
        `Generator`'s `EngineConfig`. `past_key_values`, `cache_implementation` (of the names above) and
        `use_cache=False` as in transformers.
    strategy: a strategy's name or object; by default it follows from the generation parameters as in transformers.
    generation_config, and transformers' generation parameters by keyword: max_new_tokens (default 20), do_sample,
        temperature, top_k, top_p, min_p, repetition_penalty, eos_token_id, stop_strings, max_time, output_scores, ...
    logits_processor, stopping_criteria: lists of transformers' own. streamer: one of transformers' streamers.

    Raises `InputError`, `OptionError`, `ConfigError` or a `caches.CacheError` before any work; `Interrupted`, which
    carries what was generated, when something fails later.
    """
    from engine.generator import Generator

    return Generator(model, tokenizer).generate(inputs, **arguments)


def stream(
    model: PreTrainedModel | str | Path, inputs: Any = None, *, tokenizer: Any = None, **arguments: Any
) -> Stream:
    """As `generate`, but yields a `Piece` (row, token ids, text) per row and step while they come.

    The iterator's `result()` returns the `Generation`, also when it is left early.
    """
    from engine.generator import Generator

    return Generator(model, tokenizer).stream(inputs, **arguments)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "SHIPPED_MODEL",
    "ConfigError",
    "EngineConfig",
    "EngineError",
    "Generation",
    "Generator",
    "InputError",
    "Interrupted",
    "OptionError",
    "Piece",
    "Stats",
    "Stream",
    "export_step",
    "generate",
    "step_inputs",
    "stream",
]
