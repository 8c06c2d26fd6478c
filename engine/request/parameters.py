"""The types and ranges of all parameters of a call, in one table; each value is read once, before any work."""

from __future__ import annotations

import copy
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, WatermarkingConfig
from transformers.cache_utils import Cache as TransformersCache

from caches import EngineCache
from configs import CacheConfig
from engine.errors import OptionError
from engine.request.call import Call
from engine.request.constraint import is_pydantic
from engine.request.parameter_hints import hint
from strategies import Needs
from strategies.registry import old_declaration


class _Wrong(Exception):
    """The value is none of the kind; the message, if any, says more than the kind's own words."""


@dataclass(frozen=True)
class Kind:
    """words: what a value is, to go on after "but it is". read: the value as it is kept; raises `_Wrong`."""

    words: str
    read: Callable[[Any], Any]


_LISTS = (list, tuple, set, frozenset)


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python's."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, type) else value


def _number(value: Any) -> float:
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise _Wrong
    try:
        return float(value)
    except OverflowError:
        raise _Wrong from None


def number(words: str, least: float = -sys.float_info.max, most: float = sys.float_info.max) -> Kind:
    """A float, `least` and `most` included."""

    def read(value: Any) -> float:
        if not least <= (found := _number(value)) <= most:
            raise _Wrong
        return found

    return Kind(words, read)


def integer(least: int | None = None, most: int | None = None) -> Kind:
    """An int; a float that is whole counts as one."""
    words = "a whole number" if least is None else f"a whole number, {least} or more"
    words = words if most is None else f"a whole number from {least} to {most}"

    def read(value: Any) -> int:
        value = _plain(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _Wrong
        if (least is not None and value < least) or (most is not None and value > most):
            raise _Wrong
        return value

    return Kind(words, read)


def _flag(value: Any) -> bool:
    value = _plain(value)
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise _Wrong
    return bool(value)


def _early_stopping(value: Any) -> bool | str:
    value = _plain(value)
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
        raise _Wrong
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong
    return value


def _texts(value: Any) -> str | list[str]:
    return value if isinstance(value, str) else [_text(one) for one in _sequence(value)]


def _sequence(value: Any) -> list[Any]:
    value = _plain(value)
    if not isinstance(value, _LISTS):
        raise _Wrong
    return list(value)


def _id(value: Any) -> int:
    found = _INTEGER.read(value)
    if not -(2**63) <= found < 2**63:
        raise _Wrong(f"has the token id {found}, which is no number of 64 bits")
    return found


def _ids(value: Any) -> list[int]:
    return [_id(one) for one in _sequence(value)]


def _some_ids(value: Any) -> int | list[int]:
    value = _plain(value)
    found = _ids(value) if isinstance(value, _LISTS) else _id(value)
    if found == []:
        raise _Wrong
    return found


def _end_ids(value: Any) -> int | list[int]:
    value = _plain(value)
    return [] if isinstance(value, _LISTS) and not value else _some_ids(value)


def _words(value: Any) -> list[list[int]]:
    found = [_ids(one) for one in _sequence(value)]
    if not found or not all(found):
        raise _Wrong
    return found


def _bias(value: Any) -> dict[tuple[int, ...], float]:
    pairs = list(value.items()) if isinstance(value, Mapping) else [_sequence(pair) for pair in _sequence(value)]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise _Wrong
    found = {tuple(_ids(words)): _number(bias) for words, bias in pairs}
    if () in found:
        raise _Wrong
    return found


def _decay(value: Any) -> tuple[int, float]:
    pair = _sequence(value)
    if len(pair) != 2:
        raise _Wrong
    return _id(pair[0]), _FINITE.read(pair[1])


def _watermark(value: Any) -> Any:
    if isinstance(value, dict):
        try:
            value = WatermarkingConfig.from_dict(value)
        except (TypeError, ValueError) as error:
            raise _Wrong(str(error)) from error
    if not all(callable(getattr(value, name, None)) for name in ("validate", "construct_processor")):
        raise _Wrong
    for name, kind in _WATERMARK.items():
        try:
            kind.read(getattr(value, name, 1))
        except _Wrong:
            raise _Wrong(f"has {name}={getattr(value, name)!r:.80}, but it is {kind.words}") from None
    return value


def _complete(value: Any, lacking: str, words: str) -> Any:
    """`value`, which has to be an object that lacks nothing."""
    if isinstance(value, type):
        raise _Wrong(f"is the class {value.__name__}: give {words}")
    if lacking:
        raise _Wrong(f"is a {type(value).__name__} without {lacking}: give {words}")
    return value


def having(*methods: str, words: str) -> Kind:
    """An object with these methods."""

    def read(value: Any) -> Any:
        lacking = [f"{name}()" for name in methods if not callable(getattr(value, name, None))]
        return _complete(value, " and ".join(lacking), words)

    return Kind(words, read)


_NEEDED = ("decode", "__call__", "pad_token_id", "eos_token_id", "all_special_ids", "all_special_tokens")


def _tokenizer(value: Any) -> Any:
    """One of transformers, or that of its processor."""
    if isinstance(value, str):
        raise _Wrong(f"is the text {value!r:.80}: load it first, with AutoTokenizer.from_pretrained({value!r:.80})")
    lacking = [name for name in _NEEDED if not hasattr(value, name)]
    if lacking and hasattr(value, "tokenizer"):
        return _tokenizer(value.tokenizer)
    return _complete(
        value,
        ", ".join(lacking),
        "a tokenizer of transformers, which PreTrainedTokenizerFast(tokenizer_object=...) makes of one of the package "
        "tokenizers",
    )


def _callables(value: Any) -> list[Any]:
    for one in (found := list(value) if isinstance(value, (list, tuple)) else [value]):
        if not callable(one) or isinstance(one, type):
            what = f"the class {one.__name__}: give an object of it" if isinstance(one, type) else f"{one!r:.80}"
            raise _Wrong(f"holds {what}, but all of it is called with ids and scores")
        _check_takes(one, "ids and scores")
    return found


def _constraint(value: Any) -> Any:
    if not callable(value):
        raise _Wrong
    _check_takes(value, "a row and its ids")
    return value


def _check_takes(function: Callable[..., Any], given: str) -> None:
    """Refuse a function of which it is known that it cannot be called with two arguments."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise _Wrong(f"has {name}{signature}, but it is called with {given}: {error}") from None


def _schema(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _Wrong(f"is a text that is no JSON: {error}") from error
    if not isinstance(value, (Mapping, bool)) and not is_pydantic(value):
        raise _Wrong
    return value


def _format(value: Any) -> Any:
    if not isinstance(value, Mapping) and not is_pydantic(value):
        raise _Wrong
    return value


def _form(value: Any) -> str:
    """A text that the library for grammars can take."""
    try:
        _text(value).encode()
    except UnicodeEncodeError as error:
        raise _Wrong(f"has a character that is none, at {error.start}: {value!r:.80}") from error
    return value


def _choices(value: Any) -> list[str]:
    found = [_form(one) for one in _sequence(value)]
    if not found:
        raise _Wrong("is empty: give one text or more")
    return found


def _or_each(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The value for all prompts, or a list with one, or None, for each."""

    def read_each(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return read(value)
        return [None if one is None else read(one) for one in value]

    return read_each


def _all_choices(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and value and not any(isinstance(one, str) for one in value):
        return [None if one is None else _choices(one) for one in value]
    return _choices(value)


def _strategy(value: Any) -> Any:
    is_one = isinstance(getattr(value, "name", None), str) and callable(getattr(value, "flow", None))
    if not isinstance(value, str) and (isinstance(value, type) or not is_one or not hasattr(value, "samples")):
        raise _Wrong
    if not isinstance(value, str) and (old := old_declaration(value)):
        raise _Wrong(f"is a {type(value).__name__} {old}")
    if not isinstance(needs := getattr(value, "needs", Needs()), Needs):
        raise _Wrong(f"has needs={needs!r:.80}, but they are a strategies.Needs(...)")
    return value


def _cache_options(value: Any) -> Any:
    if not isinstance(value, (Mapping, CacheConfig)) or not all(isinstance(name, str) for name in dict(value)):
        raise _Wrong
    return value


def _past(value: Any) -> Any:
    if isinstance(value, (TransformersCache, EngineCache)):
        return value
    layers = value if isinstance(value, (tuple, list)) else ()
    if not layers or not all(isinstance(layer, (tuple, list)) and len(layer) in (2, 4) for layer in layers):
        raise _Wrong
    if not all(isinstance(part, torch.Tensor) for layer in layers for part in layer):
        raise _Wrong
    return tuple(layers)


def _generation_config(value: Any) -> GenerationConfig:
    """With all fields read. The one that was given stays as it is."""
    if isinstance(value, Mapping):
        known = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
        for name in value:
            if name not in known:
                raise _Wrong(f"has no field {name!r}; {hint(str(name), known)}")
        fields = {name: read("generation_config: " + name, one, name) for name, one in value.items()}
        try:
            return GenerationConfig(**fields)
        except (ValueError, TypeError, AttributeError) as error:
            raise _Wrong(f"has fields that contradict each other: {error}") from error
    if not isinstance(value, GenerationConfig):
        raise _Wrong
    config = copy.copy(value)
    for name in _FIELDS:
        if getattr(value, name, None) is not None:
            setattr(config, name, read("generation_config: " + name, getattr(value, name), name))
    return config


_INTEGER, _POSITIVE, _COUNT = integer(), integer(1), integer(0)
_ID = Kind("a token id", _id)
_SEED = integer(-(2**63), 2**64 - 1)
_FLAG = Kind("True or False", _flag)
_TEXT = Kind("a text", _text)
_FINITE = number("a finite number")
_OVER_0 = number("a finite number over 0", math.nextafter(0, 1))
_SHARE = number("a number from 0 to 1", 0, 1)
_IDS = Kind("a list of token ids", _ids)
_SOME_IDS = Kind("a token id, a list of one or more, or None for none", _some_ids)
_CALLABLES = Kind("something callable, or a list of such", _callables)
_TOKENIZER = Kind("a tokenizer of transformers", _tokenizer)

# Fields of a `GenerationConfig`. Some have a smaller range, which the strategy that uses them knows.
_FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("max_new_tokens", "max_length", "max_cache_len", "prefill_chunk_size"), _POSITIVE),
    **dict.fromkeys(("min_new_tokens", "min_length", "top_k"), _COUNT),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), _COUNT),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "num_assistant_tokens"), _INTEGER),
    **dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size"), _INTEGER),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), _ID),
    "eos_token_id": Kind("a token id, a list of them, or [] for no end", _end_ids),
    **dict.fromkeys(("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"), _SOME_IDS),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), _IDS),
    **dict.fromkeys(("length_penalty", "diversity_penalty", "penalty_alpha", "guidance_scale"), _FINITE),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), _OVER_0),
    **dict.fromkeys(("top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"), _SHARE),
    "assistant_confidence_threshold": _FINITE,
    "temperature": number("a number over 0, or 0 without do_sample", 0, math.inf),
    "max_time": number("a number of seconds", -math.inf, math.inf),
    "early_stopping": Kind("True, False or 'never'", _early_stopping),
    "stop_strings": Kind("a text or a list of texts", _texts),
    "bad_words_ids": Kind("a list of lists of one or more token ids", _words),
    "sequence_bias": Kind("a dict of tuples of token ids and numbers, or a list of pairs of these", _bias),
    "exponential_decay_length_penalty": Kind("a pair: the tokens before it begins, and a factor", _decay),
    "watermarking_config": Kind("a watermarking configuration of transformers", _watermark),
    **dict.fromkeys(("cache_implementation", "num_assistant_tokens_schedule"), _TEXT),
    "cache_config": Kind("a dict of options or a CacheConfig", _cache_options),
    **dict.fromkeys(("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values", "token_healing"), _FLAG),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), _FLAG),
    **dict.fromkeys(("return_dict_in_generate", "disable_compile", "use_mtp", "low_memory", "is_assistant"), _FLAG),
}

# Fields of either kind of watermark.
_WATERMARK: dict[str, Kind] = {
    **dict.fromkeys(("hashing_key", "sampling_table_seed"), _SEED),
    **dict.fromkeys(("context_width", "ngram_len", "sampling_table_size", "context_history_size"), _POSITIVE),
    **dict.fromkeys(("bias", "greenlist_ratio"), _FINITE),
}

# Fields that shape a distribution to draw from.
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}

# Those that are no fields of a `GenerationConfig`.
_OTHERS: dict[str, Kind] = {
    "tokenizer": _TOKENIZER,
    "assistant_tokenizer": _TOKENIZER,
    "generation_config": Kind("a GenerationConfig, or a dict of its fields", _generation_config),
    "strategy": Kind("a strategy's name, or an object with name, samples and flow()", _strategy),
    "past_key_values": Kind("a cache, or a tuple of 2 or 4 tensors for each layer", _past),
    "seed": _SEED,
    "top_logprobs": _COUNT,
    **dict.fromkeys(("trust_cache", "return_legacy_cache", "synced_gpus", "trust_remote_code"), _FLAG),
    **dict.fromkeys(("logits_processor", "stopping_criteria"), _CALLABLES),
    "prefix_allowed_tokens_fn": Kind("something callable", _constraint),
    "response_format": Kind("a dict as in OpenAI's interface, or a list of one for each prompt", _or_each(_format)),
    "json_schema": Kind(
        "a JSON schema as a dict or its text, a pydantic model, or a list of one for each prompt", _or_each(_schema)
    ),
    "regex": Kind("a regular expression as a text, or a list of one for each prompt", _or_each(_form)),
    "grammar": Kind("a grammar in Lark's notation as a text, or a list of one for each prompt", _or_each(_form)),
    "choices": Kind("a list of texts, or a list of such lists, one for each prompt", _all_choices),
    "cancellation": having("is_set", words="a threading.Event, and set() it to stop the run"),
    "streamer": having("put", "end", words="a TextStreamer or another BaseStreamer of transformers"),
}
KINDS = _FIELDS | _OTHERS


def read(said: str, value: Any, name: str | None = None) -> Any:
    """The value of the parameter `name` as it is kept; None stays None. said: its name in the `OptionError`."""
    kind = KINDS.get(name or said)
    if kind is None or value is None:
        return value
    try:
        return kind.read(value)
    except _Wrong as wrong:
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
