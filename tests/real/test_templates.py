"""Chat templates of real models, from llama.cpp: what they make of messages, and what they refuse."""

import copy
import functools
import re
from collections import Counter

import pytest
from real_data import path_of
from tokenizers import AddedToken
from transformers import AutoTokenizer

import engine
from engine.chat_template import CLOSED, TemplateOptions, chat_ends, written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "its name"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}]
FUNCTION = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call12345", "type": "function", "function": FUNCTION}],
}
REPLY = {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": '{"degrees": 4}'}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


PLAIN = {
    "question": [user("Hello there")],
    "system": [{"role": "system", "content": "Be brief."}, user("Hello there")],
    "turns": [user("One?"), assistant("Yes."), user("Two?"), assistant("No."), user("Three?")],
    "begun answer": [user("One?"), assistant("Yes, bec")],
    "thoughts": [user("One?"), assistant("Yes.") | {"reasoning_content": "Hm."}, user("Two?")],
}
# A template's own words; the last are of what its author does with undefined values, lists and generators.
REASONS = (
    "TemplateError: ", "SecurityError: ", "TypeError: 'NoneType' object is not iterable", "UndefinedError: 'functions'",
    "UndefinedError: 'dict object' has no attribute", "TypeError: Object of type generator",
)  # fmt: skip
LEFT_OUT = "leaves calls out"
# Where their own templates need tools or functions, or have no end of a turn but that of the text.
WITHOUT_END = ("CohereForAI-c4ai-command-r-plus-tool_use", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
               "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "fireworks-ai-llama-3-firefunction-v2",
               "llama-cpp-rwkv-world")  # fmt: skip
_WORDS = re.compile(r"<[^<>\s'\"{}]{2,60}>|\[/?[A-Z_]{3,20}\]|\[e~\[|\]~b\]")


@functools.cache
def tokenizers():
    """By the template's name, the shipped tokenizer with what looks like a token in the texts of the template."""
    folder = path_of("vendor/llama.cpp/models/templates", "the source distribution of llama-cpp-python")
    shipped, made = AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL), {}
    for file in sorted(folder.glob("*.jinja")):
        tokenizer = copy.deepcopy(shipped)
        tokenizer.bos_token, tokenizer.chat_template = "<|bos|>", file.read_text(encoding="utf-8")
        words = set(_WORDS.findall(tokenizer.chat_template))
        for messages in PLAIN.values():
            text = outcome(tokenizer, messages)
            words.update(_WORDS.findall(text))
        tokenizer.add_tokens([AddedToken(word, special=True, normalized=False) for word in sorted(words)])
        made[file.stem] = tokenizer
    assert len(made) > 50
    return made


def outcome(tokenizer, messages, options=TemplateOptions()):  # noqa: B008 - frozen
    try:
        return written(tokenizer, messages, options)
    except engine.InputError as error:
        return f"refused: {error}"


def test_texts_are_those_of_transformers():
    counts = Counter()
    for (name, tokenizer), (case, messages) in ((one, two) for one in tokenizers().items() for two in PLAIN.items()):
        text, continues, reason = outcome(tokenizer, messages), messages[-1]["role"] == "assistant", None
        try:
            theirs = tokenizer.apply_chat_template(
                messages, tokenize=False, continue_final_message=continues, add_generation_prompt=not continues
            )
        except Exception as error:
            theirs, reason = "", f"{type(error).__name__}: {error}"
        assert text.endswith(reason) if reason else text == theirs, (name, case, text)
        assert not reason or reason.startswith(REASONS), (name, case, text)
        counts["refused" if reason else "equal"] += 1
    print(counts)
    assert counts["equal"] > 5 * counts["refused"]


def test_calls_of_tools_are_written_or_refused():
    counts = Counter()
    for name, tokenizer in tokenizers().items():
        asked = outcome(tokenizer, [user("Weather?")], TemplateOptions(more={"tools": TOOLS}))
        text = outcome(tokenizer, [user("Weather?"), CALL, REPLY], TemplateOptions(more={"tools": TOOLS}))
        if text.startswith("refused"):
            assert LEFT_OUT in text or any(reason in text for reason in REASONS), (name, text)
            counts["left out" if LEFT_OUT in text else "refused"] += 1
            continue
        assert text.count("get_weather") > asked.count("get_weather"), name
        assert "Oslo" in text, name
        assert r"\"Oslo" not in text, name
        assert "degrees" in text, name
        counts["written"] += 1
    print(counts)
    assert counts["written"] > 50


def test_the_token_that_ends_a_turn_is_found():
    for name, tokenizer in tokenizers().items():
        end = chat_ends(tokenizer, [])[1:]
        if name in WITHOUT_END:
            continue
        turns = [user("One?"), assistant("Surely."), user("Two?")]
        texts = [outcome(tokenizer, messages, CLOSED) for messages in (turns[:2], turns)]
        closing = tokenizer.convert_ids_to_tokens(end[0]) if end else tokenizer.eos_token
        after = [text.rpartition("Surely.")[2].lstrip() for text in texts]
        assert any(text.startswith(closing) for text in after), (name, closing, after)
