"""The command line as a newcomer meets it: help, versions, spellings, and tables in narrow terminals."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys

import pytest
import torch
from architectures import tiny_model

import caches
import configs
import engine
import strategies
from engine.cli.commands.generate import generate
from engine.cli.values import assignments
from engine.memory.plan_table import BackendPlan

PROMPT = "import os\n"
HEADINGS = [
    "The prompt:",
    "The model:",
    "The cache:",
    "How tokens are chosen:",
    "What form texts have:",
    "When it ends:",
    "What is printed:",
]
WIDTHS = [60, 80, 100, 160]


@pytest.fixture(params=WIDTHS)
def width(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def check_whole(text, names, width):
    """No line is too wide, and each name is there as one word."""
    assert max(map(len, text.splitlines())) <= width
    words = {word.rstrip(",.") for word in text.split()}
    assert not {name for name in names if name not in words}


@pytest.mark.parametrize("words", [[], ["generate"], ["caches"], ["plan"]], ids=str)
def test_help_in_two_spellings(cli, words):
    short, long = cli([*words, "-h"]), cli([*words, "--help"])
    assert (short.exit_code, short.stderr) == (0, "")
    assert short == long
    assert short.stdout.startswith(f"Usage: {' '.join(['engine', *words])} ")
    if not words:
        assert cli([]) == long


def test_help_of_generate_has_headings_and_whole_names(cli, width):
    shown = cli(["generate", "-h"]).stdout
    found = [line for line in shown.splitlines() if re.match(r"[A-Z].*:$", line)]
    assert found == [*HEADINGS, "Options:"]
    names = {parameter.replace("_", "-") for parameter in inspect.signature(generate).parameters}
    shared = {f"--{name}" for name in names - {"prompt", "set-option", "as-json"}} | {"--samples", "-n", "--draft"}
    check_whole(shown, shared | set(strategies.names()), width)
    assert "<" not in shown


def test_defaults_and_bounds_are_shown(cli):
    shown = " ".join(cli(["caches", "-h"]).stdout.split())
    assert "[default: 4096]" in shown
    assert "64 to 16777216" in shown


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["generate", PROMPT], lambda found: {*found, *found["rows"][0]}),
        (["caches"], lambda found: set(found).union(*found["caches"])),
    ],
    ids=["generate", "caches"],
)
def test_help_names_the_fields_of_json(cli, words, fields):
    told = cli([words[0], "-h"]).stdout.partition("Print JSON: ")[2].partition("\n  --")[0]
    assert fields(json.loads(cli([*words, "--json"]).stdout)) <= set(re.findall(r"\w+", told))


def test_the_fields_of_a_plan_as_json(cli):
    assert "Print JSON: the fields of `engine.Plan`." in cli(["plan", "-h"]).stdout
    found = json.loads(cli(["plan", "--cache", "dynamic", "--json"]).stdout)
    assert set(found) == {field.name for field in dataclasses.fields(engine.Plan)}
    assert set(found["backends"][0]) == {field.name for field in dataclasses.fields(BackendPlan)}


def test_what_is_read_of_a_model(cli):
    for command in ("plan", "linears", "compile"):
        shown = " ".join(cli([command, "-h"]).stdout.split())
        assert ("only its configuration is read" in shown) == (command != "compile")


def test_a_parameter_of_others_that_is_not_here(cli):
    error = cli(["generate", PROMPT, "--set", "prompt_logprobs=1"]).stderr
    assert "here it is not offered" in error
    assert set(re.findall(r"strategy='(\w+)'", error)) <= set(strategies.names())


def test_versions(cli):
    import transformers

    shown = cli(["--version"]).stdout
    assert (
        f"torch {torch.__version__}\ntransformers {transformers.__version__}\nPython {sys.version.split()[0]}" in shown
    )
    assert shown.startswith("kvengine ")


def test_versions_and_help_do_not_wait_for_torch():
    script = (
        "import sys\nfrom engine.cli import main\n"
        "for arguments in (['--version'], ['-h'], ['generate', '-h'], ['generate', 'x', '--model', '/no/such']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "error: there is no folder '/no/such': give the path of a folder with a model, or a hub id\n"


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "engine", "-h"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: engine [OPTIONS] COMMAND")


@pytest.mark.parametrize(
    "spelled",
    [["-n", "7"], ["-n7"], ["--max_new_tokens", "7"], ["--max_new_tokens=7"], ["--set", "max_new_tokens=7"],
     ["--set", "max-new-tokens=7"]],
    ids=str,
)  # fmt: skip
def test_spellings_of_a_length(cli, shipped, spelled):
    assert cli(["generate", PROMPT, *spelled]).stdout == shipped.generate(PROMPT, max_new_tokens=7).text[0] + "\n"


@pytest.fixture
def own_settings(monkeypatch):
    """A function that gives the shipped model generation parameters of its own."""

    def give(**parameters):
        def loaded(*given):
            model, tokenizer = load(*given)
            model.generation_config.update(**parameters)
            return model, tokenizer

        load = engine.generator.load
        monkeypatch.setattr("engine.generator.load", loaded)

    return give


def test_without_a_length_it_is_that_of_the_library(cli, shipped, own_settings):
    assert cli(["generate", PROMPT]).stdout == shipped.generate(PROMPT).text[0] + "\n"
    expected = shipped.generate(PROMPT, max_new_tokens=6)
    own_settings(max_new_tokens=6)
    done = cli(["generate", PROMPT, "--stats"])
    assert done.stdout == expected.text[0] + "\n"
    assert "6 new" in done.stderr
    assert re.search(r"ended by +length", done.stderr)


def test_a_model_that_samples_by_itself_does_so_here_too(cli, shipped, own_settings):
    drawn = shipped.generate(PROMPT, do_sample=True, temperature=3.0, seed=3).text[0]
    greedy = shipped.generate(PROMPT).text[0]
    assert drawn != greedy
    own_settings(do_sample=True, temperature=3.0)
    assert cli(["generate", PROMPT, "--seed", "3"]).stdout == drawn + "\n"
    assert cli(["generate", PROMPT, "--temperature", "0"]).stdout == greedy + "\n"


def test_a_terminal_is_told_that_the_limit_ended_a_text(cli, monkeypatch):
    monkeypatch.setattr("engine.cli.output._is_watched", lambda: True)
    assert "(ended at the limit of 20 tokens: --max-new-tokens" in cli(["generate", PROMPT]).stderr
    assert cli(["generate", PROMPT, "-n", "5"]).stderr == ""


def test_several_prompts_are_a_batch(cli, shipped):
    expected = shipped.generate(["import os\n", "class A:"], max_new_tokens=5).text
    shown = cli(["generate", "-", "class A:", "-n", "5"], input=PROMPT).stdout
    lines = [f"[{row}] {text}".replace("\n", "\n    ") for row, text in enumerate(expected)]
    assert [line.rstrip() for line in shown.splitlines()] == [line.rstrip() for line in "\n".join(lines).splitlines()]
    alone = shipped.generate(PROMPT, max_new_tokens=5).text[0]
    assert cli(["generate", "-f", "-", "-n", "5"], input=PROMPT).stdout == alone + "\n"


# What `engine caches` says of options.


@pytest.mark.parametrize("name", caches.names())
def test_every_option_of_a_cache_has_a_meaning(name):
    options = caches.recipe(name).options
    assert set(options.meanings()) == set(options.values()) == set(options.option_names())
    assert all(len(text) > 10 and "  " not in text for text in options.meanings().values())
    assert all(words for words in options.values().values())


def test_meanings_come_from_docstrings():
    assert configs.StaticCacheConfig.meanings()["max_cache_len"] == (
        "tokens per row; None is prompt + new tokens of the first call that uses it."
    )
    quantized = configs.OffloadedQuantizedCacheConfig
    assert quantized.meanings()["axis_key"] == quantized.meanings()["axis_value"] != ""
    assert quantized.values()["backend"] == list(configs.CODECS)
    assert configs.EngineConfig.meanings()["over_budget"].startswith("what happens when the cache would need more.")


@pytest.mark.parametrize("choices", [kind for kind in configs.CacheConfig._by_name.values() if kind.choices])
def test_choices_are_what_is_accepted(choices):
    given = {"window_length": 4096} if "window_length" in choices.option_names() else {}
    for name, values in choices.choices.items():
        accepted = []
        for value in (*values, 77, "nothing"):
            try:
                backend = {"backend": "hqq"} if name == "nbits" else {}
                choices.from_dict(given | backend | {name: value})
            except configs.ConfigError:
                continue
            accepted.append(value)
        assert accepted
        assert set(accepted) <= set(values)


def test_one_cache_with_its_options(cli, width):
    shown = cli(["caches", "quantized"]).stdout
    check_whole(shown, caches.recipe("quantized").options.option_names(), width)
    assert "One of quanto, hqq, fp8, kivi; default quanto." in " ".join(shown.split())
    assert shown.index("residual_length") < shown.index("max_batch_size")  # its own come first


def test_all_caches(cli, width):
    shown = cli(["caches", "--tokens", "64"]).stdout
    check_whole(shown, {"offloaded_quantized", "6,144", "reference"}, width)


@pytest.mark.parametrize("name", caches.names())
def test_defaults_are_printed_as_they_are_to_be_written(cli, name):
    options = caches.recipe(name).options
    printed = cli(["caches", name]).stdout
    for option, default in options.defaults().items():
        [shown] = re.findall(rf"^  {option} .*?; default\s+(\S+)\.$", printed, flags=re.M | re.S)[:1]
        assert assignments([f"{option}={shown}"], "--cache-option") == {option: default}


# Plans.


def test_a_plan_in_any_width(cli, width):
    shown = cli(["plan", "--prompt-tokens", "100"]).stdout
    check_whole(shown, {"offloaded_quantized", "2,049", "LlamaForCausalLM"}, width)
    assert ("kept by" in shown) == (width >= 100)
    assert ("staging" in shown) == (width >= 100)
    one = cli(["plan", "--prompt-tokens", "100", "--cache", "static"]).stdout
    check_whole(one, {"static", "staging"}, width)


def test_a_plan_takes_its_model_as_the_other_commands_do(cli, tmp_path):
    tiny_model("llama").config.save_pretrained(tmp_path)
    words = ["--cache", "dynamic", "--prompt-tokens", "8", "--free-gib", "1", "--json"]
    named, placed = cli(["plan", "--model", str(tmp_path), *words]), cli(["plan", str(tmp_path), *words])
    assert placed.exit_code == named.exit_code == 0
    found, other, shipped = (json.loads(done.stdout) for done in (named, placed, cli(["plan", *words])))
    assert found["backends"] == other["backends"] != shipped["backends"]


def test_a_plan_of_too_many_tokens_says_so_at_once(cli, monkeypatch):
    monkeypatch.setattr("engine.memory.dry_run.DryRun.usage", lambda *_, **__: pytest.fail("it was rehearsed"))
    for tokens in (5000, 100_000_000):
        shown = " ".join(cli(["plan", "--prompt-tokens", str(tokens)]).stdout.split())
        assert f"{tokens:,} prompt tokens and 20 new ones need {tokens + 19:,} positions" in shown
        assert "the model has 2,048: its longest context is 2,049 tokens" in shown
        assert "Choice: none of them" in shown


def test_the_longest_context_can_be_generated_and_one_more_cannot():
    model = tiny_model("llama")
    positions = model.config.max_position_embeddings
    planned = engine.plan(model, prompt_tokens=5, max_new_tokens=4, cache="dynamic")["dynamic"]
    assert planned.longest_context == positions + 1
    ids = torch.randint(3, 90, (1, planned.longest_context - 4))
    assert engine.generate(model, ids, max_new_tokens=4, min_new_tokens=4).stats.new_tokens == 4
    with pytest.raises(engine.InputError, match=f"need {positions + 1} positions, but the model has {positions}"):
        engine.generate(model, ids, max_new_tokens=5)
    again = engine.plan(model, prompt_tokens=ids.shape[1], max_new_tokens=4, cache="dynamic")
    assert again["dynamic"].refused is None
    beyond = engine.plan(model, prompt_tokens=ids.shape[1], max_new_tokens=5, cache="dynamic")
    assert f"its longest context is {planned.longest_context:,} tokens" in beyond["dynamic"].refused
    assert beyond["dynamic"].refused in beyond.why


def test_a_text_that_no_plan_is_made_for():
    found = engine.plan(tiny_model("bloom"), prompt_tokens=100, max_new_tokens=10**8, cache="dynamic")
    assert "tokens per row are too many for a plan" in found["dynamic"].refused


def test_a_plan_for_a_device_that_is_not_here():
    config = tiny_model("llama").config
    free = {"device": "xpu", "prompt_tokens": 8, "max_new_tokens": 4, "cache": "dynamic"}
    assert engine.plan(config, **free)["dynamic"].fits is None
    found = engine.plan(config, **free, free_bytes=10**9)
    assert isinstance(found["dynamic"], BackendPlan)
    assert found["dynamic"].fits


def test_a_plan_of_a_refused_cache_fails(cli):
    refused, served = (cli(["plan", "--cache", name]) for name in ("encoder_decoder", "dynamic"))
    assert (refused.exit_code, served.exit_code) == (1, 0)
    assert "Choice: none of them; it is refused: " in refused.stdout
    assert cli(["plan"]).exit_code == 0
