"""The JSON Schema Test Suite, draft 2020-12: a grammar accepts what is valid, and nothing else."""

import itertools
import json
import re
from collections import Counter
from random import Random

import pytest
import torch
from real_data import path_of

pytest.importorskip("llguidance", reason="the extra grammar is not installed")
pytest.importorskip("jsonschema")

from jsonschema import Draft202012Validator
from schemas import VOCABULARY, grammar_of, tokenizer

import engine

pytestmark = pytest.mark.slow

# Why a schema is refused before any work.
REFUSALS = (
    r"Unimplemented keys: \[(\"(\$dynamicRef|\$dynamicAnchor|unevaluatedItems|unevaluatedProperties|not|propertyNames|"
    r"contains|minContains|maxContains|uniqueItems|dependentSchemas|dependentRequired|if|then|else)\"(, )?)+\]",
    r"oneOf constraints are not supported",
    r"Unknown format: (idn-email|idn-hostname|iri|iri-reference|uri-reference|uri-template|regex|json-pointer|"
    r"relative-json-pointer)",
    r"Resource 'https?://.*' is not present",
    r"Unsatisfiable schema: schema is false",
    r"is no JSON schema: ValueError: Expecting object schema",  # a schema that is true or false
    r"patternProperty regexes .* are not disjoint",
    r"minProperties=\d with 0 required ones",
    r"min/maxProperties only supported when all keys",
    r"Value for 'multipleOf' has too many digits",
)


def cases(folder):
    root = path_of("json/tests", "the source distribution of jsonschema") / "draft2020-12" / folder
    for file in sorted(root.glob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            yield f"{file.stem}: {case['description']}", case["schema"], case["tests"]


def why_refused(schema):
    try:
        grammar_of(json_schema=schema)
    except engine.OptionError as error:
        return str(error)
    return None


def accepts(schema, text):
    grammar = grammar_of(json_schema=schema)
    ids = [*tokenizer()(text, add_special_tokens=False)["input_ids"], 0]
    for end, token in enumerate(ids):
        scores = grammar(torch.tensor([ids[:end]], dtype=torch.long), torch.zeros(1, VOCABULARY))
        if scores[0, token] == -torch.inf:
            return False
    return True


def writings(value):
    """As people and models write JSON."""
    yield json.dumps(value, ensure_ascii=False)
    yield json.dumps(value, ensure_ascii=False, indent=2)
    yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def other_spellings(value):
    """JSON texts of the same value that escape characters of its strings."""
    text = json.dumps(value, ensure_ascii=False)
    yield json.dumps(value)
    yield re.sub(r'(?<=")(\w)', lambda match: f"\\u{ord(match[1]):04x}" if ord(match[1]) < 2**16 else match[1], text)


def same_values(value):
    """The value with its properties in every order, and whole numbers without a fraction."""
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for entries in itertools.product(*(list(same_values(value[name])) for name in names)):
                yield dict(zip(names, entries, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*map(list, map(same_values, value))))
    else:
        yield int(value) if isinstance(value, float) and value.is_integer() else value


def verdicts(folder):
    """(name, schema, what the suite says of an instance, verdict) of every instance whose schema is not refused."""
    for name, schema, tests in cases(folder):
        if why_refused(schema) is not None:
            continue
        for test in tests:
            value, where = test["data"], f"{name}: {test['description']}"
            answers = {accepts(schema, text) for text in writings(value)}
            if test["valid"] and answers != {True}:
                another = any(accepts(schema, json.dumps(same, ensure_ascii=False)) for same in same_values(value))
                yield where, schema, "another writing" if another else "valid and refused"
            elif not test["valid"] and (True in answers or any(accepts(schema, t) for t in other_spellings(value))):
                yield where, schema, "invalid and accepted"
            else:
                yield where, schema, "right"


def test_every_schema_is_followed_or_refused_with_its_reason():
    reasons = {name: why_refused(schema) for name, schema, _ in cases("")}
    assert len(reasons) > 360
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    strange = {name: reason for name, reason in refused.items() if not any(re.search(one, reason) for one in REFUSALS)}
    print(len(reasons), "schemas,", len(refused), "refused")
    assert not strange
    assert len(refused) <= 190


def test_instances():
    found, wrong = Counter(), []
    for where, schema, verdict in verdicts(""):
        if verdict == "valid and refused" and isinstance(schema, dict) and "format" in schema:
            verdict = "a format is kept"  # to the suite it is a note
        found[verdict] += 1
        if verdict in ("valid and refused", "invalid and accepted"):
            wrong.append((where, verdict, schema))
    print(found)
    assert not wrong
    assert found["right"] > 550
    assert found["another writing"] <= 14


CALENDAR = ("leap second", "leap year", "29 days in February")
RARE = ("a quoted string with", "an IPv6-address-literal", "mixed format", "a long valid ipv6")


def test_formats():
    """Kept in their form, but not by the calendar; rare spellings are not written."""
    found = Counter()
    for where, schema, verdict in verdicts("optional/format"):
        found[verdict] += 1
        assert verdict != "invalid and accepted" or any(words in where for words in CALENDAR), (where, schema)
        assert verdict != "valid and refused" or any(words in where for words in RARE), (where, schema)
    print(found)
    assert found["right"] > 200


def drawn_text(schema, draw, most=100):
    """Tokens that the grammar allows at random, the end and brackets more often; None where there are too many."""
    grammar, text, words = grammar_of(json_schema=schema), [], tokenizer()
    ends = ('"', "}", "]", '"}', "\\")
    closing = {token for token in range(VOCABULARY) if words.decode([token]).strip() in ends} | {0}
    while len(text) < most:
        scores = grammar(torch.tensor([text], dtype=torch.long).view(1, -1), torch.zeros(1, VOCABULARY))
        allowed = (scores[0] == 0).nonzero().flatten().tolist()
        likely = [token for token in allowed if token in closing]
        token = draw.choice(likely if likely and draw.random() < 0.4 else allowed)
        if token == 0:
            return words.decode(text)
        text.append(token)
    return None


def test_texts_at_random_are_valid():
    draw, found = Random(0), Counter()
    for name, schema, _ in cases(""):
        if why_refused(schema) is not None:
            continue
        for _ in range(3):
            text = drawn_text(schema, draw)
            found["complete" if text is not None else "too long"] += 1
            assert text is None or Draft202012Validator(schema).is_valid(json.loads(text)), (name, schema, text)
    print(found)
    assert found["complete"] > 0.9 * found.total()
