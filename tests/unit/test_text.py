"""Tokens to text piece by piece: characters split over tokens, stop strings split over pieces."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.text import RowText

TEXTS = ["def f(x):\n    return x + 1\n", "naïve café, 漢字 🙂🙃 end", "a STOP b", "", " leading and trailing "]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_and_hold_no_half_characters(text, tokenizer):
    row = RowText(tokenizer)
    pieces = [row.push(token) for token in tokenizer(text)["input_ids"]] + [row.flush()]
    assert "".join(pieces) == row.text == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_that_never_becomes_a_character_comes_at_the_end(tokenizer):
    tokens = tokenizer("a🙂")["input_ids"][:-1]
    row = RowText(tokenizer)
    pieces = [row.push(token) for token in tokens]
    assert "".join(pieces) == "a"
    assert row.flush() == tokenizer.decode(tokens)[1:]


@pytest.mark.parametrize(
    ("stops", "expected", "stopped"),
    [
        (["return"], "def f(x):\n    ", True),
        (["x + ", "return x"], "def f(x):\n    ", True),
        ([")", "(x"], "def f", True),
        (["returns"], TEXTS[0], False),
        (["1\n\n"], TEXTS[0], False),
        (["\n"], "def f(x):", True),
    ],
)
def test_stop_strings_never_show(stops, expected, stopped, tokenizer):
    row = RowText(tokenizer, stops)
    shown = ""
    for token in tokenizer(TEXTS[0])["input_ids"]:
        shown += row.push(token)
        assert expected.startswith(shown)
        if row.stopped:
            break
    assert shown + row.flush() == row.text == expected
    assert row.stopped is stopped


@pytest.mark.parametrize("text", TEXTS[1:2] + ["def f(x):\n    return"])
def test_a_text_goes_on_from_a_prompt(text, tokenizer):
    """Wherever the prompt ends, in the middle of a character too; what it says is no stop string."""
    tokens = tokenizer(text)["input_ids"]
    for begin in range(len(tokens) + 1):
        row = RowText(tokenizer, ["def", "na"])
        shown = row.begin(tokens[:begin])
        assert text.startswith(shown)
        if begin == 0:
            continue
        pieces = [row.push(token) for token in tokens[begin:]] + [row.flush()]
        assert shown + "".join(pieces) == text
        assert not row.stopped


def test_the_first_word_after_a_prompt_keeps_its_space():
    """Where a tokenizer leaves out the space that a text begins with."""
    words = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}, unk_token="▁one"))
    words.decoder = decoders.Metaspace()
    row = RowText(PreTrainedTokenizerFast(tokenizer_object=words))
    assert row.begin([0, 1]) + row.push(2) == "one two three"


def test_after_a_stop_string_nothing_comes(tokenizer):
    row = RowText(tokenizer, ["STOP"])
    shown = "".join(map(row.push, tokenizer("a STOP b")["input_ids"]))
    assert shown + row.flush() == row.text == "a "


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("return x", ""), ("urn x + 1", ""), (" x", ""), ("+ 1", " x "), ("turn", None), ("\n    return", None)],
)
def test_a_stop_string_may_begin_in_the_prompt(stop, expected, tokenizer):
    """And has to end after it."""
    tokens = tokenizer(TEXTS[0])["input_ids"]
    begin = next(n for n in range(len(tokens)) if tokenizer.decode(tokens[:n]).endswith("return"))
    row = RowText(tokenizer, [stop], prompt=tokens[:begin])
    shown = "".join(map(row.push, tokens[begin:])) + row.flush()
    assert row.stopped is (expected is not None)
    assert shown == row.text == (" x + 1\n" if expected is None else expected)


def test_a_stop_string_may_have_a_special_token_inside(tokenizer):
    hello, end, world = tokenizer("hello")["input_ids"], tokenizer.eos_token, tokenizer(" world")["input_ids"]
    for stop, shown, stopped in (
        (f"lo{end} wo", "hel", True),
        (f"{end} w", "hello", True),
        ("hello world", "hello world", False),
    ):
        row = RowText(tokenizer, [stop])
        text = "".join(map(row.push, [*hello, tokenizer.eos_token_id, *world])) + row.flush()
        assert (text, row.stopped) == (shown, stopped)
