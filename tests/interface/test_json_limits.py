"""White space and numbers of JSON texts: both have an end, and nothing valid is lost before it."""

import json
import random
import re

import pytest
import torch

pytest.importorskip("llguidance", reason="the extra grammar is not installed")
pytest.importorskip("jsonschema")

from jsonschema import Draft202012Validator
from schemas import STRATEGIES, VOCABULARY, generator, grammar_of, tokenizer

from engine.request.constraints.json_limits import JsonLimits, Reading, json_limits
from engine.request.constraints.schema import prepared

ENDLESS = {
    "range": {"type": "number", "minimum": 0.5, "maximum": 0.75},
    "exclusive": {"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.75},
    "number": {"type": "number"},
    "integer": {"type": "integer"},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 1},
    "multiple of a hundred": {"type": "integer", "multipleOf": 100, "minimum": 1},
    "anything": {},
    "object": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"],
               "additionalProperties": False},
    "list": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
    "small": {"type": "number", "minimum": 0, "maximum": 1e-22},
}  # fmt: skip


def wanting(characters):
    """A processor that likes tokens of these characters alone, the longest ones most, and else the end."""
    scores = torch.zeros(VOCABULARY)
    for token in range(VOCABULARY):
        text = tokenizer().decode([token])
        if text and set(text) <= set(characters):
            scores[token] = 50.0 + len(text)
    scores[0] = 20.0
    return [lambda ids, logits: logits * 1e-3 + scores[: logits.shape[-1]]]


@pytest.mark.parametrize(
    ("schema", "characters"),
    [*((schema, "0") for schema in ENDLESS), ("number", "1e"), ("multiple", "09"), ("anything", "9"),
     ("exclusive", "0."), ("list", "\n "), ("object", "- \t")],
)  # fmt: skip
def test_numbers_and_white_space_end_whatever_is_wanted(schema, characters):
    out = generator().generate(
        "import os\n", json_schema=ENDLESS[schema], logits_processor=wanting(characters), max_new_tokens=96
    )
    assert out.finish_reasons == ["eos"], out.text
    Draft202012Validator(ENDLESS[schema]).validate(out.parsed[0])
    assert not re.search(r"\n\s*\n|[ \t]{33}", out.text[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_numbers_end_under_every_strategy(strategy):
    options = STRATEGIES[strategy]
    if "num_assistant_tokens" in options:
        options = options | {"assistant_model": generator().model}
    out = generator().generate(
        "x = ", json_schema=ENDLESS["range"], logits_processor=wanting("0"), max_new_tokens=48, seed=1, **options
    )
    assert set(out.finish_reasons) == {"eos"}
    for text in out.text:
        assert re.fullmatch(r"0\.[0-9]{1,17}", text), text


def accepts(schema, text):
    grammar = grammar_of(json_schema=schema)
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"] + [0]
    for end in range(len(ids)):
        allowed = grammar(torch.tensor([ids[:end]], dtype=torch.long), torch.zeros(1, VOCABULARY))[0]
        if not torch.isfinite(allowed[ids[end]]):
            return False
    return True


def test_valid_numbers_stay_valid_up_to_the_limit():
    draw = random.Random(5)
    numbers = [draw.choice((1, -1)) * draw.random() * 10.0 ** draw.randint(-300, 300) for _ in range(8)]
    numbers += [0.1 + 0.2, 1e-05, 5e-324, 1.7976931348623157e308, 0.0001234567890123456, 1234567890123456.7, 0, -0.0, 7]
    for number in numbers:
        assert accepts({"type": "number"}, json.dumps(number)), number
        assert accepts({}, json.dumps([number, "00000000000000000000000000", {"0" * 30: number}])), number
    for number in (2**63 - 1, -(2**63), 2**64 - 1):
        assert accepts({"type": "integer"}, str(number))
        assert accepts({"type": ["integer", "null"]}, str(number))
    assert accepts({"const": 10**40}, str(10**40))
    for text in ("1" * 18, "0." + "1" * 18, "0." + "0" * 18 + "1", "1e1000", "1e0001", "1e309", "9.5e932", "9e308",
                 "10e308", "12345678901234567e293"):  # fmt: skip
        assert not accepts({"type": "number"}, text), text


KNOWN = {"type": "object", "properties": {"größe": {"type": "integer"}, "a\tb": {}, "c\x1f": {}}}


@pytest.mark.parametrize(
    "text",
    [r'{"gr\u00f6\u00dfe": "x"}', r'{"\u0067röße": "x"}', r'{"a\u0009b": 1}', r'{"c\u001F": 1}', r'{"x": "\u0041"}'],
)
def test_a_string_has_one_spelling(text):
    """In another one the grammar takes a property for a further one, of which it knows nothing."""
    assert not accepts(KNOWN, text)


def test_texts_that_need_a_code_have_one():
    for text in (r'{"größe": 1, "x": "a\n\u001b[0m \\u0041"}', r'{"a\tb": 1, "c\u001f": 1}', r'{"\u0000": "\\"}'):
        assert accepts(KNOWN, text), text


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"maximum": 2**53 + 3}, 2**53 + 2, 2**53 + 4),
        ({"minimum": 2**53 + 1}, 2**53 + 2, 2**53),
        ({"exclusiveMaximum": 2**60}, 2**60 - 128, 2**60),
        ({"exclusiveMinimum": -(2**60)}, -(2**60) + 128, -(2**60)),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, 2**63 - 1, 2**63),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, -(2**63) + 1024, -(2**63) - 1),
    ],
    ids=str,
)
def test_large_bounds_are_kept(schema, inside, outside):
    schema = {"type": "integer"} | schema
    assert accepts(schema, str(inside))
    assert not accepts(schema, str(outside))


def test_what_says_nothing_is_left_out_of_a_schema():
    nothing = {"uniqueItems": False, "then": {}, "minContains": 1, "unevaluatedItems": True, "minItems": 1.0}
    assert prepared({"$defs": {"a": nothing}, "items": [nothing], "const": nothing}) == {
        "$defs": {"a": {"minItems": 1}}, "items": [{"minItems": 1}], "const": nothing,
    }  # fmt: skip
    names = {"propertyNames": {"type": "string"}, "additionalProperties": {"propertyNames": {"maxLength": 3}}}
    assert prepared(names) == {"additionalProperties": {"propertyNames": {"maxLength": 3}}}
    assert prepared({"properties": {"uniqueItems": False, "if": {}}}) == {
        "properties": {"uniqueItems": False, "if": {}}
    }


@pytest.mark.parametrize(
    "text", ["[\n    1,\n    [\n        2\n    ]\n]", "[1, [2]]", "[1,[2]]", "[\n\t1,\n\t[\n\t\t2\n\t]\n]"]
)
def test_lists_may_be_written_on_lines(text):
    schema = {"type": "array"}
    assert accepts(schema, text)
    assert accepts(schema | {"x-guidance": {"whitespace_flexible": False}}, text) == (text == "[1, [2]]")
    tight = {"item_separator": ",", "key_separator": ":"}
    assert accepts(schema | {"x-guidance": tight}, text) == (text == "[1,[2]]")


def test_white_space_is_no_setting_of_other_words_for_the_library():
    assert accepts({"type": "array", "x-guidance": {"coerce_one_of": True}}, "[\n1\n]")


@pytest.mark.parametrize(
    ("text", "place"),
    [('{"a\\"1": 12', ("INTEGER", 2)), ("[0.00", ("FRACTION", -2)), ("[0.0012", ("FRACTION", 2)),
     ("[1.5e-30", ("EXPONENT", 2)), ('"123', ("STRING", 0)), ("[1.5, tru", ("OUTSIDE", 0)),
     ("[10", ("INTEGER", 2)), ("-1", ("INTEGER", 1))],
)  # fmt: skip
def test_where_a_text_has_come_to(text, place):
    reading, _ = JsonLimits().after(Reading(), text.encode())
    assert (reading.place.name, reading.digits) == place


def test_figures_of_the_schema_make_longer_numbers_possible():
    assert json_limits({"type": "number"}) == JsonLimits()
    assert json_limits({"anyOf": [{"type": "integer"}]}).integer == 20
    assert json_limits({"properties": {"a": {"minimum": 10**30}}}).integer == 31
    assert json_limits({"maximum": 1e-22}).significant > 22
    assert json_limits(True) == JsonLimits()
