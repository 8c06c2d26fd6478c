"""The base class of configurations: conversion from and to dicts and JSON, and checks of keys and types."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from configs.errors import ConfigError

C = TypeVar("C", bound="Config")
_IN_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list",
             tuple: "a list"}  # fmt: skip


def nearest(word: str, known: Iterable[str], most: int = 24) -> str:
    """A hint for error messages: up to three of the `known` words that are close to `word`.

    If none is close: all of them, or an empty text if there are more than `most`.
    """
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if close:  # beside a word with a typing error, words that share a part with it are noise
        best = difflib.SequenceMatcher(None, close[0], word).ratio()
        close = difflib.get_close_matches(word, close, n=3, cutoff=best - 0.15)
        return "did you mean " + " or ".join(repr(w) for w in close) + "?"
    return "known: " + ", ".join(known) if len(known) <= most else ""


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of all configurations: frozen fields that are checked on construction.

    Data types and devices are stored as strings; torch's objects are converted. A field that expects a configuration
    takes a dict too. `dict(config)` is `config.to_dict()`.
    """

    absent: ClassVar[dict[str, str]] = {}
    """Options of related configurations that this one lacks, with the reason for the error message."""
    choices: ClassVar[dict[str, Collection[object]]] = {}
    """The values of options that have a fixed set of them."""

    def __post_init__(self) -> None:
        for name, hints in self._option_kinds().items():
            value = _stored(getattr(self, name), hints)
            if not any(_fits(value, hint) for hint in hints):
                expected = " or ".join(
                    "None" if hint is NoneType else getattr(hint, "__name__", str(hint)) for hint in hints
                )
                raise ConfigError(f"{type(self).__name__}: {name}={value!r}, but it has to be {expected}")
            object.__setattr__(self, name, value)
        self.validate()

    def __iter__(self) -> Iterator[tuple[str, object]]:
        return iter(self.to_dict().items())

    def validate(self) -> None:
        """Raise `ConfigError` for impossible values. Types were checked before. By default every value is possible."""

    @classmethod
    @cache
    def _option_kinds(cls) -> dict[str, tuple[Any, ...]]:
        """The types that each option accepts: kept, as every call makes configurations."""
        hints = get_type_hints(cls)
        return {name: _kinds(hints[name]) for name in cls.option_names()}

    @classmethod
    def option_names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """The description of every option, from the docstrings of the class and its bases.

        An entry is a line `name: text` or `name, name: text`; its further lines are indented by four spaces.
        """
        texts = dict.fromkeys(cls.option_names(), "")
        for base in reversed(cls.__mro__):
            for names, text in _entries(vars(base).get("__doc__") or ""):
                texts |= {name: text for name in names.split(", ") if name in texts}
        return texts

    @classmethod
    def values(cls) -> dict[str, list[str]]:
        """The values that every option takes, in words; None is not listed."""
        in_words = {}
        for name, accepted in cls._option_kinds().items():
            hints = [get_origin(hint) or hint for hint in accepted if hint is not NoneType]
            words = [str(value) for value in cls.choices.get(name, ())]
            in_words[name] = list(dict.fromkeys(words or (_IN_WORDS.get(hint, "an object") for hint in hints)))
        return in_words

    @classmethod
    def defaults(cls) -> dict[str, object]:
        """The default of every option."""
        return {field.name: field.default for field in dataclasses.fields(cls)}

    @classmethod
    def from_dict(cls: type[C], data: Mapping[str, object], **overrides: object) -> C:
        """Build from a dict; `overrides` win. Raises `ConfigError` with the nearest names for an unknown key."""
        values = {**data, **overrides}
        for key in values:
            if key not in cls.option_names():
                names = cls.option_names()
                hint = cls.absent.get(key) or (nearest(key, names) if names else "it takes no options")
                raise ConfigError(f"{cls.__name__} has no option {key!r}; {hint}")
        return cls(**values)

    @classmethod
    def from_json_file(cls: type[C], path: str | Path, **overrides: object) -> C:
        """`from_dict` of a JSON file. Every `ConfigError` names the file, and the position of a syntax error."""
        try:
            data = json.loads(Path(path).read_bytes())
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path} holds {json.dumps(data):.40}, but a configuration is an object: {{...}}")
        try:
            return cls.from_dict(data, **overrides)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def update(self: C, **changes: object) -> tuple[C, dict[str, object]]:
        """A copy with these changes, and a dict of those that are not options."""
        options = {name: value for name, value in changes.items() if name in self.option_names()}
        return dataclasses.replace(self, **options), {name: changes[name] for name in changes if name not in options}

    def to_dict(self, use_diff: bool = False) -> dict[str, object]:
        """The dict that `from_dict` takes. use_diff: only values that differ from the defaults."""
        values = {name: getattr(self, name) for name in self.option_names()}
        if use_diff:
            values = {name: value for name, value in values.items() if value != self.defaults()[name]}
        return {name: _as_json(value, use_diff) for name, value in values.items()}

    def to_json_string(self, use_diff: bool = False) -> str:
        return json.dumps(self.to_dict(use_diff), indent=2, sort_keys=True) + "\n"

    def to_json_file(self, path: str | Path, use_diff: bool = False) -> None:
        Path(path).write_text(self.to_json_string(use_diff))


def _as_json(value: object, use_diff: bool) -> object:
    """A value as JSON represents it."""
    if isinstance(value, Config):
        return value.to_dict(use_diff)
    return list(value) if isinstance(value, tuple) else value


def _kinds(hint: object) -> tuple[object, ...]:
    """The types that an annotation allows."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _stored(value: object, hints: tuple[object, ...]) -> object:
    """A value as a field stores it: dicts become configurations, torch's data types and devices become strings."""
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    for hint in hints:
        if isinstance(value, dict) and isinstance(hint, type) and issubclass(hint, Config):
            return hint.from_dict(value)
    return value


def _fits(value: object, hint: object) -> bool:
    """Whether a value is of a type. The elements of containers are not checked."""
    hint = get_origin(hint) or hint
    if hint is Any or not isinstance(hint, type):
        return True
    if isinstance(value, bool):  # Python's bool is an int, but True for a number is a mistake
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def require_positive(owner: str, **values: int | None) -> None:
    """Raise `ConfigError` for the first value that is neither None nor at least 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{owner}: {name}={value}, but it has to be at least 1")


def _entries(docstring: str) -> Iterator[tuple[str, str]]:
    """(names, text) of each entry of a docstring, see `Config.meanings`."""
    names, lines = "", list[str]()
    for line in [*inspect.cleandoc(docstring).splitlines(), ""]:
        begins = re.match(r"([a-z_]+(?:, [a-z_]+)*): (.+)", line)
        if begins is None and names and line.startswith("    "):
            lines.append(line.strip())
            continue
        if names:
            yield names, " ".join(lines)
        names, lines = (begins[1], [begins[2]]) if begins else ("", [])
