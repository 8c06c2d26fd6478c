"""How values of parameters are read, and what they are in words.

What takes time is imported by the readers that need it: the table of parameters is there before torch.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from configs import CacheConfig


class WrongValue(Exception):
    """The reader takes no such value; the message, if any, says more than the reader's own words."""


@dataclass(frozen=True)
class Reader:
    """words: what a value is, to go on after "but it is". read: the value as it is kept; raises `WrongValue`.

    scalar: the type of a value in text or JSON: int, float, bool or str; None where it has another. least, most: of a
    number.
    """

    words: str
    read: Callable[[Any], Any]
    scalar: type | None = None
    least: float | None = None
    most: float | None = None


_LISTS = (list, tuple, set, frozenset)


def _plain(value: object) -> object:
    """Numbers and arrays of numpy and torch as Python's."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, type) else value


def _number(value: object) -> float:
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise WrongValue
    try:
        return float(value)
    except OverflowError:
        raise WrongValue from None


def number(words: str, minimum: float = -sys.float_info.max, maximum: float = sys.float_info.max) -> Reader:
    """A float, `minimum` and `maximum` included."""

    def read(value: object) -> float:
        if not minimum <= (converted := _number(value)) <= maximum:
            raise WrongValue
        return converted

    return Reader(words, read, float, minimum, maximum)


def integer(minimum: int | None = None, maximum: int | None = None) -> Reader:
    """An int; a float that is whole counts as one."""
    words = "a whole number" if minimum is None else f"a whole number, {minimum} or more"
    words = words if maximum is None else f"a whole number from {minimum} to {maximum}"

    def read(value: object) -> int:
        value = _plain(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise WrongValue
        if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
            raise WrongValue
        return value

    return Reader(words, read, int, minimum, maximum)


def _flag(value: object) -> bool:
    value = _plain(value)
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise WrongValue
    return bool(value)


def early_stopping(value: object) -> bool | str:
    value = _plain(value)
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
        raise WrongValue
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise WrongValue
    return value


def texts(value: object) -> str | list[str]:
    return value if isinstance(value, str) else [_text(text) for text in _sequence(value)]


def _sequence(value: object) -> list[object]:
    value = _plain(value)
    if not isinstance(value, _LISTS):
        raise WrongValue
    return list(value)


def token_id(value: object) -> int:
    token = INTEGER.read(value)
    if not -(2**63) <= token < 2**63:
        raise WrongValue(f"has the token id {token}, which is no number of 64 bits")
    return token


def _ids(value: object) -> list[int]:
    return [token_id(token) for token in _sequence(value)]


def _some_ids(value: object) -> int | list[int]:
    value = _plain(value)
    ids = _ids(value) if isinstance(value, _LISTS) else token_id(value)
    if ids == []:
        raise WrongValue
    return ids


def end_ids(value: object) -> int | list[int]:
    value = _plain(value)
    return [] if isinstance(value, _LISTS) and not value else _some_ids(value)


def id_lists(value: object) -> list[list[int]]:
    lists = [_ids(ids) for ids in _sequence(value)]
    if not lists or not all(lists):
        raise WrongValue
    return lists


def bias(value: object) -> dict[tuple[int, ...], float]:
    pairs = list(value.items()) if isinstance(value, Mapping) else [_sequence(pair) for pair in _sequence(value)]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise WrongValue
    biases = {tuple(_ids(words)): _number(bias) for words, bias in pairs}
    if () in biases:
        raise WrongValue
    return biases


def decay(value: object) -> tuple[int, float]:
    pair = _sequence(value)
    if len(pair) != 2:
        raise WrongValue
    return token_id(pair[0]), FINITE.read(pair[1])


def watermark(value: object) -> object:
    from transformers import WatermarkingConfig

    if isinstance(value, dict):
        try:
            value = WatermarkingConfig.from_dict(value)
        except (TypeError, ValueError) as error:
            raise WrongValue(str(error)) from error
    if not all(callable(getattr(value, name, None)) for name in ("validate", "construct_processor")):
        raise WrongValue
    for name, reader in _WATERMARK.items():
        try:
            reader.read(getattr(value, name, 1))
        except WrongValue:
            raise WrongValue(f"has {name}={getattr(value, name)!r:.80}, but it is {reader.words}") from None
    return value


def _complete(value: object, lacking: str, words: str) -> object:
    """`value`, which has to be an object that lacks nothing."""
    if isinstance(value, type):
        raise WrongValue(f"is the class {value.__name__}: give {words}")
    if lacking:
        raise WrongValue(f"is a {type(value).__name__} without {lacking}: give {words}")
    return value


def having(*methods: str, words: str) -> Reader:
    """An object with these methods."""

    def read(value: object) -> object:
        lacking = [f"{name}()" for name in methods if not callable(getattr(value, name, None))]
        return _complete(value, " and ".join(lacking), words)

    return Reader(words, read)


_NEEDED = ("decode", "__call__", "pad_token_id", "eos_token_id", "all_special_ids", "all_special_tokens")


def _tokenizer(value: object) -> object:
    """One of transformers, or that of its processor."""
    if isinstance(value, str):
        raise WrongValue(f"is the text {value!r:.80}: load it first, with AutoTokenizer.from_pretrained({value!r:.80})")
    lacking = [name for name in _NEEDED if not hasattr(value, name)]
    if lacking and hasattr(value, "tokenizer"):
        return _tokenizer(value.tokenizer)
    return _complete(
        value,
        ", ".join(lacking),
        "a tokenizer of transformers, which PreTrainedTokenizerFast(tokenizer_object=...) makes of one of the package "
        "tokenizers",
    )


def _callables(value: Any) -> list[object]:
    for function in (functions := list(value) if isinstance(value, (list, tuple)) else [value]):
        if not callable(function) or isinstance(function, type):
            is_class = isinstance(function, type)
            description = f"the class {function.__name__}: give an object of it" if is_class else f"{function!r:.80}"
            raise WrongValue(f"holds {description}, but all of it is called with ids and scores")
        _check_takes(function, "ids and scores")
    return functions


def constraint(value: object) -> object:
    if not callable(value):
        raise WrongValue
    _check_takes(value, "a row and its ids")
    return value


def _check_takes(function: Callable[..., object], arguments: str) -> None:
    """Refuse a function of which it is known that it cannot be called with two arguments."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise WrongValue(f"has {name}{signature}, but it is called with {arguments}: {error}") from None


def is_pydantic(value: object) -> bool:
    """Whether it is a class of pydantic models."""
    return isinstance(value, type) and hasattr(value, "model_json_schema")


def schema(value: object) -> object:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise WrongValue(f"is a text that is no JSON: {error}") from error
    if not isinstance(value, (Mapping, bool)) and not is_pydantic(value):
        raise WrongValue
    return value


def response_format(value: object) -> object:
    if not isinstance(value, Mapping) and not is_pydantic(value):
        raise WrongValue
    return value


def form(value: Any) -> str:
    """A text that the library for grammars can take."""
    try:
        _text(value).encode()
    except UnicodeEncodeError as error:
        raise WrongValue(f"has a character that is none, at {error.start}: {value!r:.80}") from error
    return value


def choices(value: object) -> list[str]:
    options = [form(text) for text in _sequence(value)]
    if not options:
        raise WrongValue("is empty: give one text or more")
    return options


def or_each(words: str, read_value: Callable[[object], object]) -> Reader:
    """A value for all prompts, or a list with one, or None, for each."""

    def read_each(value: object) -> object:
        if not isinstance(value, (list, tuple)):
            return read_value(value)
        return [None if entry is None else read_value(entry) for entry in value]

    return Reader(f"{words} or a list of one for each prompt", read_each)


def all_choices(value: object) -> object:
    if isinstance(value, (list, tuple)) and value and not any(isinstance(entry, str) for entry in value):
        return [None if entry is None else choices(entry) for entry in value]
    return choices(value)


def strategy(value: object) -> object:
    from strategies import Needs

    is_one = isinstance(getattr(value, "name", None), str) and callable(getattr(value, "flow", None))
    if not isinstance(value, str) and (isinstance(value, type) or not is_one or not hasattr(value, "samples")):
        raise WrongValue
    if not isinstance(needs := getattr(value, "needs", Needs()), Needs):
        raise WrongValue(f"has needs={needs!r:.80}, but they are a strategies.Needs(...)")
    return value


def cache_options(value: object) -> object:
    if not isinstance(value, (Mapping, CacheConfig)) or not all(isinstance(name, str) for name in dict(value)):
        raise WrongValue
    return value


def past(value: object) -> object:
    import torch
    from transformers.cache_utils import Cache as TransformersCache

    from caches import EngineCache

    if isinstance(value, (TransformersCache, EngineCache)):
        return value
    layers = value if isinstance(value, (tuple, list)) else ()
    if not layers or not all(isinstance(layer, (tuple, list)) and len(layer) in (2, 4) for layer in layers):
        raise WrongValue
    if not all(isinstance(tensor, torch.Tensor) for layer in layers for tensor in layer):
        raise WrongValue
    return tuple(layers)


INTEGER, POSITIVE, COUNT = integer(), integer(1), integer(0)
ID = Reader("a token id", token_id)
SEED = integer(-(2**63), 2**64 - 1)
FLAG = Reader("True or False", _flag, bool)
TEXT = Reader("a text", _text, str)
FINITE = number("a finite number")
OVER_0 = number("a finite number over 0", math.nextafter(0, 1))
SHARE = number("a number from 0 to 1", 0, 1)
TEMPERATURE = number("a number over 0, or 0 without do_sample", 0, math.inf)
SECONDS = number("a number of seconds", -math.inf, math.inf)
IDS = Reader("a list of token ids", _ids)
SOME_IDS = Reader("a token id, a list of one or more, or None for none", _some_ids)
CALLABLES = Reader("something callable, or a list of such", _callables)
TOKENIZER = Reader("a tokenizer of transformers", _tokenizer)

# Fields of either kind of watermark.
_WATERMARK: dict[str, Reader] = {
    **dict.fromkeys(("hashing_key", "sampling_table_seed"), SEED),
    **dict.fromkeys(("context_width", "ngram_len", "sampling_table_size", "context_history_size"), POSITIVE),
    **dict.fromkeys(("bias", "greenlist_ratio"), FINITE),
}
