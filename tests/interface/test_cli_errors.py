"""Errors on the command line: one line, an exit code, and what to change."""

import json
import os
import re
import subprocess
import sys

import pytest

PROMPT = "import os\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--stream", "--samples", "2"], "error: --stream prints one text, but there are 2"),
        (["x", "--max-new-tokens", "many"], "error: Invalid value for '--max-new-tokens'"),
        (["--file", "no/such/file"], "error: no/such/file cannot be read: No such file"),
        (["x", "--system", "no chat", "--raw"], "error: --system begins a chat, and --raw reads a prompt plain"),
        (["x", "y", "--image", "no/such"], "error: --image is for one prompt"),
        (["x", "--set", "top_k"], "error: --set top_k: it takes NAME=VALUE"),
        (["x", "--set", "no_such_parameter=1"], "error: LlamaForCausalLM and generate() know no input"),
        (["x", "--cache-option", "max_cache_len=9"], "error: DynamicCacheConfig has no option 'max_cache_len'"),
        (["x", "--compile", "no-such-compiler"], "error: EngineConfig: compile='no-such-compiler'"),
        (["x", "--cache", "statik"], "error: there is no cache named 'statik'; did you mean 'static'"),
        (["x", "--max-new-tokens", "9999"], "error: 1 prompt token and 9,999 new ones need 9,999 positions"),
        ([""], "error: prompt 0 is empty"),
        (["x", "--temperature", "0", "--top-k", "2"], "error: --temperature 0 is greedy"),
        (["x", "--model", "no/such/folder"], "error: there is no folder 'no/such/folder'"),
        (["x", "--model", "/"], "error: the folder '/' has no config.json"),
        (["x", "--model", "some/model"], "error: 'some/model' is no folder here"),
        (["x", "--top-p", "1.5"], "error: Invalid value for '--top-p': 1.5, but it is a number from 0 to 1"),
        (["x", "--dtype", "float99"], "error: dtype='float99' is no data type of torch; did you mean 'float"),
        (["x", "--device", "xpu:9"], "error: there is no device 'xpu:9' here: torch finds cpu"),
        (["x", "--dtype", "fp16"], "error: dtype='fp16' is no data type of torch; did you mean 'float16'"),
        (["x", "--dtype", "bf16"], "error: dtype='bf16' is no data type of torch; did you mean 'bfloat16'"),
        (["x", "-n", "3", "--set", "max_new_tokens=4"], "error: max_new_tokens was given twice"),
        (["x", "--num-beams", "3", "--set", "num-beams=2"], "error: num_beams was given twice: as --num-beams and as"),
        (["x", "--do-sample", "--set", "do_sample=false"], "error: do_sample was given twice"),
        (["x", "--set", "top_k=2", "--set", "top-k=3"], "error: top_k was given twice with --set"),
        (["x", "--set", "cache=static"], "error: --set does not give cache: use --cache\n"),
        (["x", "--set", "cache_config={}"], "error: --set does not give cache_config: use --cache-option\n"),
        (["x", "--set", "logits_processor=[]"], "error: --set does not give logits_processor: use engine.generate"),
        (["x", "--set", "temperature=0", "--top-k", "2"], "error: --temperature 0 is greedy, so --top-k cannot apply"),
        (["x", "--set", "num_return_sequences=2", "--stream"], "error: --stream prints one text, but there are 2"),
        (["x", "--sampls", "2"], "error: No such option: --sampls"),
        (["caf\udce9"], "error: PROMPT is no text in UTF-8: 'caf\\xe9' at character 3"),
        (["x", "--stop", "\udce9"], "error: --stop-strings is no text in UTF-8"),
        (["x", "--chat", "--system", "\udce9"], "error: --system is no text in UTF-8"),
        (["x", "--choice", ""], "error: every --choice is empty"),
        (["x", "--choice", "", "--choice", ""], "error: every --choice is empty"),
        (["-", "-"], "error: - is standard input, which can be read once"),
        ([], "error: there is no PROMPT: give one in quotes"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(cli, arguments, message):
    done = cli(["generate", *arguments])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "a", "--model", "b"], "error: the model was given twice: as MODEL and as --model"),
        (["plan", "--free-gib", "-1"], "error: Invalid value for '--free-gib'"),
        (["plan", "--free-gib", "inf"], "error: --free-gib inf is no size"),
        (["caches", "--tokens", "9" * 20], "error: Invalid value for '--tokens'"),
        (["linears", "--threads", "100000"], "error: Invalid value for '--threads'"),
        (["--show-completion", "fish"], "error: --show-completion fish: it takes no name, run it in the shell"),
        (["--install_completion", "fish"], "error: --install-completion fish"),
    ],
)
def test_errors_of_the_other_commands(cli, arguments, message):
    done = cli(arguments)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(message)


def test_an_interrupt_says_what_there_is(cli, monkeypatch):
    """Between two pieces Ctrl-C is Python's own; before there is a run, it is told without a number."""
    from engine.cli.commands import generate
    from engine.result import StreamChunk

    def press(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StreamChunk, "to_dict", press)
        done = cli(["generate", PROMPT, "-n", "9", "--stream", "--json"])
    assert (done.exit_code, done.stderr) == (130, "interrupted after 1 token\n")
    assert len(json.loads(done.stdout)["rows"][0]["tokens"]) == 1
    monkeypatch.setattr(generate, "start_libraries", press)
    done = cli(["generate", PROMPT])
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_command_that_there_is_not(cli):
    done = cli(["generte"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert re.fullmatch(r"error: No such command 'generte'.*generate.*\(see `engine -h`\)\n", done.stderr)


@pytest.mark.parametrize("words", [["--stream"], ["--stream", "--json"], ["--json"], [], ["-h"]], ids=str)
def test_a_reader_that_leaves(words, monkeypatch):
    """As `| head` does: no message, and the exit code of a program that a shell ends for it."""
    from engine.cli import main

    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit) as ended:
            main(["generate", PROMPT, "-n", "40", *words])
    assert ended.value.code == 141


def test_a_closed_standard_error(cli, shipped, monkeypatch):
    """Messages are printed nowhere; the text and the exit codes are as ever."""
    text = shipped.generate(PROMPT, max_new_tokens=3).text[0]
    for arguments, printed, code in [
        ([PROMPT, "-n", "3", "--stats"], text + "\n", 0),
        ([PROMPT, "-n", "3", "--stream"], text + "\n", 0),
        ([""], "", 2),
    ]:
        monkeypatch.setattr(sys, "stderr", None)
        done = cli(["generate", *arguments])
        sys.stderr.close()
        assert (done.exit_code, done.stdout, done.stderr) == (code, printed, "")


@pytest.mark.parametrize("asked", ["", "option", "variable"])
def test_an_internal_error_is_one_line_or_all_of_it_for_who_asks(cli, asked, monkeypatch):
    def breaks(*arguments, **options):
        raise ArithmeticError("no\nsuch luck")

    monkeypatch.setattr("engine.generator.Generator.stream", breaks)
    monkeypatch.setenv("KVENGINE_DEBUG", "1" if asked == "variable" else "0")
    done = cli([*(["--traceback"] if asked == "option" else []), "generate", "x"])
    assert done.exit_code == 1
    assert done.stderr.endswith("error: ArithmeticError: no such luck\n")
    assert ("in breaks" in done.stderr) == bool(asked)
    assert asked or done.stderr.count("\n") == 1


def test_input_that_is_no_text(cli):
    done = cli(["generate", "-"], input=b"\xff\xfe")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: standard input is no text in UTF-8")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("generate - <&-", 2, "standard input is closed"),
        pytest.param("generate x -n 2 >&-", 141, "", marks=pytest.mark.slow),
        ("cache inspect /no/such/file", 2, "error: /no/such/file: No such file or directory"),
    ],
)
def test_closed_streams_and_missing_files(command, code, told):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m engine.cli {command}"], capture_output=True, text=True, timeout=120
    )
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == bool(told)
    assert done.returncode == code
