"""The command line."""

import json
import subprocess
import sys

import pytest

import engine

PROMPT = "import os\n"


def test_text_as_generate_gives_it(cli, shipped):
    result = cli(["generate", PROMPT, "--max-new-tokens", "12"])
    assert result.stdout == shipped.generate(PROMPT, max_new_tokens=12).text[0] + "\n"


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
def test_streaming_prints_the_same(cli, cache):
    arguments = ["generate", PROMPT, "--max-new-tokens", "12", "--cache", cache]
    assert cli([*arguments, "--stream"]).stdout == cli(arguments).stdout


def test_json(cli, shipped):
    result = json.loads(cli(["generate", PROMPT, "--max-new-tokens", "12", "--json"]).stdout)
    expected = shipped.generate(PROMPT, max_new_tokens=12)
    assert result["text"] == expected.text[0]
    assert result["tokens"] == expected.sequences[0, -12:].tolist()
    assert result["finish_reason"] == "length"
    assert result["stats"]["new_tokens"] == 12
    assert set(result) == {"text", "tokens", "finish_reason", "stats"}


def test_standard_input_and_stats(cli):
    result = cli(["generate", "-", "--max-new-tokens", "12", "--stats"], input=PROMPT)
    assert result.stdout == cli(["generate", PROMPT, "--max-new-tokens", "12"]).stdout
    assert "12 new" in result.stderr
    assert "tokens/s" in result.stderr
    assert "time to first token" in result.stderr
    assert "bytes" in result.stderr
    assert cli(["generate", "--max-new-tokens", "12"], input=PROMPT).stdout == result.stdout


def test_sampling_follows_the_seed(cli):
    def text(seed, *more):
        return cli(["generate", PROMPT, "--temperature", "1.5", "--top-p", "0.9", "--seed", seed, *more]).stdout

    assert text("1") == text("1") == text("1", "--cache", "static")
    assert text("1") != text("2")
    assert cli(["generate", PROMPT, "--temperature", "0"]).stdout == cli(["generate", PROMPT]).stdout


@pytest.mark.parametrize(
    "arguments",
    [["--stream", "--json"], ["--temperature", "0", "--top-p", "0.5"], ["--nonsense"], ["--max-new-tokens", "many"]],
)
def test_wrong_usage(cli, arguments):
    assert cli(["generate", PROMPT, *arguments]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--cache", "statik"], "error: there is no cache named 'statik'; did you mean 'static'"),
        (["x", "--max-new-tokens", "0"], "error: max_new_tokens=0"),
        (["x", "--max-new-tokens", "9999"], "error: 1 prompt tokens and 9999 new ones need"),
        ([""], "error: prompt 0 is empty"),
        (["x", "--model", "no/such/folder"], "error: no model could be loaded from 'no/such/folder'"),
        (["x", "--model", "/"], "error: no model could be loaded from '/'"),
        (["x", "--top-p", "-1"], "error: `top_p`"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(arguments, message):
    command = [sys.executable, "-m", "engine.cli", "generate", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_input_that_is_no_text():
    command = [sys.executable, "-m", "engine.cli", "generate", "-"]
    done = subprocess.run(command, input=b"\xff\xfe", capture_output=True, timeout=120)
    assert done.returncode == 2
    assert b"no text in UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


def test_the_shipped_model_is_small_and_complete():
    size = sum(file.stat().st_size for file in engine.SHIPPED_MODEL.iterdir())
    assert size <= 12e6
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {f.name for f in engine.SHIPPED_MODEL.iterdir()}
