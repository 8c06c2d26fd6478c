"""What every configuration can do: come from and go to a dict, JSON or a file, and refuse what it does not know."""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any, TypeVar

from configs.errors import ConfigError

C = TypeVar("C", bound="Config")


def nearest(word: str, known: list[str]) -> str:
    """A hint for error messages: the known words closest to `word`, or all of them when none is close."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(w) for w in close) + "?"
    return "known: " + ", ".join(sorted(known))


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of all configurations: frozen fields, checked when built. Data types and devices are written as strings."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise `ConfigError` when the values cannot work together. Nothing to check by default."""

    @classmethod
    def option_names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

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
                hint = nearest(key, known) if known else "it takes no options"
                raise ConfigError(f"{cls.__name__} has no option {key!r}; {hint}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def to_json_file(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json_string())

    @classmethod
    def from_json_file(cls: type[C], path: str | Path, **overrides: Any) -> C:
        return cls.from_dict(json.loads(Path(path).read_text()), **overrides)


def require_positive(owner: str, **values: int | None) -> None:
    """Raise `ConfigError` for the first value that is neither None nor at least 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{owner}: {name}={value}, but it has to be at least 1")
