"""What the messages of a conversation are, how templates write them, and which are left out of a full model."""

import copy

import pytest
import torch
from chats import PLAIN, THINKING, TOKENS, check_history, check_turn, generator_of, history_of
from transformers import GenerationConfig, TextIteratorStreamer

import engine
from engine.reuse.conversation import flat


@pytest.fixture
def tokenizer(tokenizer):
    """One of its own, whose template is changed."""
    return copy.deepcopy(tokenizer)


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_a_template_that_writes_history_in_another_way(name, tokenizer):
    generator = generator_of(name, tokenizer, THINKING)
    chat = generator.chat("s", max_new_tokens=TOKENS)
    for message in ("import os", "def main():", "x", "y"):
        out = chat.send(message)
        check_turn(generator, chat, out, {})
        assert tokenizer.decode(history_of(chat)["input_ids"][0]) == tokenizer.apply_chat_template(
            list(chat.messages[:-1]), tokenize=False, add_generation_prompt=True
        )


def test_ids_are_kept_where_text_would_be_tokenized_in_another_way(tokenizer):
    generator, others = generator_of("llama", tokenizer), 0
    for seed in range(5):
        chat = generator.chat(max_new_tokens=TOKENS, do_sample=True, seed=seed, temperature=3.0)
        said = [chat.send("import os").tokens[0], chat.send("x").tokens[0]]
        ids = flat(chat._conversation.segments)
        for tokens in said:
            assert any(ids[at : at + len(tokens)] == tokens for at in range(len(ids)))
            others += tokenizer(tokenizer.decode(tokens), add_special_tokens=False)["input_ids"] != tokens
    assert others  # or this test says nothing


def test_without_a_template(tokenizer):
    generator = generator_of("llama", tokenizer, None)
    chat = generator.chat("Be brief.", max_new_tokens=TOKENS)
    chat.send("import os")
    out = chat.send("x")
    check_turn(generator, chat, out, {}, stop_strings=["\nUser:"])
    text = tokenizer.decode(history_of(chat)["input_ids"][0])
    assert text.startswith("Be brief.\n\nUser: import os\nAssistant:")
    assert text.endswith("User: x\nAssistant:")
    with pytest.raises(engine.InputError, match="no chat template, and role='tool'"):
        chat.send({"role": "tool", "content": "x"})


@pytest.mark.parametrize("template", [PLAIN, None])
def test_a_stop_string_is_no_part_of_the_conversation(template, tokenizer):
    generator = generator_of("llama", tokenizer, template)
    whole = generator.chat(max_new_tokens=12).send("import os").text[0]
    chat = generator.chat(max_new_tokens=12, stop_strings=whole[4:6])
    out = chat.send("import os")
    assert out.finish_reasons == ["stop_string"]
    assert out.text[0] == whole[: whole.index(whole[4:6])]
    chat.send("x")
    check_history(chat)


@pytest.mark.parametrize("of_model", [False, True])
def test_stop_strings_of_a_configuration_end_answers_without_a_template_too(of_model, tokenizer):
    generator = generator_of("llama", tokenizer, None)
    answer = generator.chat(max_new_tokens=12).send("import os").text[0]
    config = GenerationConfig(stop_strings=[answer[4:6]])
    if of_model:
        generator.model.generation_config.stop_strings = config.stop_strings
    given = {} if of_model else {"generation_config": config}
    out = generator.chat(max_new_tokens=12, **given).send("import os")
    assert (out.text, out.finish_reasons) == ([answer[: answer.index(answer[4:6])]], ["stop_string"])


def test_the_next_question_ends_an_answer_once(tokenizer):
    """Without a template a model goes on with it, also where other strings end an answer too."""
    # What was generated is not read again. A state cannot take back the forced token behind it: it goes on from the end
    # of the question.
    for name, most in (("llama", 12), ("mamba", 18)):
        chat = generator_of(name, tokenizer, None).chat(max_new_tokens=30, stop_strings=["STOP"])
        out = chat.send("x", regex=" fine\nUser: no", eos_token_id=0)
        assert (out.text, out.finish_reasons) == ([" fine"], ["stop_string"])
        out = chat.send("y")
        check_history(chat)
        assert out.stats.prompt_tokens <= most


def test_an_answer_without_a_word_is_taken_back(tokenizer):
    chat = generator_of("llama", tokenizer).chat(max_new_tokens=4)
    chat.send("x", regex="\n\n", eos_token_id=0)
    first = history_of(chat)["input_ids"]
    chat.retry(regex="a", eos_token_id=0)
    assert torch.equal(history_of(chat)["input_ids"], first)


def test_a_template_that_refuses_messages(tokenizer):
    chat = generator_of("llama", tokenizer, "{{ raise_exception('no system message') }}").chat("s")
    with pytest.raises(engine.InputError, match="refuses these messages: TemplateError: no system message"):
        chat.send("x")
    assert len(chat.messages) == 1


@pytest.mark.parametrize("message", [[{"role": "user", "content": "x"}], {"content": "x"}, ["x"], None, 5], ids=str)
def test_what_is_no_message_is_refused(shipped, message):
    chat = shipped.chat()
    with pytest.raises(engine.InputError, match="a message is a text or a mapping"):
        chat.send(message)
    assert chat.messages == ()
    with pytest.raises(engine.InputError, match="a system message is a text"):
        shipped.chat([{"role": "system", "content": "x"}])


def test_an_end_token_that_is_not_special_is_no_part_of_the_answer(tokenizer):
    tokenizer.add_tokens(["<|im_end|>"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    generator = generator_of("llama", tokenizer)
    chat = generator.chat(max_new_tokens=20, eos_token_id=[end], sequence_bias={(end,): 100.0}, min_new_tokens=3)
    out = chat.send("import os")
    assert out.finish_reasons == ["eos"]
    assert "<|im_end|>" not in chat.messages[-1]["content"]


def test_an_ordinary_token_that_ends_an_answer_stays_in_it(tokenizer):
    dot = tokenizer.convert_tokens_to_ids(".")
    generator = generator_of("llama", tokenizer)
    chat = generator.chat(max_new_tokens=20, eos_token_id=[dot], sequence_bias={(dot,): 100.0})
    assert chat.send("import os").text == ["."]
    assert chat.messages[-1]["content"] == "."


def test_a_chat_begins_with_the_history_of_an_application(tokenizer):
    generator = generator_of("llama", tokenizer)
    earlier = generator.chat("Be brief.", max_new_tokens=TOKENS)
    earlier.send("import os")
    chat = generator.chat(messages=list(earlier.messages), max_new_tokens=TOKENS)
    assert (chat.messages, chat.system) == (earlier.messages, "Be brief.")
    assert chat.send("def main():").text == earlier.send("def main():").text
    with_system = generator.chat("Be brief.", messages=earlier.messages[1:], max_new_tokens=TOKENS)
    assert with_system.messages == earlier.messages
    with_system.undo()
    assert with_system.messages == earlier.messages[:3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": "hi"}, "messages= is a list of mappings"),
        ({"messages": {"role": "user", "content": "hi"}}, "messages= is a list of mappings"),
        ({"messages": [{"content": "hi"}]}, "a message is a text or a mapping with 'role'"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "has no answer yet: leave it out, and send"),
        ({"system": "x", "messages": [{"role": "system", "content": "y"}]}, "the system message was given twice"),
        ({"messages": [], "resume": "file"}, "resume= brings the messages"),
        ({"when_full": "forget"}, "when_full='forget', but it is one of stop, drop"),
    ],
    ids=str,
)
def test_a_history_that_is_none_is_refused(shipped, arguments, message):
    with pytest.raises(engine.EngineError, match=message):
        shipped.chat(**arguments)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_messages_and_parameters_change_between_turns(name, tokenizer):
    generator = generator_of(name, tokenizer)
    chat, other = (generator.chat(system, max_new_tokens=TOKENS) for system in ("Be brief.", "Be long."))
    for message in ("import os", "def main():"):
        chat.send(message)
        other.send(message)
    chat.system = "Be long."
    check_turn(generator, chat, chat.send("x"), {})
    assert [one["content"] for one in chat.messages if one["role"] != "assistant"] == [
        "Be long.", "import os", "def main():", "x"
    ]  # fmt: skip
    chat.clear()
    assert (chat.messages, chat.last) == (({"role": "system", "content": "Be long."},), None)
    assert chat.send("import os").text == generator.chat("Be long.", max_new_tokens=TOKENS).send("import os").text
    chat.system = None
    assert [one["role"] for one in chat.messages] == ["user", "assistant"]
    chat.parameters |= {"max_new_tokens": 2}
    assert len(chat.send("y").tokens[0]) == 2
    with pytest.raises(engine.OptionError, match="cache cannot apply to a chat"):
        chat.parameters = {"cache": "static"}


def test_a_system_message_that_the_template_refuses_changes_nothing(tokenizer):
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    chat = generator_of("llama", tokenizer, refuses).chat(max_new_tokens=TOKENS)
    chat.send("import os")
    before = chat.messages
    with pytest.raises(engine.InputError, match="refuses these messages"):
        chat.system = "Be brief."
    assert chat.messages == before


@pytest.mark.parametrize(("name", "backend"), [("llama", "dynamic"), ("llama", "static"), ("gemma2", "dynamic")])
def test_a_full_model_goes_on_without_the_oldest_turns(name, backend, tokenizer):
    generator = generator_of(name, tokenizer)
    positions = generator.model.config.max_position_embeddings
    chat = generator.chat("Be brief.", cache=backend, max_new_tokens=TOKENS, when_full="drop")
    sent, left_out = [], []
    for number in range(12):
        sent.append(f"x{number} = 1 " * (positions // 40))
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        out = chat.send(sent[-1], streamer=streamer)
        assert "".join(streamer) == out.text[0]
        check_turn(generator, chat, out, {})
        left_out.append(chat.left_out)
    first = chat.left_out // 2
    assert 0 < first < len(sent)
    assert left_out == sorted(left_out)
    assert len(set(left_out)) < len(sent) / 2  # not with every turn
    assert chat.system == "Be brief."
    assert [one["content"] for one in chat.messages if one["role"] == "user"] == sent[first:]
    assert chat.fork().left_out == chat.left_out
    assert history_of(chat)["input_ids"].shape[1] + TOKENS - 1 <= positions


def test_a_full_model_stops_with_a_remedy(tokenizer):
    generator = generator_of("llama", tokenizer)
    positions = generator.model.config.max_position_embeddings
    long = "x = 1 " * (positions // 6)
    chat = generator.chat(max_new_tokens=TOKENS)
    chat.send(long)
    before = chat.messages
    with pytest.raises(engine.InputError, match=f"model has {positions}.*undo.. or clear.*when_full='drop'"):
        chat.send(long)
    assert (chat.messages, chat.left_out) == (before, 0)
    dropping = generator.chat(messages=before, max_new_tokens=TOKENS, when_full="drop")
    with pytest.raises(engine.InputError, match="send a shorter message, or ask for a shorter answer"):
        dropping.send(long * 3)
    assert (dropping.messages, dropping.left_out) == (before, 0)


def test_an_answer_that_was_continued_is_known_when_others_were_left_out(tokenizer):
    generator = generator_of("llama", tokenizer)
    chat = generator.chat("Be brief.", max_new_tokens=TOKENS, when_full="drop")
    chat.send("x = 1 " * 40)
    chat.send("y")
    chat.send({"role": "assistant", "content": "Sure, "})
    continued = chat.messages[-1]
    chat.send("z = 1 " * 20)
    assert chat.left_out == 2
    chat.undo()
    assert chat.messages[-1] == continued
    chat.retry()
    assert chat.messages[-1]["content"].startswith("Sure, ")
