"""What every configuration can do: come from and go to a dict, JSON or a file, and refuse what it does not know."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from configs.errors import ConfigError

C = TypeVar("C", bound="Config")
_IN_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list",
             tuple: "a list"}  # fmt: skip


def nearest(word: str, known: Iterable[str], most: int = 24) -> str:
    """A hint for error messages: up to three known words close to `word`.

    When none is close it is all of them, or nothing at all where there are more than `most`.
    """
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(w) for w in close) + "?"
    return "known: " + ", ".join(known) if len(known) <= most else ""


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of all configurations: frozen fields, checked when built. `dict(config)` is `config.to_dict()`.

    Data types and devices are kept as strings, torch's own are taken too. Where a configuration is expected, a dict
    stands for one.
    """

    absent: ClassVar[dict[str, str]] = {}
    """Options of others that this one does not have, and why."""
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Of options that are one of a few values, those."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name in self.option_names():
            kinds = _kinds(hints[name])
            value = _kept(getattr(self, name), kinds)
            if not any(_fits(value, kind) for kind in kinds):
                expected = " or ".join(
                    "None" if kind is NoneType else getattr(kind, "__name__", str(kind)) for kind in kinds
                )
                raise ConfigError(f"{type(self).__name__}: {name}={value!r}, but it has to be {expected}")
            object.__setattr__(self, name, value)
        self.validate()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.to_dict().items())

    def validate(self) -> None:
        """Raise `ConfigError` for values that cannot work; their types are right. Nothing to check by default."""

    @classmethod
    def option_names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What every option means, as the docstrings of the class and its bases say.

        There an entry is a line `name: text` or `name, name: text`, four spaces in, and further lines below it.
        """
        found = dict.fromkeys(cls.option_names(), "")
        for kind in reversed(cls.__mro__):
            for names, text in _entries(vars(kind).get("__doc__") or ""):
                found |= {name: text for name in names.split(", ") if name in found}
        return found

    @classmethod
    def values(cls) -> dict[str, list[str]]:
        """What every option may be beside None, in words."""
        hints, found = get_type_hints(cls), {}
        for name in cls.option_names():
            kinds = [get_origin(kind) or kind for kind in _kinds(hints[name]) if kind is not NoneType]
            words = [str(value) for value in cls.choices.get(name, ())]
            found[name] = list(dict.fromkeys(words or (_IN_WORDS.get(kind, "an object") for kind in kinds)))
        return found

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Every option's default."""
        return {field.name: field.default for field in dataclasses.fields(cls)}

    @classmethod
    def from_dict(cls: type[C], data: dict[str, Any], **overrides: Any) -> C:
        """Build from a dict, `overrides` winning. An unknown key is a `ConfigError` that names the valid ones."""
        values = {**data, **overrides}
        for key in values:
            if key not in cls.option_names():
                known = cls.option_names()
                hint = cls.absent.get(key) or (nearest(key, known) if known else "it takes no options")
                raise ConfigError(f"{cls.__name__} has no option {key!r}; {hint}")
        return cls(**values)

    @classmethod
    def from_json_file(cls: type[C], path: str | Path, **overrides: Any) -> C:
        """`from_dict` of the object in a file. Every `ConfigError` names the file, and the place that is no JSON."""
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

    def update(self: C, **changes: Any) -> tuple[C, dict[str, Any]]:
        """A copy with these changes, and those of them that are no options."""
        known = {name: value for name, value in changes.items() if name in self.option_names()}
        return dataclasses.replace(self, **known), {name: changes[name] for name in changes if name not in known}

    def to_dict(self, use_diff: bool = False) -> dict[str, Any]:
        """What `from_dict` takes. use_diff: only what differs from the defaults."""
        values = {name: getattr(self, name) for name in self.option_names()}
        if use_diff:
            values = {name: value for name, value in values.items() if value != self.defaults()[name]}
        return {name: _told(value, use_diff) for name, value in values.items()}

    def to_json_string(self, use_diff: bool = False) -> str:
        return json.dumps(self.to_dict(use_diff), indent=2, sort_keys=True) + "\n"

    def to_json_file(self, path: str | Path, use_diff: bool = False) -> None:
        Path(path).write_text(self.to_json_string(use_diff))


def _told(value: Any, use_diff: bool) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Config):
        return value.to_dict(use_diff)
    return list(value) if isinstance(value, tuple) else value


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types that an annotation allows."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _kept(value: Any, kinds: tuple[Any, ...]) -> Any:
    """A value as it is kept: what stands for a configuration is built, torch's data types and devices are named."""
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    for kind in kinds:
        if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Config):
            return kind.from_dict(value)
    return value


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type; containers are looked at from outside only."""
    kind = get_origin(kind) or kind
    if kind is Any or not isinstance(kind, type):
        return True
    if isinstance(value, bool):  # an int to Python, a mistake to us
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def require_positive(owner: str, **values: int | None) -> None:
    """Raise `ConfigError` for the first value that is neither None nor at least 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{owner}: {name}={value}, but it has to be at least 1")


def _entries(docstring: str) -> Iterator[tuple[str, str]]:
    """Names and texts of the entries of a docstring, see `Config.meanings`."""
    names, lines = "", list[str]()
    for line in [*inspect.cleandoc(docstring).splitlines(), ""]:
        begins = re.match(r"([a-z_]+(?:, [a-z_]+)*): (.+)", line)
        if begins is None and names and line.startswith("    "):
            lines.append(line.strip())
            continue
        if names:
            yield names, " ".join(lines)
        names, lines = (begins[1], [begins[2]]) if begins else ("", [])
