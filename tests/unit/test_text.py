"""Tokens to text piece by piece: characters split over tokens, stop strings split over pieces."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.output.detokenizer import RowText

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


@pytest.mark.parametrize("stops", [[], ["nothing"]], ids=["plain", "stop strings"])
@pytest.mark.parametrize("decoder", [decoders.Metaspace(), None], ids=["Metaspace", "Strip"])
def test_a_word_keeps_its_space_after_a_token_that_does_not_show(decoder, stops):
    words = _words(decoder)
    for tokens in ([0, 3, 1], [0, 4, 2, 4, 4, 1, 3], [3, 0, 3, 3, 1], [4, 4]):
        row = RowText(words, stops)
        shown = "".join(map(row.push, tokens)) + row.flush()
        assert shown == row.text == words.decode(tokens, skip_special_tokens=True)


def test_the_space_at_the_beginning_is_kept_on_request():
    row = RowText(_words(), keeps_space=True)
    assert [row.push(token) for token in (2, 3, 1)] == [" three", "", " two"]


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


def _words(decoder=None):
    """A tokenizer that leaves out the space a text begins with; <end> is special, but has no role."""
    words = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2, "<s>": 3, "<end>": 4}, unk_token="▁one"))
    strip = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    words.decoder = strip if decoder is None else decoder
    words.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")


def test_a_stop_string_may_be_a_special_token_without_a_role():
    assert "<end>" not in _words().all_special_tokens
    row = RowText(_words(), ["<end>"])
    assert "".join(map(row.push, [0, 1, 4, 2])) == "one two"
    assert row.stopped


@pytest.mark.parametrize("prompt", [[0, 1], [3], []])
@pytest.mark.parametrize("stop", [" three", "three", "e"])
def test_a_stop_string_may_begin_with_the_space_that_does_not_show(prompt, stop):
    row = RowText(_words(), [stop], prompt=prompt)
    shown = row.push(2)
    assert row.stopped
    assert shown == row.text == ("thr" if stop == "e" else "")


def test_a_stop_string_may_have_the_space_between_prompt_and_text():
    row = RowText(_words(), ["wo thr"], prompt=[0, 1])
    assert (row.push(2), row.stopped) == ("", True)
    row = RowText(_words(), ["wo two"], prompt=[0, 1])
    assert row.push(2) + row.push(0) + row.flush() == row.text == "three one"


def test_a_stop_string_may_end_with_a_character_that_the_prompt_began(tokenizer):
    tokens = tokenizer("a 漢b")["input_ids"]
    whole = next(n for n in range(len(tokens)) if "漢" in tokenizer.decode(tokens[:n]))
    for stop in ("漢", " 漢", "漢b"):
        row = RowText(tokenizer, [stop], prompt=tokens[: whole - 1])
        assert "".join(map(row.push, tokens[whole - 1 :])) == ""
        assert row.stopped
    row = RowText(tokenizer, [" "], prompt=tokens[: whole - 1])
    row.push(tokens[whole - 1])
    assert not row.stopped  # the prompt said it


def test_a_stop_string_ends_a_text_though_half_a_character_follows_in_its_last_token():
    """A token may end a word and begin the next."""
    letters = ["a", "b", "bæ", "¼", "¢"]  # how bytes are written in such vocabularies
    halves = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    halves.decoder = decoders.ByteLevel()
    row = RowText(PreTrainedTokenizerFast(tokenizer_object=halves), ["ab"])
    assert (row.push(0), row.push(2), row.stopped) == ("", "", True)
