"""`engine generate` with a model whose tokenizer has a chat template: a text is a user's message, unless it is raw."""

import copy
import json

import pytest
from architectures import ARCHITECTURES, randomised
from chat_templates import tokenizer_of
from encoder_decoders import tiny_encoder_decoder

import engine

TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("answers"), tokenizer_of("chatml")
    config_class, arguments = ARCHITECTURES["llama"]
    randomised(config_class, arguments | {"vocab_size": len(tokenizer)}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    return engine.Generator(folder)


def asked(text, system=None):
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]


@pytest.fixture
def said(cli, folder):
    """A function of arguments and what is piped in: the text that a command prints."""

    def run(*arguments, input=""):
        done = cli(["generate", *arguments, "--model", str(folder), "-n", str(TOKENS)], input)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize(
    "options", [(), ("--stream",), ("--cache", "static"), ("--prompt-lookup", "3"), ("--chat",)], ids=str
)
def test_a_text_is_a_users_message(said, answers, options):
    message, plain = (answers.generate(prompt, max_new_tokens=TOKENS).text[0] for prompt in (asked("hi"), "hi"))
    assert message != plain
    assert said("hi", *options) == f"{message}\n"
    assert said("--raw", "hi", *(word for word in options if word != "--chat")) == f"{plain}\n"


def test_wherever_it_comes_from(said, answers, tmp_path):
    expected = answers.generate(asked("hi"), max_new_tokens=TOKENS).text[0] + "\n"
    (tmp_path / "prompt.txt").write_text("hi")
    assert said(input="hi") == said("-", input="hi") == said("-f", str(tmp_path / "prompt.txt")) == expected
    assert said("hi", "--draft", str(engine.SHIPPED_MODEL)) == expected


def test_system_messages_and_several_prompts(said, answers):
    chats = [asked("hi", "Be brief."), asked("x = ", "Be brief.")]
    texts = answers.generate(chats, max_new_tokens=TOKENS).text
    rows = json.loads(said("hi", "x = ", "--system", "Be brief.", "--json"))["rows"]
    assert [row["text"] for row in rows] == texts


def test_a_form_begins_with_the_answer(said):
    assert said("hi", "--choice", "yes", "--choice", "no") in ("yes\n", "no\n")


@pytest.mark.parametrize("raw", [False, True])
def test_lines_are_messages_too(said, answers, tmp_path, raw):
    prompts = tmp_path / "prompts.jsonl"
    lines = ["hi", {"id": 1, "prompt": "x = ", "max_new_tokens": 2}, {"messages": asked("y")}, [3, 4, 5]]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = map(json.loads, said("-f", str(prompts), *(["--raw"] if raw else [])).splitlines())
    texts = [line["rows"][0]["text"] for line in sorted(found, key=lambda line: line["index"])]
    inputs = ["hi", "x = "] if raw else [asked("hi"), asked("x = ")]
    lengths = (TOKENS, 2, TOKENS, TOKENS)
    assert texts == [
        answers.generate(one, max_new_tokens=most).text[0]
        for one, most in zip([*inputs, asked("y"), [3, 4, 5]], lengths, strict=True)
    ]


def test_texts_of_raw_prompts_are_not_taken_for_answers(cli, said, folder, tmp_path):
    out = tmp_path / "texts.jsonl"
    said("hi", "--jsonl", str(out), "--raw")
    done = cli(["generate", "hi", "--jsonl", str(out), "--model", str(folder), "-n", str(TOKENS)])
    assert (done.exit_code, "another prompt or of other options" in done.stderr) == (2, True)


def test_a_prompt_that_a_template_has_written_is_remarked(cli, folder):
    words = ["generate", "<|im_start|>user\nhi", "--model", str(folder), "-n", "2"]
    assert "begins with <|im_start|>, and is read as a user's message: --raw" in cli(words).stderr
    assert cli([*words, "--raw"]).stderr == ""


def test_without_a_template_a_text_is_plain(cli, answers, folder, tmp_path):
    answers.model.save_pretrained(tmp_path)
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    words = ["generate", "hi", "--model", str(tmp_path), "-n", str(TOKENS)]
    assert cli(words).stdout == answers.generate("hi", max_new_tokens=TOKENS).text[0] + "\n"
    for options in (["--chat"], ["--system", "Be brief."]):
        assert "chat messages need a tokenizer with a chat_template" in cli([*words, *options]).stderr


def test_what_an_encoder_reads_is_plain(cli, tmp_path):
    model, tokenizer = copy.deepcopy(tiny_encoder_decoder("bart")), tokenizer_of("chatml")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected, other = (engine.generate(tmp_path, one, max_new_tokens=TOKENS).text[0] for one in ("hi", asked("hi")))
    assert expected != other
    assert cli(["generate", "hi", "--model", str(tmp_path), "-n", str(TOKENS)]).stdout == f"{expected}\n"
