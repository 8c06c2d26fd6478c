"""What the server says of tokens: their places in the text, their bytes, and the space that texts begin with."""

from functools import cache

import pytest
from architectures import VOCABULARY, tiny_model
from chat_templates import sentencepiece
from served import NAME, served

import engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@cache
def words():
    """A tokenizer as of Llama 2: a text begins with <s>, and with a space that decoding leaves out."""
    pieces = ["<unk>", "<s>", "</s>", "\u2581", *"abno12", "\u2581yes", "\u2581no", "\u25811", "yes", "no"]
    pieces += [f"<0x{byte:02X}>" for byte in "é€".encode()]
    pieces += [f"\u2581w{number}" for number in range(VOCABULARY - len(pieces))]
    template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    return sentencepiece(pieces, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template)


@pytest.fixture(scope="module")
def server():
    model = tiny_model("llama")
    model.generation_config.eos_token_id = 2
    try:
        with served(engine.Generator(model, words()), context_tokens=None) as found:
            yield found
    finally:
        model.generation_config.eos_token_id = None


def asked(server, path, **fields):
    own = {"prompt": "a b"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a b"}]}
    answer = server.http.post(path, json={"model": NAME, "max_tokens": 12} | own | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.parametrize("prompt", ["a b", "é a", [1, 4, 3, 5], [4, 5]], ids=str)
def test_offsets_are_places_in_the_text(server, prompt):
    more = {"logit_bias": {"2": -100}, "logprobs": 0, "temperature": 2, "seed": 3}
    [found] = asked(server, COMPLETIONS, prompt=prompt, echo=True, **more)
    text, logprobs = found["text"], found["logprobs"]
    begins_with_bos = isinstance(prompt, str)
    for number, (token, offset) in enumerate(zip(logprobs["tokens"], logprobs["text_offset"], strict=True)):
        if "\ufffd" in token or (number == 0 and begins_with_bos):
            continue
        assert text.startswith(token, offset) or (offset == 0 and text.startswith(token.strip()))
    assert logprobs["text_offset"][-1] + len(logprobs["tokens"][-1]) == len(text)
    [alone] = asked(server, COMPLETIONS, prompt=prompt, **more)
    assert text.endswith(alone["text"])
    shift = len(text) - len(alone["text"])
    new = alone["logprobs"]["text_offset"]
    assert [offset + shift for offset in new] == logprobs["text_offset"][-len(new) :]


def test_parts_of_characters_have_their_bytes(server):
    parts = "é€".encode()
    ids = words().convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in parts])
    for number, byte in zip(ids, parts, strict=True):
        [found] = asked(server, CHAT, logit_bias={str(number): 100}, logprobs=True, max_tokens=1)
        assert found["logprobs"]["content"][0]["bytes"] == [byte]
    with served(engine.Generator(engine.SHIPPED_MODEL)) as shipped:
        for number in shipped.gen.tokenizer("€", add_special_tokens=False)["input_ids"]:
            [found] = asked(shipped, CHAT, logit_bias={str(number): 100}, logprobs=True, max_tokens=1)
            entry = found["logprobs"]["content"][0]
            assert (entry["token"], len(entry["bytes"]), entry["bytes"][0] > 127) == ("\ufffd", 1, True)


FORMS = [
    ({"choices": [" yes", " no"]}, [" yes", " no"]),
    ({"choices": ["yes", "no"]}, ["yes", "no"]),
    ({"regex": "  [12]"}, ["  1", "  2"]),
]


@pytest.mark.parametrize(("form", "texts"), FORMS, ids=str)
def test_a_text_of_a_form_is_the_one_that_was_asked_for(server, form, texts):
    """Also where it begins with a space."""
    assert server.gen.generate("a b", max_new_tokens=12, **form).text[0] in texts
    assert "".join(chunk.text for chunk in server.gen.stream("a b", max_new_tokens=12, **form)) in texts
    both = server.gen.generate(["a b", "a b"], max_new_tokens=3, regex=["  [12]", None]).text
    alone = server.gen.generate("a b", max_new_tokens=3).text[0]
    assert both[0] in ("  1", "  2")
    assert both[1] == alone
    for path in (CHAT, COMPLETIONS):
        [found] = asked(server, path, engine=form)
        assert (found["text"] if path == COMPLETIONS else found["message"]["content"]) in texts


def test_what_a_form_cannot_say_is_refused_in_words(server):
    for options, said in (
        ({"choices": ["a\x7f"]}, None),
        ({"json_schema": {"$ref": "#"}}, "json_schema: no text can follow it"),
        ({"grammar": "start: start"}, "grammar: no text can follow it"),
    ):
        body = {"model": NAME, "prompt": "a b", "max_tokens": 12, "engine": options}
        answer = server.http.post(COMPLETIONS, json=body)
        if said is None:
            assert "lexer error" not in answer.text
        else:
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)


def test_a_request_has_as_many_texts_as_it_asks_for(server):
    """Whatever the model's own settings say."""
    own = server.gen.model.generation_config
    own.num_return_sequences, own.num_beams = 3, 3
    try:
        found = asked(server, COMPLETIONS, prompt=["a", "b"])
        assert [one["index"] for one in found] == [0, 1]
        assert len(asked(server, CHAT, n=2)) == 2
    finally:
        own.num_return_sequences, own.num_beams = None, None


def test_one_beam_is_no_search(server):
    assert len(asked(server, CHAT, n=2, engine={"num_beams": 1})) == 2
    assert asked(server, CHAT, temperature=0, engine={"num_beams": 1, "top_k": 5})


def test_contrastive_search_draws_nothing(server):
    own = server.gen.model.generation_config
    own.do_sample = True
    try:
        assert asked(server, CHAT, engine={"penalty_alpha": 0.6, "top_k": 4})
    finally:
        own.do_sample = False
