"""Generation for Hugging Face transformers models with a key-value cache chosen by name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvengine import check_siblings

check_siblings(__file__, "configs", "caches", "strategies")

from engine.request.call import parameters, takes

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
    from engine.memory.report import BackendPlan, Plan
    from engine.request.logits_processors import StatefulLogitsProcessor
    from engine.result import Fallback, Generation, Stats, StreamChunk, TokenLogprob
    from engine.reuse.chat import Chat
    from engine.reuse.prefix import Prefix
    from engine.scoring import TextScore
    from engine.serving.batch import Batch
    from engine.serving.request import BatchRequest
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
    "engine.memory.report": ["BackendPlan", "Plan"],
    "engine.request.logits_processors": ["StatefulLogitsProcessor"],
    "engine.result": ["Fallback", "Generation", "Stats", "StreamChunk", "TokenLogprob"],
    "engine.reuse.chat": ["Chat"],
    "engine.reuse.prefix": ["Prefix"],
    "engine.scoring": ["TextScore"],
    "engine.serving.batch": ["Batch"],
    "engine.serving.request": ["BatchRequest"],
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


@takes(parameters)
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
    inputs : str, list, Tensor or Mapping, optional
        A text, a list of texts, chat messages, ids (LongTensor [rows, tokens] or lists), or a mapping with `input_ids`
        or `inputs_embeds`, `attention_mask` and whatever else the model takes (pixels, ...). Default: the
        `bos_token_id`, as in transformers.
    tokenizer : PreTrainedTokenizerBase, optional
        Needed for text prompts, text results and stop strings, unless the model was given as a path.
    cache : str, CacheConfig or a live cache, default "dynamic"
        A registered name ("dynamic", "static", "none", ...: `engine caches` lists them), "auto" for the first of the
        backends that lose nothing and fit (see `plan`), a `CacheConfig`, or a cache object that holds the beginning of
        the prompt. The default is "none" for a model that keeps no keys and values.
    cache_config : dict or CacheConfig, optional
        Options of that backend; without `cache` they change the cache of a `Generator`'s `EngineConfig`.
    trust_cache : bool, default False
        With a live cache: whether its content is taken for the beginning of the prompt where that cannot be checked,
        also where its model has changed since. Tokens that are known to differ are refused in any case.
    past_key_values, cache_implementation, use_cache, return_legacy_cache
        As in transformers: a live cache, a name of `cache`, `False` for "none", and tuples in place of a cache.
    on_oom : list of str, optional
        What is tried when memory is out, in place of `EngineConfig.on_oom`; `stats.fallbacks` says what was. With a
        live cache the one to continue is then `Generation.cache`, and no longer the one that was given.
    strategy : str or Strategy, optional
        A strategy's name or object; by default it follows from the parameters below, as in transformers.
    generation_config : GenerationConfig or dict of its fields, optional
        transformers' parameters as a whole. Those of the call win.
    seed : int, optional
        The strategy draws the random numbers that follow `torch.manual_seed(seed)`, and torch's global ones stay as
        they are. Default: it draws torch's global ones. Logits processors that draw always take those. Greedy and beam
        search without `do_sample` draw nothing.
    do_sample : bool, default False
        Draw tokens instead of taking the most probable.
    temperature : float, optional
        With `do_sample`: logits are divided by this value, over 0.
    top_k : int, optional
        With `do_sample`: draw from the k most probable tokens; 0 is all.
    top_p : float, optional
        With `do_sample`: draw from the most probable tokens whose probabilities add up to this, 0 to 1.
    min_p : float, optional
        With `do_sample`: draw from tokens with at least this share of the highest probability, 0 to 1.
    typical_p : float, optional
        With `do_sample`: draw from the most typical tokens whose probabilities add up to this, 0 to 1.
    epsilon_cutoff : float, optional
        With `do_sample`: draw from tokens with at least this probability, 0 to 1.
    eta_cutoff : float, optional
        As `epsilon_cutoff`, with a lower limit where the distribution has a high entropy.
    num_return_sequences : int, default 1
        Texts per prompt: drawn, or the best of a search.
    num_beams : int, default 1
        Beams of a beam search; 1 is no search.
    length_penalty : float, default 1.0
        Exponent of the length by which the scores of beams are divided: over 0 favours long texts.
    early_stopping : bool or "never", default False
        Whether a beam search ends as soon as it has `num_beams` complete texts.
    num_beam_groups : int, default 1
        Groups of beams of a diverse beam search.
    diversity_penalty : float, optional
        What a token's score loses for each beam of the earlier groups that chose the token in this step.
    penalty_alpha : float, optional
        Contrastive search, with `top_k`: how strongly to avoid what was said, 0 to 1.
    assistant_model : PreTrainedModel, str or Path, optional
        A small model that proposes tokens, of which the model verifies several at once. A path or hub id also brings
        its tokenizer; a `Generator` keeps the last one that it loaded.
    assistant_tokenizer : PreTrainedTokenizerBase, optional
        That of an assistant that was given as an object, if it has a vocabulary of its own.
    num_assistant_tokens : int, default 20
        Tokens that the assistant proposes at a time.
    prompt_lookup_num_tokens, max_matching_ngram_size : int, optional
        Propose so many tokens from the text itself, where so many last tokens have been there before.
    repetition_penalty, no_repeat_ngram_size, bad_words_ids, sequence_bias, suppress_tokens, begin_suppress_tokens, \
forced_bos_token_id, forced_eos_token_id, exponential_decay_length_penalty, renormalize_logits
        As in transformers: what is done to scores before a token is chosen.
    guidance_scale, negative_prompt, negative_prompt_ids, negative_prompt_attention_mask
        More than 1 steers away from the text without its prompt, or from the text after a negative prompt (one for all
        rows or a list), with any strategy.
    logits_processor : LogitsProcessor or a list of them, optional
        Of transformers or of your own: called with ids [rows, tokens] and scores [rows, vocabulary], returns scores. A
        processor that keeps something per row is a `StatefulLogitsProcessor`.
    prefix_allowed_tokens_fn : callable, optional
        Called with the prompt's index and a row's ids; returns the ids that may come next.
    continue_final_message, add_generation_prompt : bool, optional
        Of chat messages, as of `apply_chat_template`: the answer goes on with the last message; what makes the model
        answer comes last. Default: a last message of the assistant is continued, as in transformers' pipeline.
    sanitize_control_tokens : bool, default False
        Whether control tokens that chat messages spell (`<|im_end|>`) are read as text.
    response_format : dict, optional
        As in OpenAI's interface: `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"schema":
        ...}}`. This and the four below take a list too, with one or None for each prompt, and need the extra `grammar`
        and a tokenizer. The texts of a row that ends by itself have the form; `Generation.parsed` has their values.
    json_schema : dict, str or pydantic model, optional
        Texts are JSON that follows this schema.
    regex : str, optional
        Texts match this regular expression as a whole.
    choices : list of str, optional
        Texts are one of these.
    grammar : str, optional
        Texts follow this grammar, in Lark's notation.
    max_new_tokens : int, default 20
        Tokens per row at most.
    min_new_tokens : int, optional
        New tokens per row at least.
    max_length : int, optional
        Tokens per row at most, with those of the prompt.
    min_length : int, optional
        Tokens per row at least, with those of the prompt.
    max_time : float, optional
        Seconds after which the run ends, with one token at least.
    stop_strings : str or list of str, optional
        A row ends where one of them appears. Needs a tokenizer.
    eos_token_id, pad_token_id : int or list of int, optional
        The ids that end a row, and the id that fills up rows that have ended. Default: the model's; an answer to chat
        messages also ends with the tokenizer's end token and with what closes an answer in the chat template.
    stopping_criteria : StoppingCriteria or a list of them, optional
        Of transformers or of your own: called with ids and scores, returns which rows have ended.
    cancellation : threading.Event or alike, optional
        Once it is set, no further step is made.
    streamer : BaseStreamer, optional
        One of transformers' text streamers, which gets the first row while it comes, then the others line by line; or
        an object with `put`, which gets columns of ids, and `end`. It is ended whatever happens.
    top_logprobs : int, optional
        Report the log probability of every new token, and of so many of the likeliest tokens in its place: see
        `Generation.logprobs`. 0: of the new token alone. Not for searches and contrastive search.
    output_scores, output_logits, output_attentions, output_hidden_states : bool, default False
        What the `Generation` is to hold besides the tokens.
    **model_inputs
        Further inputs of the model (`attention_mask`, `pixel_values`, ...), and the rarer parameters of a
        `GenerationConfig`.

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


@takes(parameters, documented_by=generate)
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
    from engine.request.parameters import read

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
