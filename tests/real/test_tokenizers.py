"""Tokenizers of real models, from the vocabularies of llama.cpp: a stream shows what decoding the whole text gives."""

import functools
from random import Random

import pytest
from real_data import path_of
from transformers import AutoTokenizer

from engine.output.detokenizer import RowText

pytest.importorskip("gguf")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Those that transformers reads from their files in seconds: bytes of UTF-8, and pieces with bytes for other characters.
NAMES = ("deepseek-coder", "gpt-2", "llama-spm", "phi-3", "starcoder")
_MODELS = "vendor/llama.cpp/models"


@functools.cache
def tokenizer_of(name):
    folder = path_of(_MODELS, "the source distribution of llama-cpp-python")
    return AutoTokenizer.from_pretrained(folder, gguf_file=f"ggml-vocab-{name}.gguf")


def texts_of(name):
    """(text, ids) as llama.cpp tests them."""
    path = path_of(_MODELS, "the source distribution of llama-cpp-python") / f"ggml-vocab-{name}.gguf.inp"
    texts = path.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = [list(map(int, line.split())) for line in path.with_suffix(".out").read_text().split("\n")]
    return list(zip(texts, ids, strict=False))


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", NAMES)
def test_streams_of_every_length(name):
    tokenizer = tokenizer_of(name)
    for _, ids in texts_of(name):
        row, shown, whole = RowText(tokenizer), "", decoded(tokenizer, ids)
        for length, token in enumerate(ids, start=1):
            shown += row.push(token)
            text = decoded(tokenizer, ids[:length])
            assert whole.startswith(shown), ids[:length]
            # Bytes of half a character make decoders give up the characters before, which a stream has shown.
            assert text.endswith("\ufffd") or shown + row.copy().flush() == text, ids[:length]
        assert shown + row.flush() == whole


@pytest.mark.parametrize("name", NAMES)
def test_stop_strings_across_tokens(name):
    """A space before the text, which decoders leave out, may begin one, as in transformers."""
    tokenizer, draw, stopped = tokenizer_of(name), Random(0), 0
    for _, ids in texts_of(name):
        text = decoded(tokenizer, ids)
        is_hidden = bool(ids) and tokenizer.convert_ids_to_tokens(ids[0]).startswith("\u2581")
        for _ in range(4):
            begin = draw.randrange(max(1, len(text)))
            stop = text[begin : begin + draw.randint(1, 6)]
            if stop and "\ufffd" not in stop:
                row, end = RowText(tokenizer, [stop]), (" " * is_hidden + text).index(stop)
                shown = "".join(map(row.push, ids)) + row.flush()
                assert (row.stopped, shown) == (True, text[: max(0, end - is_hidden)]), (stop, ids)
                stopped += 1
    assert stopped > 100
