"""The form that a call asks of its texts: JSON schemas, regular expressions, choices, grammars."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from engine.errors import OptionError
from engine.request.call import Call

NAMES = ("response_format", "json_schema", "regex", "choices", "grammar")
# As Python's json module writes; an "x-guidance" in the schema sets others.
_SPACES: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Constraint:
    """said: the parameter that asks for it. grammar: in the words of llguidance. parse: of a complete text; None where
    the text itself is all."""

    said: str
    grammar: str
    parse: Callable[[str], Any] | None = None


def read_constraints(call: Call, prompts: int) -> tuple[Constraint | None, ...] | None:
    """What the call asks of the texts of each prompt; None if it asks nothing. Raises `OptionError`."""
    given = {name: getattr(call, name) for name in NAMES if getattr(call, name) is not None}
    if not given:
        return None
    check_installed(next(iter(given)))
    each: list[Constraint | None] = [None] * prompts
    for name, value in given.items():
        found = [_read(name, one) for one in value] if _is_per_prompt(name, value) else [_read(name, value)] * prompts
        if len(found) != prompts:
            raise OptionError(f"{name} is a list of {len(found)}, and there are {prompts} prompts: give one for each")
        for prompt, one in enumerate(found):
            if one is not None and each[prompt] is not None:
                raise OptionError(f"{each[prompt].said} and {name} both constrain prompt {prompt}: leave one out")  # type: ignore[union-attr]
            each[prompt] = one or each[prompt]
    return tuple(each) if any(each) else None


def leave_out_forced_ids(call: Call, config: GenerationConfig, options: Mapping[str, Any]) -> None:
    """Leave out tokens that a model's own settings force at the beginning or the end of a text, whatever its form.

    Raises `OptionError` for those that the call itself forces.
    """
    said = next((name for name in NAMES if getattr(call, name) is not None), None)
    if said is None:
        return
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if options.get(name) is not None:
            raise OptionError(
                f"{name}={options[name]} would break the form that {said} asks for: leave one of them out"
            )
        setattr(config, name, None)


def check_installed(name: str) -> None:
    """Raise `OptionError` without the library that constraints need. name: the parameter that asks for it."""
    try:
        import llguidance  # noqa: F401 - an extra
    except ImportError as error:
        raise OptionError(
            f"{name} needs the library llguidance, which is not installed: pip install 'kvengine[grammar]'"
        ) from error


def _is_per_prompt(name: str, value: Any) -> bool:
    """Whether there is one for each prompt; a list of texts is the choices of all of them."""
    if not isinstance(value, (list, tuple)):
        return False
    return name != "choices" or not all(isinstance(one, str) for one in value)


def _read(name: str, value: Any) -> Constraint | None:
    if value is None:
        return None
    if name == "response_format":
        return _read_format(value)
    if name == "json_schema":
        return _of_schema(name, value)
    from llguidance import LLMatcher

    if name == "choices":
        return Constraint(name, LLMatcher.grammar_from_lark(_alternatives(value)))
    convert = LLMatcher.grammar_from_regex if name == "regex" else LLMatcher.grammar_from_lark
    return Constraint(name, convert(value))


def _read_format(value: Any) -> Constraint | None:
    """`response_format` as in OpenAI's interface."""
    if is_pydantic(value):
        return _of_schema("response_format", value)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _of_schema("response_format", {"type": "object"})
    schema = value.get("json_schema")
    if kind != "json_schema" or not isinstance(schema, Mapping) or "schema" not in schema:
        raise OptionError(
            f'response_format={value!r:.120}, but it is {{"type": "text"}}, {{"type": "json_object"}} or {{"type": '
            '"json_schema", "json_schema": {"schema": ...}}'
        )
    return _of_schema("response_format", schema["schema"])


def _of_schema(name: str, value: Any) -> Constraint:
    from llguidance import LLMatcher

    parse: Callable[[str], Any] = json.loads
    if is_pydantic(value):
        value, parse = value.model_json_schema(), value.model_validate_json
    try:
        return Constraint(name, LLMatcher.grammar_from_json_schema(json.dumps(value), defaults=_SPACES), parse)
    except ValueError as error:
        raise OptionError(f"{name} is no JSON schema: {error}") from error


def _alternatives(choices: Sequence[str]) -> str:
    return "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)


def is_pydantic(value: Any) -> bool:
    """Whether it is a class of pydantic models."""
    return isinstance(value, type) and hasattr(value, "model_json_schema")
