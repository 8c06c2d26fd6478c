"""Generation for Hugging Face transformers models with a key-value cache chosen by name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvengine import check_siblings

check_siblings(__file__, "configs", "caches", "strategies")

from engine.parameters import generate_parameters, takes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transformers import PreTrainedModel

    from configs import EngineConfig
    from engine.errors import (
        ConfigError,
        EngineError,
        GenerationCancelled,
        GenerationInterrupted,
        InputError,
        InvalidLogitsError,
        OptionError,
        OutOfMemoryError,
        UserInterrupt,
    )
    from engine.export import export_step, step_inputs
    from engine.generator import Generator
    from engine.loading.load import SHIPPED_MODEL
    from engine.memory.plan import plan
    from engine.memory.plan_table import BackendPlan, Plan
    from engine.request.logits_processors import StatefulLogitsProcessor
    from engine.result import Fallback, Generation, Stats, StreamChunk, TokenLogprob
    from engine.reuse.chat import Chat
    from engine.reuse.prefix import Prefix
    from engine.scoring import TextScore
    from engine.serving.batch import Batch
    from engine.serving.batch_request import BatchRequest
    from engine.streaming import AsyncStream, Stream
    from engine.version import __version__

# Imported on first use: torch and transformers take seconds, and `engine --help` needs neither.
_CONTENTS = {
    "configs": ["EngineConfig"],
    "engine.errors": [
        "ConfigError", "EngineError", "GenerationCancelled", "GenerationInterrupted", "InputError",
        "InvalidLogitsError", "OptionError", "OutOfMemoryError", "UserInterrupt",
    ],
    "engine.generator": ["Generator"],
    "engine.export": ["export_step", "step_inputs"],
    "engine.loading.load": ["SHIPPED_MODEL"],
    "engine.memory.plan": ["plan"],
    "engine.memory.plan_table": ["BackendPlan", "Plan"],
    "engine.request.logits_processors": ["StatefulLogitsProcessor"],
    "engine.result": ["Fallback", "Generation", "Stats", "StreamChunk", "TokenLogprob"],
    "engine.reuse.chat": ["Chat"],
    "engine.reuse.prefix": ["Prefix"],
    "engine.scoring": ["TextScore"],
    "engine.serving.batch": ["Batch"],
    "engine.serving.batch_request": ["BatchRequest"],
    "engine.streaming": ["AsyncStream", "Stream"],
    "engine.version": ["__version__"],
}  # fmt: skip
_HOME = {name: module for module, names in _CONTENTS.items() for name in names}
_LIGHT = ("configs", "engine.errors", "engine.version")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    if _HOME[name] not in _LIGHT:
        import caches  # noqa: F401 - first, because it imports torch and transformers in less time
    return getattr(importlib.import_module(_HOME[name]), name)


@takes(generate_parameters)
def generate(
    model: PreTrainedModel | str | Path, inputs: Any = None, generation_config: Any = None, **arguments: Any
) -> Generation:
    """Generate text with a cache chosen by name.

    A parameter that transformers' `generate` has means the same here. One that would do nothing is refused, if it was
    said in the call; a whole `generation_config` may hold anything. What the call leaves out comes from
    `generation_config`, then from the model's own generation config; the defaults below are for what is in neither.

    Parameters
    ----------
    model : PreTrainedModel, str or Path
        A model, in PEFT's wrapper or not, or a local path or hub id, which also brings the tokenizer.

    Returns
    -------
    Generation
        The tokens, their text, why each row ended, measurements and the live cache.

    Raises
    ------
    InputError
        Before any work: the model, the prompt or another input cannot be used.
    OptionError
        Before any work: a parameter is unknown, contradicts another, or does not apply.
    ConfigError
        Before any work: a configuration has an unknown key or an impossible value.
    caches.CacheError
        The cache cannot serve this model or this run.
    GenerationInterrupted
        The run failed; `partial` is the result so far, as for the errors below.
    InvalidLogitsError
        A `GenerationInterrupted`: no token can be chosen from the logits or scores.
    GenerationCancelled
        A `GenerationInterrupted`: `cancellation` was set.
    OutOfMemoryError
        A `GenerationInterrupted`: an allocation failed, and no fallback of `on_oom` is left.
    UserInterrupt
        A `KeyboardInterrupt`: Ctrl-C was pressed.
    """
    return _generator(model, arguments).generate(inputs, generation_config, **arguments)


@takes(generate_parameters, documented_by=generate)
def stream(
    model: PreTrainedModel | str | Path, inputs: Any = None, generation_config: Any = None, **arguments: Any
) -> Stream:
    """As `generate`, but yields a `StreamChunk` (row, token ids, text) per row and step while they come.

    Of a search it is what can no longer change: what all beams of a prompt have in common. The iterator's `result()`
    returns the `Generation`, also when it is left early.
    """
    return _generator(model, arguments).stream(inputs, generation_config, **arguments)


def generate_many(
    model: PreTrainedModel | str | Path,
    prompts: Iterable[Any],
    *,
    slots: int = 32,
    max_cache_bytes: int | None = None,
    progress: bool = False,
    **arguments: Any,
) -> Iterator[BatchRequest]:
    """Generate for each of many prompts, together; yields them as they end: see `Generator.generate_many`.

    arguments: as of `generate`, for all prompts.
    """
    gen = _generator(model, arguments)
    return gen.generate_many(prompts, slots=slots, max_cache_bytes=max_cache_bytes, progress=progress, **arguments)


def _generator(model: PreTrainedModel | str | Path, arguments: dict[str, Any]) -> Generator:
    from configs import EngineConfig
    from engine import Generator
    from engine.request.call import read

    trust = read("trust_remote_code", arguments.get("trust_remote_code"))
    return Generator(model, arguments.get("tokenizer"), EngineConfig(trust_remote_code=bool(trust)))


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "SHIPPED_MODEL",
    "AsyncStream",
    "BackendPlan",
    "Batch",
    "BatchRequest",
    "Chat",
    "ConfigError",
    "EngineConfig",
    "EngineError",
    "Fallback",
    "Generation",
    "GenerationCancelled",
    "GenerationInterrupted",
    "Generator",
    "InputError",
    "InvalidLogitsError",
    "OptionError",
    "OutOfMemoryError",
    "Plan",
    "Prefix",
    "StatefulLogitsProcessor",
    "Stats",
    "Stream",
    "StreamChunk",
    "TextScore",
    "TokenLogprob",
    "UserInterrupt",
    "__version__",
    "export_step",
    "generate",
    "generate_many",
    "plan",
    "step_inputs",
    "stream",
]  # fmt: skip
