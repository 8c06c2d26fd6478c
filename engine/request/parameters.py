"""The types and ranges of all parameters of a call, in one table; each value is read once, before any work."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import GenerationConfig

from engine.chats import OPTIONS
from engine.errors import OptionError
from engine.request import kinds
from engine.request.call import Call
from engine.request.kinds import Kind, WrongValue
from engine.request.parameter_hints import hint


def _generation_config(value: Any) -> GenerationConfig:
    """With all fields read. The one that was given stays as it is."""
    if isinstance(value, Mapping):
        known = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
        for name in value:
            if name not in known:
                raise WrongValue(f"has no field {name!r}; {hint(str(name), known)}")
        fields = {name: read("generation_config: " + name, one, name) for name, one in value.items()}
        try:
            return GenerationConfig(**fields)
        except (ValueError, TypeError, AttributeError) as error:
            raise WrongValue(f"has fields that contradict each other: {error}") from error
    if not isinstance(value, GenerationConfig):
        raise WrongValue
    config = copy.copy(value)
    for name in _FIELDS:
        if getattr(value, name, None) is not None:
            setattr(config, name, read("generation_config: " + name, getattr(value, name), name))
    return config


# Fields of a `GenerationConfig`. Some have a smaller range, which the strategy that uses them knows.
_FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("max_new_tokens", "max_length", "max_cache_len", "prefill_chunk_size"), kinds.POSITIVE),
    **dict.fromkeys(("min_new_tokens", "min_length", "top_k"), kinds.COUNT),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), kinds.COUNT),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "num_assistant_tokens"), kinds.INTEGER),
    **dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size"), kinds.INTEGER),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), kinds.ID),
    "eos_token_id": Kind("a token id, a list of them, or [] for no end", kinds.end_ids),
    **dict.fromkeys(("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"), kinds.SOME_IDS),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), kinds.IDS),
    **dict.fromkeys(("length_penalty", "diversity_penalty", "penalty_alpha", "guidance_scale"), kinds.FINITE),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), kinds.OVER_0),
    **dict.fromkeys(("top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"), kinds.SHARE),
    "assistant_confidence_threshold": kinds.FINITE,
    "temperature": kinds.number("a number over 0, or 0 without do_sample", 0, math.inf),
    "max_time": kinds.number("a number of seconds", -math.inf, math.inf),
    "early_stopping": Kind("True, False or 'never'", kinds.early_stopping),
    "stop_strings": Kind("a text or a list of texts", kinds.texts),
    "bad_words_ids": Kind("a list of lists of one or more token ids", kinds.id_lists),
    "sequence_bias": Kind("a dict of tuples of token ids and numbers, or a list of pairs of these", kinds.bias),
    "exponential_decay_length_penalty": Kind("a pair: the tokens before it begins, and a factor", kinds.decay),
    "watermarking_config": Kind("a watermarking configuration of transformers", kinds.watermark),
    **dict.fromkeys(("cache_implementation", "num_assistant_tokens_schedule"), kinds.TEXT),
    "cache_config": Kind("a dict of options or a CacheConfig", kinds.cache_options),
    **dict.fromkeys(
        ("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values", "token_healing"), kinds.FLAG
    ),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), kinds.FLAG),
    **dict.fromkeys(
        ("return_dict_in_generate", "disable_compile", "use_mtp", "low_memory", "is_assistant"), kinds.FLAG
    ),
}

# Fields that shape a distribution to draw from.
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}

# Those that are no fields of a `GenerationConfig`.
_OTHERS: dict[str, Kind] = {
    "tokenizer": kinds.TOKENIZER,
    "assistant_tokenizer": kinds.TOKENIZER,
    "generation_config": Kind("a GenerationConfig, or a dict of its fields", _generation_config),
    "strategy": Kind("a strategy's name, or an object with name, samples and flow()", kinds.strategy),
    "past_key_values": Kind("a cache, or a tuple of 2 or 4 tensors for each layer", kinds.past),
    "seed": kinds.SEED,
    "top_logprobs": kinds.COUNT,
    **dict.fromkeys(("trust_cache", "return_legacy_cache", "synced_gpus", "trust_remote_code", *OPTIONS), kinds.FLAG),
    **dict.fromkeys(("logits_processor", "stopping_criteria"), kinds.CALLABLES),
    "prefix_allowed_tokens_fn": Kind("something callable", kinds.constraint),
    "response_format": Kind(
        "a dict as in OpenAI's interface, or a list of one for each prompt", kinds.or_each(kinds.response_format)
    ),
    "json_schema": Kind(
        "a JSON schema as a dict or its text, a pydantic model, or a list of one for each prompt",
        kinds.or_each(kinds.schema),
    ),
    "regex": Kind("a regular expression as a text, or a list of one for each prompt", kinds.or_each(kinds.form)),
    "grammar": Kind(
        "a grammar in Lark's notation as a text, or a list of one for each prompt", kinds.or_each(kinds.form)
    ),
    "choices": Kind("a list of texts, or a list of such lists, one for each prompt", kinds.all_choices),
    "cancellation": kinds.having("is_set", words="a threading.Event, and set() it to stop the run"),
    "streamer": kinds.having("put", "end", words="a TextStreamer or another BaseStreamer of transformers"),
}
KINDS = _FIELDS | _OTHERS


def read(said: str, value: Any, name: str | None = None) -> Any:
    """The value of the parameter `name` as it is kept; None stays None. said: its name in the `OptionError`."""
    kind = KINDS.get(name or said)
    if kind is None or value is None:
        return value
    try:
        return kind.read(value)
    except WrongValue as wrong:
        more = str(wrong)
        raise OptionError(f"{said} {more}" if more else f"{said}={value!r:.120}, but it is {kind.words}") from wrong


def read_parameters(call: Call) -> Call:
    """The call with every parameter read. Raises `OptionError`."""
    own = {name: read(name, getattr(call, name)) for name in KINDS if hasattr(call, name)}
    options = {name: read(name, value) for name, value in call.options.items()}
    options.pop("trust_remote_code", None)  # about loading a model, as in transformers
    return replace(call, **own, options=options)


def read_own(config: GenerationConfig, given: GenerationConfig | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model's own configuration that a call leaves to it, read. Raises `OptionError`."""
    sources = (options.get("do_sample"), getattr(given, "do_sample", None), config.do_sample)
    draws = next((value for value in sources if value is not None), False)
    left = {name for name in _FIELDS if name not in options and getattr(given, name, None) is None}
    left -= set() if draws else SAMPLING
    found = {name: getattr(config, name, None) for name in _FIELDS if name in left}
    return {name: read(f"model.generation_config.{name}", one, name) for name, one in found.items() if one is not None}
