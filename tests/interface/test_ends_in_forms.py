"""End tokens that are ordinary text: in a form they are text where it can go on with them, and ends where it cannot."""

import json
import re
from functools import partial
from random import Random

import pytest
import torch
from transformers import TextStreamer

import engine

pytest.importorskip("llguidance", reason="the extra grammar is not installed")
pytest.importorskip("jsonschema")

from architectures import randomised
from covering import graded
from jsonschema import Draft202012Validator
from schemas import STRATEGIES, generator, grammar_of, model, random_schema, tokenizer

NEW = 60
PROMPT = "import os\n"


def id_of(text):
    [token] = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return token


SCHEMA = {"type": "object", "properties": {"a": {"type": "number", "minimum": 0, "maximum": 9, "multipleOf": 0.5}},
          "required": ["a"], "additionalProperties": False}  # fmt: skip
# A form, what its texts match, and the ordinary texts that are ends outside of it.
FORMS = {
    "needed in the middle": ({"regex": r"[0-9]\.[0-9]"}, r"[0-9]\.[0-9]", "."),
    "allowed at the end": ({"regex": r"[0-9]{2}\.?"}, r"[0-9]{2}\.?", "."),
    "never text": ({"regex": "[0-9]{3}"}, "[0-9]{3}", "."),
    "a choice begins with it": ({"choices": [".a", ".b.c"]}, r"\.a|\.b\.c", "."),
    "several": ({"grammar": 'start: "x" ("." | ",") ("." | ",") "y"'}, "x[.,][.,]y", ".,"),
    "of JSON": ({"json_schema": SCHEMA}, None, '"}:'),
}


def check(out, form, pattern, ends):
    for text, tokens, reason in zip(out.text, out.tokens, out.finish_reasons, strict=True):
        if reason is None:  # a search found fewer texts
            continue
        assert reason == "eos", (text, reason)
        assert tokens[-1] in ends
        assert text.strip() == tokenizer().decode(tokens[:-1]).strip()
        if pattern is None:
            assert set(json.loads(text)) == {"a"}
        else:
            assert re.fullmatch(pattern, text), text


def arguments_of(strategy):
    options = dict(STRATEGIES[strategy], max_new_tokens=NEW, seed=3)
    return options | ({"assistant_model": model(layers=1)} if strategy == "assisted" else {})


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("has_special", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", FORMS)
def test_an_end_that_is_text(form, strategy, has_special):
    asked, pattern, texts = FORMS[form]
    ends = [*([0] if has_special else []), *map(id_of, texts)]
    out = generator().generate(PROMPT, **asked, eos_token_id=ends, **arguments_of(strategy))
    check(out, form, pattern, ends)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_without_a_form_still_end_there(strategy):
    dot, prompts = id_of("."), [PROMPT, PROMPT]
    bias = {(dot,): 30.0}
    out = generator().generate(prompts, regex=[None, r"[0-9]\.[0-9]"], eos_token_id=[0, dot], sequence_bias=bias,
                               **arguments_of(strategy))  # fmt: skip
    each = len(out.text) // 2
    assert out.tokens[0] == [dot]
    assert out.finish_reasons[0] == "eos"
    for text, reason in zip(out.text[each:], out.finish_reasons[each:], strict=True):
        assert reason is None or re.fullmatch(r"[0-9]\.[0-9]", text), text


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("has_special", [True, False])
def test_a_stream_many_and_a_streamer_show_the_same(strategy, has_special):
    shown, ends = [], [id_of("."), *([0] if has_special else [])]
    given = arguments_of(strategy) | {"regex": FORMS["needed in the middle"][0]["regex"], "eos_token_id": ends}

    class Shows(TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            shown.append(text)

    out = generator().generate(PROMPT, **given)
    chunks = list(generator().stream(PROMPT, **given))
    assert "".join(chunk.text for chunk in chunks if chunk.row == 0) == out.text[0]
    [many] = generator().generate_many([PROMPT], **given)
    assert many.result().text == out.text
    streamer = Shows(tokenizer(), skip_prompt=True, skip_special_tokens=True)
    out = generator().generate([PROMPT] * 2, **given | {"regex": [given["regex"], "[a-z]{2}"]}, streamer=streamer)
    assert "".join(shown) == "\n".join(out.text)


def test_a_text_that_the_length_cuts_behind_such_a_token_has_not_ended():
    dot = id_of(".")
    for options in ({}, {"num_beams": 3}):
        out = generator().generate(
            PROMPT, regex=r"[0-9]\.[0-9]{40}", eos_token_id=[0, dot], max_new_tokens=2, **options
        )
        assert (out.tokens[0][-1], out.finish_reasons, out.text[0][-1]) == (dot, ["length"], ".")


def test_an_end_that_the_tokenizer_does_not_have():
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    large = randomised("LlamaConfig", dict(vocab_size=4136, eos_token_id=None, max_position_embeddings=64) | sizes)
    out = engine.generate(large, PROMPT, tokenizer=tokenizer(), regex="[0-9]{2}", eos_token_id=4100)
    assert (len(out.text[0]), out.tokens[0][-1], out.finish_reasons) == (2, 4100, ["eos"])


def play(seed):
    """A random schema with ordinary texts for ends: the texts are those of the special end alone, or complete ones."""
    draw, schema = Random(seed), random_schema(seed)
    ends = [0, *(id_of(text) for text in draw.sample(list('"{}[]:,.-0123456789'), 4))]
    for strategy in STRATEGIES:
        out = generator().generate(PROMPT, json_schema=schema, eos_token_id=ends, **arguments_of(strategy))
        for text, parsed, reason in zip(out.text, out.parsed, out.finish_reasons, strict=True):
            where = f"schema {seed}, {strategy}, {ends}: {text!r} ({reason})"
            assert reason in ("eos", "length", None), where
            if reason == "eos":
                assert json.loads(text) == parsed, where
                assert Draft202012Validator(schema).is_valid(parsed), where


@pytest.mark.parametrize("seed", graded(range(2), range(2, 16), range(16, 80)))
def test_random_schemas(seed):
    play(seed)


def test_states_answer_as_if_the_text_were_read_from_its_beginning():
    """What is an end is a function of the text, however it was come by."""
    draw, dot = Random(1), id_of(".")
    grammar = partial(grammar_of, ends=(0, dot), regex=r"([0-9]\.){1,3}[0-9]\.?")
    kept, digits = grammar(), [id_of(one) for one in "0123456789"]
    for _ in range(60):
        tokens = [draw.choice([draw.choice(digits), dot]) for _ in range(draw.randint(1, 9))]
        ids = torch.tensor([tokens])
        assert kept.belongs(ids).equal(grammar().belongs(ids))
        scores = torch.zeros(1, 4096)
        assert kept(ids, scores).equal(grammar()(ids, scores))
