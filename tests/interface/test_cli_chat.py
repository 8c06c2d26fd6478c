"""`engine chat` and `engine cache inspect`, as they are typed."""

import json
import os
import re
import shutil
import signal
import sys
import time

import demo
import pytest
from helpers import Terminal

import caches
import engine
from engine.cli.commands import chat as chat_command


def test_a_conversation(cli, tmp_path):
    path = tmp_path / "talk"
    typed = f'import os\n/stats\n"""def f(x):\n    return"""\n/undo\nx \\\n= 1\n/save {path}\n/cache offloaded\ny\n'
    done = cli(["chat", "-n", "4", "--system", "# code"], typed)
    generator = engine.Generator(engine.SHIPPED_MODEL)
    chat = generator.chat("# code", max_new_tokens=4)
    answers = [chat.send(message).text[0] for message in ("import os", "def f(x):\n    return")]
    chat.undo()
    answers += [chat.send(message).text[0] for message in ("x \n= 1", "y")]
    assert (done.exit_code, done.stdout) == (0, "".join(f"{answer}\n" for answer in answers))
    assert "time to first token" in done.stderr
    assert f"saved to {path}: the conversation has 5 messages, " in done.stderr
    assert "cache: offloaded" in done.stderr
    assert "error" not in done.stderr
    said = json.loads(cli(["cache", "inspect", str(path), "--json"]).stdout)
    assert [one["content"] for one in said["notes"]["messages"]][:2] == ["# code", "import os"]
    assert said["notes"]["messages"][3]["content"] == "x \n= 1"
    shown = cli(["cache", "inspect", str(path)]).stdout
    assert "tokens per row" in shown
    assert "messages" in shown
    again = cli(["chat", "--resume", str(path), "-n", "4"], "y\n/stats\n")
    assert again.stdout == f"{answers[-1]}\n"
    loaded = cli(["chat", "-n", "4"], f"/load {path}\ny\n")
    assert loaded.stdout == f"{answers[-1]}\n"


def test_wrong_arguments_end_it_before_the_first_message(cli):
    for arguments, message in ((["--cache", "statik"], "no cache named 'statik'"), (["--set", "a=1"], "no input 'a'")):
        done = cli(["chat", *arguments], "import os\n")
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert message in done.stderr


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ('"""/undo"""\n"""\n/help\n"""\n', ["/undo", "\n/help\n"]),
        ("import os\\\n", ["import os"]),
        ("import \\\nos\\", ["import \nos"]),
        ('"""def f(x):\n    return', ["def f(x):\n    return"]),
    ],
    ids=["a block is no command", "a line that goes on", "and again", "an open block"],
)
def test_what_was_typed_is_answered(cli, typed, messages):
    """Also where the input ends within a message."""
    chat = engine.Generator(engine.SHIPPED_MODEL).chat(max_new_tokens=4)
    answers = [chat.send(message).text[0] for message in messages]
    done = cli(["chat", "-n", "4"], typed)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "".join(f"{answer}\n" for answer in answers), "")


def test_another_answer_is_sampled_unless_an_option_says_how(cli):
    generator = engine.Generator(engine.SHIPPED_MODEL)
    chat = generator.chat(max_new_tokens=8, seed=3)
    first, other = chat.send("import os").text[0], chat.retry(do_sample=True).text[0]
    assert first != other
    named = [("--temperature", "0"), ("--num-beams", "1"), ("--strategy", "greedy"), ("--set", "strategy=greedy")]
    for options, again in [((), other), *((options, first) for options in named)]:
        done = cli(["chat", "-n", "8", "--seed", "3", *options], "import os\n/retry\n")
        assert done.stdout == f"{first}\n{again}\n", options


SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}


@pytest.mark.parametrize(
    ("own", "options", "chosen"),
    [
        ({}, [], SAMPLED),
        ({}, ["--top-p", "0.5"], SAMPLED | {"top_p": 0.5}),
        ({"temperature": 0.6}, [], {"do_sample": True}),
        ({"do_sample": True}, ["--top-k", "5"], {"do_sample": True, "top_k": 5}),
        ({"do_sample": False}, [], {}),
        ({"num_beams": 2}, [], {}),
        ({}, ["--temperature", "0"], {"do_sample": False}),
        ({}, ["--num-beams", "2"], {"num_beams": 2}),
        ({}, ["--strategy", "greedy"], {"strategy": "greedy"}),
    ],
    ids=str,
)
def test_answers_are_sampled_where_nothing_says_how_tokens_are_chosen(cli, tmp_path, own, options, chosen):
    """own: the model's settings."""
    for file in engine.SHIPPED_MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    settings = tmp_path / "generation_config.json"
    settings.unlink()
    settings.write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1} | own))
    done = cli(["chat", "--model", str(tmp_path), "-n", "8", "--seed", "3", *options], "/set\nimport os\n")
    line = done.stderr.splitlines()[0]
    shown = dict(pair.split("=") for pair in line.removeprefix("parameters: ").split(", "))
    parameters = {"max_new_tokens": 8, "seed": 3} | chosen
    assert {name: json.loads(value) if name != "strategy" else "greedy" for name, value in shown.items()} == parameters
    chat = engine.Generator(tmp_path).chat(**parameters)
    assert done.stdout == f"{chat.send('import os').text[0]}\n"


def test_what_is_reset_is_sampled_again(cli, tmp_path):
    shutil.copytree(engine.SHIPPED_MODEL, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text("{}")
    done = cli(["chat", "--model", str(tmp_path / "model")], "/set do_sample false\n/set do_sample none\n")
    assert done.stderr.splitlines() == [
        "parameters: do_sample=false, max_new_tokens=512",
        "parameters: do_sample=true, temperature=0.7, top_p=0.9, max_new_tokens=512",
    ]


def test_a_max_length_is_not_raised_by_the_default(cli):
    answer = engine.Generator(engine.SHIPPED_MODEL).chat(max_length=30).send("import os").text[0]
    assert cli(["chat", "--set", "max_length=30"], "import os\n").stdout == f"{answer}\n"


def test_exit_ends_it(cli):
    done = cli(["chat", "-n", "2"], "x\n/undo\n/exit\ny\n")
    assert done.exit_code == 0
    assert re.fullmatch(r"removed the last message: the conversation has 0 messages, \d+ tokens cached\n", done.stderr)
    answer = engine.Generator(engine.SHIPPED_MODEL).chat(max_new_tokens=2).send("x").text[0]
    assert done.stdout == f"{answer}\n"  # none to y


def test_a_system_message_and_an_empty_conversation(cli):
    typed = "x\n/system Python  3.\n/system\n/clear\nimport os\n"
    done = cli(["chat", "-n", "4", "--system", "# code"], typed)
    generator = engine.Generator(engine.SHIPPED_MODEL)
    answers = [generator.chat(system, max_new_tokens=4).send(message).text[0]
               for system, message in (("# code", "x"), ("Python  3.", "import os"))]  # fmt: skip
    assert done.stdout == "".join(f"{answer}\n" for answer in answers)
    assert done.stderr.splitlines()[:2] == ["system message: Python  3."] * 2
    assert "removed the messages: the conversation has 1 message, " in done.stderr


def test_parameters_are_set_within_a_chat(cli):
    typed = ["/set max-new-tokens 4", "/set temperature 3", "/set seed = 1", "import os",
             "/clear", "/set temperature=0", "import os",
             "/clear", "/set temperature none", "/set max_new_tokens none", '/set stop_strings ["path"]', "import os",
             "/set"]  # fmt: skip
    done = cli(["chat", "-n", "6"], "\n".join(typed))
    generator = engine.Generator(engine.SHIPPED_MODEL)
    parameters = ({"max_new_tokens": 4, "do_sample": True, "temperature": 3.0, "seed": 1}, {"max_new_tokens": 4},
                  {"max_new_tokens": 512, "stop_strings": ["path"]})  # fmt: skip
    answers = [generator.chat(**one).send("import os").text[0] for one in parameters]
    assert done.stdout == "".join(f"{answer}\n" for answer in answers)
    shown = [line for line in done.stderr.splitlines() if line.startswith("parameters: ")]
    assert shown[1] == "parameters: max_new_tokens=4, temperature=3, do_sample=true"
    assert shown[-1] == 'parameters: seed=1, stop_strings=["path"], max_new_tokens=512'


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("/set top_p 7", "top_p=7, but it is a number from 0 to 1"),
        ("/set top_pp 0.5", "know no input 'top_pp'; did you mean 'top_p'"),
        ("/set top_p", "/set top_p: give a value, or none to reset it"),
        ("/set cache static", "/set is for generation parameters, and cache is none"),
        ("/set model x", "/set is for generation parameters, and model is none"),
        ("/set num_return_sequences 2", "num_return_sequences cannot apply to a chat"),
    ],
)
def test_a_parameter_that_cannot_be_set_changes_nothing(cli, typed, message):
    done = cli(["chat", "-n", "4"], f"{typed}\n/set\n")
    assert f"{message}" in done.stderr.splitlines()[0]
    assert done.stderr.splitlines()[1] == "parameters: max_new_tokens=4"


def test_a_full_model_goes_on_or_stops(cli):
    typed, options = "x = 1; " * 350 + "\n", ["chat", "-n", "4"]
    done = cli(options, 2 * typed)
    assert len(done.stdout.splitlines()) >= 2
    assert done.stderr == "(the model's length is reached: the oldest 2 messages were left out)\n"
    stopped = cli([*options, "--when-full", "stop"], 2 * typed)
    assert "take turns back with undo() or clear()" in stopped.stderr
    assert cli([*options, "--when-full", "forget"], typed).exit_code == 2


PASTED = "\x1b[200~def f(x):\r/exit\r    return\x1b[201~"
WITHOUT_READLINE = "import sys; sys.modules['readline'] = None; from engine.cli import main; main(sys.argv[1:])"


@pytest.mark.slow  # a process for each; `test_in_a_terminal` has one by default
@pytest.mark.skipif(os.name != "posix", reason="terminals")
@pytest.mark.parametrize("program", [["-m", "engine"], ["-c", WITHOUT_READLINE]], ids=["readline", "without"])
def test_a_pasted_text_is_one_message(tmp_path, program):
    """Also one whose last line ends, and with more typed behind it."""
    path = tmp_path / "talk"
    with Terminal([sys.executable, *program, "chat", "-n", "2"]) as terminal:
        terminal.until("> ")
        terminal.type(f"{PASTED} x + 1\r")
        terminal.until(" x + 1\r\n")
        terminal.until("> ")
        terminal.type("\x1b[200~a = 1\rb = 2\r\x1b[201~\r")
        terminal.until("b = 2")
        terminal.until("> ")
        terminal.type(f"/save {path}\r")
        terminal.until("saved to")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0
        assert "^[" not in terminal.shown
    messages = caches.inspect(path).notes["messages"]
    assert [one["content"] for one in messages[::2]] == ["def f(x):\n/exit\n    return x + 1", "a = 1\nb = 2"]


def test_mistakes_do_not_end_it(cli):
    typed = "/it's\n/save it's\n/nothing\n/retry\n/load nowhere\n/save\n/cache nothing\n/undo\n/stats\nx\n/help\n"
    done = cli(["chat", "-n", "2"], typed)
    assert done.exit_code == 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for error, says in zip(errors, ("there is no command /it's", "No closing quotation", "there is no command /nothing",
                                    "no answer to try again", "nowhere", "/save FILE",
                                    "there is no cache named 'nothing'", "no message to take back", "no answer yet"),
                           strict=True):  # fmt: skip
        assert says in error
    assert len(done.stdout.splitlines()) == 1
    assert "/undo" in done.stderr
    assert max(len(line) for line in done.stderr.splitlines() if not line.startswith("error: ")) <= 80


def test_what_inspect_refuses(cli, tmp_path):
    (tmp_path / "text").write_text("no cache")
    done = cli(["cache", "inspect", str(tmp_path / "text")])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is no saved cache, or damaged" in done.stderr
    assert "engine cache inspect FILE" in cli(["cache", "show", "x"]).stderr
    assert cli(["cache", "inspect", str(tmp_path / "nowhere")]).exit_code != 0


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="terminals")
def test_it_is_of_one_process(cli, tmp_path):
    engine.EngineConfig(tp=2).to_json_file(tmp_path / "two.json")
    done = cli(["chat", "--config", str(tmp_path / "two.json")])
    assert done.exit_code == 2
    assert "tp=2: a terminal is that of one process" in done.stderr


def test_the_banner_names_the_weights_that_are_kept():
    for weights, shown in (("file", "float32"), ("int4", "codes of 4, 5 and 8 bits (the rest float32)")):
        generator = engine.Generator(engine.SHIPPED_MODEL, config=engine.EngineConfig(weights=weights))
        banner = chat_command._banner(generator, generator.chat())
        assert banner.startswith(f"LlamaForCausalLM, {shown} on cpu, cache dynamic")


def test_a_demo_shows_each_question_before_its_answer(capsys):
    questions = "import os", "x = 1"
    chat = engine.Generator(engine.SHIPPED_MODEL).chat(max_new_tokens=80, do_sample=False)
    talk = "".join(f"> {question}\n{chat.send(question).text[0]}\n" for question in questions)
    demo.main(str(engine.SHIPPED_MODEL), *questions)
    shown = capsys.readouterr().out
    assert shown.startswith(f"{talk}\n")
    assert {"time to first token", "speed", "cache size"} <= set(re.split(r"  +|\n", shown))


def test_in_a_terminal():
    """Typed as a new user would: Ctrl-C ends an answer, the conversation goes on, Ctrl-D ends it."""
    command = [sys.executable, "-m", "engine", "chat", "-n", "900", "--min-new-tokens", "900"]
    with Terminal(command) as terminal:
        terminal.until("LlamaForCausalLM, float32 on cpu, cache dynamic, context of 2,048 tokens")
        terminal.until("parameters: max_new_tokens=900, min_new_tokens=900")
        terminal.until("/help lists the commands")
        terminal.until("> ")
        terminal.type("import os\n")
        terminal.until("import os\r\n")
        time.sleep(1)
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("\r\n> ")
        terminal.type("/stats\n")
        terminal.until("tokens/s")
        terminal.until("> ")
        terminal.type("/retry\n")
        time.sleep(1)
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("\r\n> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0
