"""Generation for Hugging Face transformers models with a key-value cache chosen by name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvengine import check_siblings

check_siblings(__file__, "configs", "caches", "strategies")

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from configs import EngineConfig
    from engine.errors import (
        BadLogits,
        Cancelled,
        ConfigError,
        CtrlC,
        EngineError,
        InputError,
        Interrupted,
        OptionError,
        OutOfMemory,
    )
    from engine.export import export_step, step_inputs
    from engine.generator import Generator, Stream
    from engine.loading import SHIPPED_MODEL
    from engine.planner import BackendPlan
    from engine.planning import Plan
    from engine.processors import Follower
    from engine.result import Fallback, Generation, Piece, Stats

# Imported on first use: torch and transformers take seconds, and `engine --help` needs neither.
_HOME = {
    "SHIPPED_MODEL": "engine.loading",
    "BadLogits": "engine.errors",
    "BackendPlan": "engine.planner",
    "Cancelled": "engine.errors",
    "ConfigError": "engine.errors",
    "CtrlC": "engine.errors",
    "EngineConfig": "configs",
    "EngineError": "engine.errors",
    "Fallback": "engine.result",
    "Follower": "engine.processors",
    "Generation": "engine.result",
    "Generator": "engine.generator",
    "InputError": "engine.errors",
    "Interrupted": "engine.errors",
    "OptionError": "engine.errors",
    "OutOfMemory": "engine.errors",
    "Piece": "engine.result",
    "Plan": "engine.planning",
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
    cache: a registered name ("dynamic", "static", "none"), "auto" for the fastest that loses nothing and fits (see
        `plan`), a `CacheConfig`, or a live cache object that holds the beginning of the prompt. Default "dynamic", or
        "none" for a model that keeps no keys and values.
    trust_cache: with a live cache, whether its content is taken for the beginning of the prompt where that cannot be
        checked. Default False: such a cache is refused. What is known to differ is refused in any case.
    cache_config: the backend's options, a dict or a `CacheConfig`; without `cache` they change the cache of a
        `Generator`'s `EngineConfig`. `past_key_values`, `cache_implementation` (of the names above) and
        `use_cache=False` as in transformers.
    strategy: a strategy's name or object; by default it follows from the generation parameters as in transformers.
    generation_config, and transformers' generation parameters by keyword: max_new_tokens (default 20), do_sample,
        temperature, top_k, top_p, min_p, repetition_penalty, eos_token_id, stop_strings, max_time, output_scores, ...
    guidance_scale: more than 1 steers away from the text without its prompt, or from the text after `negative_prompt`
        (one for all rows or a list; as ids `negative_prompt_ids`), with any strategy.
    assistant_model: a small model that proposes tokens, of which the model verifies several at once, with
        assistant_tokenizer if it has a vocabulary of its own. prompt_lookup_num_tokens: propose from the text itself.
    logits_processor, stopping_criteria: lists of transformers' own. A processor of yours that keeps something per row
        is a `Follower`.
    streamer: one of transformers' text streamers, which gets the first row while it comes, then the others line by
        line; or an object with `put`, which gets columns of ids, and `end`. It is ended whatever happens.
    cancellation: a `threading.Event` or alike; once it is set, no further step is made.
    on_oom: what is tried when memory is out, in place of `EngineConfig.on_oom`; `stats.fallbacks` says what was. With a
        live cache the one to continue is then `Generation.cache`, and no longer the one that was given.

    Raises `InputError`, `OptionError`, `ConfigError` or a `caches.CacheError` before any work; `Interrupted`, which
    carries what was generated, when something fails later; of its kind `BadLogits`, `Cancelled` and `OutOfMemory`; and
    `CtrlC`, a KeyboardInterrupt that carries the same.
    """
    from engine.generator import Generator

    return Generator(model, tokenizer).generate(inputs, **arguments)


def stream(
    model: PreTrainedModel | str | Path, inputs: Any = None, *, tokenizer: Any = None, **arguments: Any
) -> Stream:
    """As `generate`, but yields a `Piece` (row, token ids, text) per row and step while they come.

    Of a search it is what can no longer change: what all beams of a prompt have in common. The iterator's `result()`
    returns the `Generation`, also when it is left early.
    """
    from engine.generator import Generator

    return Generator(model, tokenizer).stream(inputs, **arguments)


def plan(
    model: PreTrainedModel | PreTrainedConfig | str | Path, *, prompt_tokens: int, max_new_tokens: int, **arguments: Any
) -> Plan:
    """What a run will take, and whether that fits. Nothing is generated and no weights are loaded.

    model: a `PreTrainedModel`, its configuration, or a local path or hub id of which only the configuration is read.
    prompt_tokens: of a prompt; of an encoder-decoder model, those that its encoder reads. max_new_tokens: for each row.
    cache, cache_config: one backend and its options, as for `generate`; by default all backends are looked at.
    batch_size: prompts. num_beams, num_return_sequences: what makes several rows of a prompt. do_sample: whether tokens
        are drawn, which takes more memory for scores; several texts without beams always are.
    dtype, device: how a model would be loaded that is not: by default as its configuration says, and onto the
        accelerator where there is one.
    free_bytes: on the device; by default what is found to be free there. (On a CPU the least of what the machine, the
        control group and the limits of the process leave.)
    prefill_chunk_tokens: how many tokens of the prompt are read at once; by default all.

    The bytes of a cache are found by rehearsing the run: the real cache goes through its steps with tensors that have
    no numbers. Those that a forward works with are counted in a few forwards of the same kind.

    Raises `InputError`, `OptionError`, `ConfigError` or `caches.UnknownCache` before any work.
    """
    from engine.planning import plan as made

    return made(model, prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens, **arguments)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "SHIPPED_MODEL",
    "BackendPlan",
    "BadLogits",
    "Cancelled",
    "ConfigError",
    "CtrlC",
    "EngineConfig",
    "EngineError",
    "Fallback",
    "Follower",
    "Generation",
    "Generator",
    "InputError",
    "Interrupted",
    "OptionError",
    "OutOfMemory",
    "Piece",
    "Plan",
    "Stats",
    "Stream",
    "export_step",
    "generate",
    "plan",
    "step_inputs",
    "stream",
]
