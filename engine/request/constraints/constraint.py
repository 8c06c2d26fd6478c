"""The form that a call asks of its texts: JSON schemas, regular expressions, choices, grammars."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from engine.errors import OptionError
from engine.readers import is_pydantic
from engine.request.call import Call
from engine.request.constraints.json_limits import JsonLimits, json_limits
from engine.request.constraints.schema import prepared

NAMES = ("response_format", "json_schema", "regex", "choices", "grammar")
# Between tokens of JSON a blank, or a line break with its indentation. Small models close a list at once that they may
# not begin on a new line, and white space without end would take all tokens.
_PRETTY: Any = {"whitespace_pattern": r"\n[ \t]{0,32}| "}
# As Python's json module writes. An "x-guidance" in the schema asks for it, or sets other separators.
_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_WRITING = {*_PRETTY, *_COMPACT}


@dataclass(frozen=True)
class Constraint:
    """said: the parameter that asks for it. grammar: in the words of llguidance. parse: of a complete text; None where
    the text itself is all. json_limits: of JSON texts."""

    said: str
    grammar: str
    parse: Callable[[str], object] | None = None
    json_limits: JsonLimits | None = None


def read_constraints(call: Call, prompts: int) -> tuple[Constraint | None, ...] | None:
    """What the call asks of the texts of each prompt; None if it asks nothing. Raises `OptionError`."""
    asked = {name: getattr(call, name) for name in NAMES if getattr(call, name) is not None}
    if not asked:
        return None
    merged: list[Constraint | None] = [None] * prompts
    for name, value in asked.items():
        constraints = (
            [_read(name, entry) for entry in value] if _is_per_prompt(name, value) else [_read(name, value)] * prompts
        )
        if len(constraints) != prompts:
            raise OptionError(
                f"{name} is a list of {len(constraints)}, and there are {prompts} prompts: give one for each"
            )
        for prompt, constraint in enumerate(constraints):
            if constraint is not None and merged[prompt] is not None:
                raise OptionError(f"{merged[prompt].said} and {name} both constrain prompt {prompt}: leave one out")  # type: ignore[union-attr]
            merged[prompt] = constraint or merged[prompt]
    return tuple(merged) if any(merged) else None


_OF_ANY_FORM = (
    "forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens", "no_repeat_ngram_size",
    "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip


def leave_out_own_settings(call: Call, config: GenerationConfig, parameter: str) -> None:
    """Remove from `config` the model's own settings that force or forbid tokens: with the form, no text might be left.

    What the call itself says stays, and is refused where it forces a token. parameter: the one that asks for a form.
    """
    for name in _OF_ANY_FORM:
        value = call.options.get(name)
        value = getattr(call.generation_config, name, None) if value is None else value
        if value is None:
            setattr(config, name, None)
        elif name.startswith("forced"):
            raise OptionError(f"{name}={value} would break the form that {parameter} asks for: leave one of them out")


def check_installed(name: str) -> None:
    """Raise `OptionError` without the library that constraints need. name: the parameter that asks for it."""
    try:
        import llguidance  # noqa: F401 - an extra
    except ImportError as error:
        raise OptionError(
            f"{name} needs the library llguidance, which is not installed: pip install 'kvengine[grammar]'"
        ) from error


def _is_per_prompt(name: str, value: object) -> bool:
    """Whether there is one for each prompt; a list of texts is the choices of all of them."""
    if not isinstance(value, (list, tuple)):
        return False
    return name != "choices" or not all(isinstance(choice, str) for choice in value)


def _read(name: str, value: Any) -> Constraint | None:
    if value is None or (name == "response_format" and not is_pydantic(value) and value.get("type") == "text"):
        return None
    check_installed(name)
    if name == "response_format":
        return _read_format(value)
    if name == "json_schema":
        return _of_schema(name, value)
    from llguidance import LLMatcher

    if name == "choices":
        return Constraint(name, LLMatcher.grammar_from_lark(_alternatives(value)))
    convert = LLMatcher.grammar_from_regex if name == "regex" else LLMatcher.grammar_from_lark
    return Constraint(name, convert(value))


def _read_format(value: Any) -> Constraint:
    """`response_format` as in OpenAI's interface."""
    if is_pydantic(value):
        return _of_schema("response_format", value)
    format_type = value.get("type")
    if unknown := set(value) - {"type", "json_schema" if format_type == "json_schema" else "type"}:
        raise OptionError(
            f"response_format has {', '.join(map(str, unknown))}, which {format_type!r:.40} does not take"
        )
    if format_type == "json_object":
        return _of_schema("response_format", {"type": "object"})
    schema = value.get("json_schema")
    if format_type != "json_schema" or not isinstance(schema, Mapping) or "schema" not in schema:
        raise OptionError(
            f'response_format={value!r:.120}, but it is {{"type": "text"}}, {{"type": "json_object"}} or {{"type": '
            '"json_schema", "json_schema": {"schema": ...}}'
        )
    if unknown := set(schema) - {"name", "description", "schema", "strict"}:
        raise OptionError(f"response_format: json_schema has {', '.join(map(str, unknown))}, which is unknown here")
    return _of_schema("response_format", schema["schema"])


def _of_schema(name: str, value: Any) -> Constraint:
    from llguidance import LLMatcher

    parse: Callable[[str], object] = json.loads
    try:
        if is_pydantic(value):
            value, parse = _closed(value.model_json_schema()), value.model_validate_json
        asked = value.get("x-guidance") if isinstance(value, Mapping) else None
        writing = _COMPACT if isinstance(asked, Mapping) and not _WRITING.isdisjoint(asked) else _PRETTY
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(prepared(value)), defaults=writing)
        return Constraint(name, grammar, parse, json_limits(value))
    except OptionError as error:
        raise OptionError(f"{name}: {error}") from error
    except Exception as error:  # pydantic has errors of its own
        raise OptionError(f"{name} is no JSON schema: {type(error).__name__}: {error}") from error


def _closed(schema: object) -> object:
    """A model's schema, whose objects have no other properties unless the model allows them."""
    if isinstance(schema, list):
        return [_closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(entry) for name, entry in schema.items()}
    is_object = schema.get("type") == "object" and not schema.keys().isdisjoint(("properties", "patternProperties"))
    return {"additionalProperties": False} | closed if is_object else closed


def _alternatives(choices: Sequence[str]) -> str:
    texts = (json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f") for choice in choices)
    return "start: " + " | ".join(texts)
