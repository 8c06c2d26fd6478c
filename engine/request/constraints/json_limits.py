"""What a text with a JSON schema may not have though its grammar lets it: endless numbers, and strings in another
spelling, in which the grammar does not know a property's name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SIGNIFICANT_DIGITS = 17  # tell every float64 from every other one
_INTEGER_DIGITS = 20  # of every 64-bit number
_EXPONENT_DIGITS = 3
_LARGEST_EXPONENT = 308  # of a float64 with one digit before its point
_DIGITS, _NUMBER_CHARACTERS = frozenset(b"0123456789"), frozenset(b"0123456789.eE+-")
_MOST_ADDED = 2  # digits behind the limit, where the schema lets no shorter number end, as with multipleOf


class JsonPlace(Enum):
    OUTSIDE, STRING, ESCAPE, CODE, INTEGER, FRACTION, EXPONENT = (auto() for _ in range(7))


# How tokens begin that may break a limit there; elsewhere those do that have the code of a character.
_LONGER_NUMBER = re.compile(rb"(?:[eE][+-]?)?[0-9.]")
_BREAKING = dict.fromkeys((JsonPlace.INTEGER, JsonPlace.FRACTION, JsonPlace.EXPONENT), _LONGER_NUMBER) | {
    JsonPlace.ESCAPE: re.compile(rb"u."),
    JsonPlace.CODE: re.compile(rb"[0-9a-fA-F]"),
}
_HAS_CODE = re.compile(rb".*\\u.", re.DOTALL)
# Of control characters that have no letter, as \n has: the only ones that need a code.
_CODES = tuple(b"%04x" % code for code in range(32) if code not in b"\b\t\n\f\r")


class Reading(NamedTuple):
    """Where a JSON text has come to. digits: of the number or of its exponent, so far; below 0: zeros before the first
    other digit, which are not significant. size: before the point is 0 or 1, a larger digit, or several (0, 1, 2).
    exponent: its value; None below 0. code: of an escaped character, so far."""

    place: JsonPlace = JsonPlace.OUTSIDE
    digits: int = 0
    size: int = 0
    exponent: int | None = 0
    code: bytes = b""


@dataclass(frozen=True)
class JsonLimits:
    """integer: digits of a number without a fraction. significant: of one with it, and zeros before them. exponent: its
    digits."""

    integer: int = SIGNIFICANT_DIGITS
    significant: int = SIGNIFICANT_DIGITS
    exponent: int = _EXPONENT_DIGITS

    def after(self, reading: Reading, text: bytes) -> tuple[Reading, bool]:
        """The reading behind `text`, and whether all that is in it stays within the limits."""
        fits = True
        for byte in text:
            reading = _next(reading, byte)
            fits &= self._fits(reading, byte)
        return reading, fits

    def _fits(self, reading: Reading, byte: int) -> bool:
        region, digits, *_ = reading
        if region is JsonPlace.CODE:
            return any(code.startswith(reading.code) for code in _CODES)
        if region is JsonPlace.INTEGER:
            return digits <= self.integer
        if region is JsonPlace.FRACTION:  # behind the point there has to be room for a digit
            return -self.significant <= digits <= self.significant - (byte == ord("."))
        if region is not JsonPlace.EXPONENT:
            return True
        max_exponent = _LARGEST_EXPONENT - (0, 1, self.integer - 1)[reading.size]
        return digits <= self.exponent and (reading.exponent is None or reading.exponent <= max_exponent)


def json_limits(schema: object) -> JsonLimits:
    """Raises `ValueError` for a whole number of more than 64 bits that the grammar would round.

    17 significant digits and 3 of the exponent; 20 digits where whole numbers are asked for, as identifiers have
    them; more where a figure of the schema has more."""
    integer, significant = SIGNIFICANT_DIGITS, SIGNIFICANT_DIGITS
    for name, value in _entries(schema):
        if name == "type" and (value == "integer" or (isinstance(value, list) and "integer" in value)):
            integer = max(integer, _INTEGER_DIGITS)
        is_rounded = type(value) is int and not -(2**63) <= value < 2**64 and Decimal(repr(float(value))) != value
        if is_rounded and name in ("const", "enum"):
            raise ValueError(f"{name} has {value}, which a grammar of JSON rounds to {float(value)!r}")
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf"):
            integral, _, fraction = format(abs(Decimal(repr(value))), "f").partition(".")
            integer, significant = max(integer, len(integral)), max(significant, len(integral) + len(fraction))
    return JsonLimits(integer, significant)


def _entries(schema: object, name: str = "") -> Iterable[tuple[str, Any]]:
    """(name, value) of everything in it; elements of a list have the name of the list."""
    yield name, schema
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            yield from _entries(value, key)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from _entries(value, name)


def _next(reading: Reading, byte: int) -> Reading:
    """The reading behind one more byte of a JSON text."""
    region, digits, size, exponent, code = reading
    if region is JsonPlace.ESCAPE:
        return Reading(JsonPlace.CODE if byte == ord("u") else JsonPlace.STRING)
    if region is JsonPlace.CODE and len(code) < 4:
        return Reading(region, code=code + bytes([byte]))
    if region in (JsonPlace.STRING, JsonPlace.CODE):
        return Reading({ord('"'): JsonPlace.OUTSIDE, ord("\\"): JsonPlace.ESCAPE}.get(byte, JsonPlace.STRING))
    if byte == ord('"'):
        return Reading(JsonPlace.STRING)
    if region is JsonPlace.OUTSIDE or byte not in _NUMBER_CHARACTERS:
        is_digit = byte in _DIGITS
        return Reading(JsonPlace.INTEGER, int(byte != ord("0")), int(byte > ord("1"))) if is_digit else Reading()
    if byte == ord("."):
        return Reading(JsonPlace.FRACTION, digits, size)
    if byte in b"eE":
        return Reading(JsonPlace.EXPONENT, 0, size)
    if byte not in _DIGITS:  # the sign of an exponent
        return reading._replace(exponent=None) if byte == ord("-") else reading
    if region is JsonPlace.EXPONENT:
        exponent = None if exponent is None else 10 * exponent + byte - ord("0")
        return Reading(region, digits + 1, size, exponent)
    if region is JsonPlace.FRACTION and digits <= 0:
        return Reading(region, digits - 1 if byte == ord("0") else 1, size)
    return Reading(region, digits + 1, 2 if region is JsonPlace.INTEGER else size)


class JsonTokens:
    """The tokens of a vocabulary that may break a limit. library: llguidance's tokenizer."""

    def __init__(self, library: Any):
        self._library = library
        self._texts = [library.decode_bytes([token]) for token in range(library.vocab_size)]
        self._with_code = [token for token, text in enumerate(self._texts) if _HAS_CODE.match(text)]
        self._digits = [token for token, text in enumerate(self._texts) if len(text) == 1 and text[0] in _DIGITS]
        self._breaking: dict[tuple[JsonLimits, Reading], list[int]] = {}

    def breaking(self, limits: JsonLimits, reading: Reading) -> list[int]:
        """Those that break `limits` at `reading`."""
        key = limits, reading
        if key not in self._breaking:
            beginning = _BREAKING.get(reading.place)
            tokens = set(self._with_code)
            if beginning is not None:
                tokens.update(token for token, text in enumerate(self._texts) if beginning.match(text))
            texts = ((token, self._texts[token]) for token in sorted(tokens))
            self._breaking[key] = [token for token, text in texts if not limits.after(reading, text)[1]]
        return self._breaking[key]

    def allowed(self, matcher: Any, limits: JsonLimits, reading: Reading) -> bytes | bytearray:
        """A byte for each token, 0 for those that may not come next at `reading`; `matcher` says so of the schema."""
        of_schema: bytes = matcher.compute_logit_bias()
        if within := self._within(of_schema, limits, reading):
            return within
        for tokens in (tokens for count in range(_MOST_ADDED) for tokens in self._digit_runs(count + 1)):
            later = matcher.deep_copy()
            if later.try_consume_tokens(list(tokens)) < len(tokens):
                continue
            behind, _ = limits.after(reading, self._library.decode_bytes(list(tokens)))
            if self._within(later.compute_logit_bias(), limits, behind):
                return bytes(of_schema[token] if token == tokens[0] else 0 for token in range(len(of_schema)))
        return of_schema

    def _digit_runs(self, count: int) -> Iterable[tuple[int, ...]]:
        return itertools.product(self._digits, repeat=count)

    def _within(self, of_schema: bytes, limits: JsonLimits, reading: Reading) -> bytes | bytearray | None:
        """What the schema allows, without the tokens that break a limit; None where nothing is left."""
        tokens = [token for token in self.breaking(limits, reading) if of_schema[token]]
        if not tokens:
            return of_schema
        within = bytearray(of_schema)
        for token in tokens:
            within[token] = 0
        return within if within.count(0) < len(within) else None


_TOKENS: WeakKeyDictionary[object, dict[int, JsonTokens]] = WeakKeyDictionary()


def json_tokens(tokenizer: PreTrainedTokenizerBase, library: Any) -> JsonTokens:
    """Of a tokenizer of transformers and llguidance's for it. Made once: every token is spelled."""
    by_size = _TOKENS.setdefault(tokenizer, {})
    if library.vocab_size not in by_size:
        by_size[library.vocab_size] = JsonTokens(library)
    return by_size[library.vocab_size]
