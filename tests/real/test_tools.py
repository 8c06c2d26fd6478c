"""The functions of BFCL, those of real users among them: a call that is forced by its schema has the schema's form.

Run as a program it takes all of them: `python tests/real/test_tools.py`.
"""

import json
import sys
from collections import Counter

import pytest
import torch
from real_data import tools

pytest.importorskip("llguidance", reason="the extra grammar is not installed")
pytest.importorskip("jsonschema")

from jsonschema import Draft202012Validator
from schemas import VOCABULARY, generator, grammar_of, tokenizer

import engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROWS, SAMPLE = 8, 240


def call_of(tool):
    """The schema of a call of this function alone."""
    properties = {"name": {"const": tool["name"]}, "arguments": tool["parameters"]}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def closing():
    """A processor that likes what closes texts and lists: tokens at random go on for ever."""
    likes = torch.zeros(VOCABULARY)
    for token in range(VOCABULARY):
        likes[token] = 7.0 if tokenizer().decode([token]).strip() in ('"', "}", "]", '"}', '"]') else 0.0
    likes[0] = 7.0
    return lambda ids, scores: scores * 0.1 + likes


def play(functions, seed=0):
    """How the calls ended, and those that are wrong."""
    counts, wrong, closer, accepted = Counter(), [], closing(), []
    for tool in functions:
        try:
            grammar_of(json_schema=call_of(tool))
            accepted.append(tool)
        except engine.OptionError as error:
            counts[f"refused: {error}"] += 1
    for begin in range(0, len(accepted), ROWS):
        batch = accepted[begin : begin + ROWS]
        out = generator().generate(
            ["call: "] * len(batch), json_schema=[call_of(tool) for tool in batch], do_sample=True, top_k=0,
            seed=seed + begin, max_new_tokens=400, logits_processor=[closer],
        )  # fmt: skip
        for tool, text, parsed, reason in zip(batch, out.text, out.parsed, out.finish_reasons, strict=True):
            counts[reason] += 1
            if reason == "eos" and not (
                json.loads(text) == parsed and Draft202012Validator(call_of(tool)).is_valid(parsed)
            ):
                wrong.append((tool, text))
    return counts, wrong


def test_forced_calls_have_the_form_of_their_schema():
    functions = tools()
    assert len(functions) > 2000
    counts, wrong = play(functions[:: len(functions) // SAMPLE])
    print(counts)
    assert not wrong
    assert counts["eos"] > 0.95 * SAMPLE


if __name__ == "__main__":
    counts, wrong = play(tools())
    print(counts, *wrong, sep="\n")
    sys.exit(bool(wrong))
