"""A JSON schema in the words that the grammar library takes for what they mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import OptionError

_ONE = ("additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames", "unevaluatedItems",
        "unevaluatedProperties")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_EXACT = 2**53  # up to here a float64 has all whole numbers
_INT64 = 2**63
_LEAST_INTEGER = -_INT64 + 1024  # a float64; the library fails at the one below


def prepared(schema: Any) -> Any:
    """The schema without keywords that say nothing, which the library would refuse, and with bounds that it keeps.

    Raises `OptionError` for what it would take for something else."""
    if not isinstance(schema, Mapping):
        return schema
    inner = {name: _prepared_entry(name, value) for name, value in schema.items()}
    inner = {name: value for name, value in inner.items() if not _says_nothing(name, value, inner)}
    for name in _COUNTS:
        if isinstance(value := inner.get(name), float) and value.is_integer():
            inner[name] = int(value)
    _check_properties(inner)
    return _with_bounds(inner)


def _prepared_entry(name: str, value: Any) -> Any:
    if name in _BY_NAME and isinstance(value, Mapping):
        return {key: prepared(entry) for key, entry in value.items()}
    if name in _LISTS and isinstance(value, list | tuple):
        return [prepared(entry) for entry in value]
    return prepared(value) if name in _ONE else value


def _says_nothing(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if name in ("then", "else"):
        return "if" not in schema
    if name in ("minContains", "maxContains"):
        return "contains" not in schema
    if name == "if":
        return schema.keys().isdisjoint(("then", "else"))
    if name in ("unevaluatedItems", "unevaluatedProperties", "propertyNames"):
        return value is True or value == {} or (name, value) == ("propertyNames", {"type": "string"})
    return name == "uniqueItems" and value is False


def _check_properties(schema: Mapping[str, Any]) -> None:
    """Keys that the schema does not name may come twice, and count once."""
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    if isinstance(least, int) and isinstance(required, list | tuple) and least > len(required) + 1:
        raise OptionError(
            f"minProperties={least} with {len(required)} required ones cannot be kept, because a key that is not named "
            "in the schema may come twice and counts once: name those that have to come in `required`"
        )


def _with_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Bounds that no float64 has, as the library keeps them: those of the nearest one within."""
    _round_bound(schema, "minimum", "exclusiveMinimum", max, math.inf)
    _round_bound(schema, "maximum", "exclusiveMaximum", min, -math.inf)
    least, most = schema.get("minimum", 0), schema.get("maximum", 0)
    if least >= _INT64 or most < -_INT64:
        raise OptionError(f"the bound {max(least, -most)} has more than the 64 bits that a grammar of JSON keeps")
    if "number" not in schema.get("type", "number") and least < _LEAST_INTEGER:
        schema["minimum"] = _LEAST_INTEGER
    return schema


def _round_bound(
    schema: dict[str, Any], name: str, exclusive: str, tightest: Callable[[Any, Any], Any], inwards: float
) -> None:
    for keyword in (name, exclusive):
        bound = schema.get(keyword)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not _EXACT < abs(bound) < math.inf:
            continue
        try:
            rounded = float(bound)
        except OverflowError:
            continue
        is_outside = rounded != bound and (rounded < bound) == (inwards > 0)
        if is_outside or (keyword == exclusive and rounded == bound):
            rounded = math.nextafter(rounded, inwards)
        del schema[keyword]
        schema[name] = tightest(schema.get(name, rounded), int(rounded))
