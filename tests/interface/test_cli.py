"""The command line."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, tiny_model
from encoder_decoders import tiny_encoder_decoder
from helpers import in_terminal

import caches
import configs
import engine
from engine.kernels import linear_measurement

PROMPT = "import os\n"
ENGINE = [sys.executable, "-m", "engine.cli"]


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
    row = {"text": expected.text[0], "tokens": expected.sequences[0, -12:].tolist(), "finish_reason": "length"}
    assert set(result) == {"rows", "stats"}
    assert result["rows"] == [row]
    assert set(result["stats"]) == {field.name for field in dataclasses.fields(engine.Stats)}
    assert (result["stats"]["new_tokens"], result["stats"]["cache"]) == (12, "dynamic")


def test_log_probabilities_as_json(cli, shipped):
    out = shipped.generate("import os", max_new_tokens=3, top_logprobs=2)
    options = ["generate", "import os", "--max-new-tokens", "3", "--set", "top_logprobs=2", "--json", "--stream"]
    *pieces, last = map(json.loads, cli(options).stdout.splitlines())
    found = [one for piece in pieces for one in piece["logprobs"]]
    assert found == last["rows"][0]["logprobs"]
    assert [one["token"] for one in found] == out.tokens[0]
    assert [one["logprob"] for one in found] == pytest.approx([one.logprob for one in out.logprobs[0]])
    assert [len(one["top"]) for one in found] == [2, 2, 2]


def test_json_piece_by_piece(cli):
    arguments = ["generate", PROMPT, "--max-new-tokens", "12", "--json"]
    *pieces, last = map(json.loads, cli([*arguments, "--stream"]).stdout.splitlines())
    assert last["rows"] == json.loads(cli(arguments).stdout)["rows"]
    assert [set(piece) for piece in pieces] == [{"row", "tokens", "text", "finish_reason"}] * 12
    assert "".join(piece["text"] for piece in pieces) == last["rows"][0]["text"]
    assert [token for piece in pieces for token in piece["tokens"]] == last["rows"][0]["tokens"]


def test_a_batch_from_files(cli, shipped, tmp_path):
    texts = [PROMPT, "class Path:\n    def __init__(self"]
    files = []
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.py").write_text(text)
        files += ["--file", str(tmp_path / f"{number}.py")]
    expected = shipped.generate(texts, max_new_tokens=12)
    result = json.loads(cli(["generate", *files, "--max-new-tokens", "12", "--json"]).stdout)
    assert [row["text"] for row in result["rows"]] == expected.text
    shown = cli(["generate", *files, "--max-new-tokens", "12"]).stdout
    assert "\n" in expected.text[0].strip()
    texts = re.findall(r"\[\d\] (.*\n(?:(?:    .*)?\n)*)", shown)
    assert [re.sub("^    ", "", text, flags=re.M) for text in texts] == [text + "\n" for text in expected.text]
    assert shown == "".join(f"[{row}] {text}" for row, text in enumerate(texts))


def test_a_chat(cli, shipped):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    expected = shipped.generate(messages, max_new_tokens=8).text[0]
    arguments = ["generate", "hi", "--chat", "--system", "Be brief.", "--max-new-tokens", "8"]
    assert cli(arguments).stdout == expected + "\n"
    assert expected != shipped.generate("hi", max_new_tokens=8).text[0]


def test_proposed_tokens(cli, shipped):
    """They leave the text as it is."""
    text = cli(["generate", PROMPT, "--max-new-tokens", "20"]).stdout
    lookup = cli(["generate", PROMPT, "--max-new-tokens", "20", "--prompt-lookup", "5", "--stats"])
    draft = cli(
        ["generate", PROMPT, "--max-new-tokens", "20", "--draft", str(engine.SHIPPED_MODEL), "--draft-tokens", "4",
         "--set", "assistant_confidence_threshold=0", "--stats"]
    )  # fmt: skip
    assert text == lookup.stdout == draft.stdout
    assert "15 tokens, 15 accepted" in re.sub(r"\s+", " ", draft.stderr)  # 1 + 3 * (4 + 1) + 3 + 1
    assert "accepted" in lookup.stderr


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--stop", "path", "--stop", "os"], {"stop_strings": ["path", "os"]}),
        (["--set", "temperature=3", "--seed", "0"], {"temperature": 3.0, "do_sample": True, "seed": 0}),
        (["--set", "no_repeat_ngram_size=1"], {"no_repeat_ngram_size": 1}),
        (["--top-k", "3", "--min-p", "0.1", "--seed", "4"], {"top_k": 3, "min_p": 0.1, "do_sample": True}),
        (["--samples", "2", "--seed", "4"], {"num_return_sequences": 2, "do_sample": True}),
        (["--strategy", "sampling", "--seed", "4"], {"do_sample": True}),
        (
            ["--num-beams", "4", "--num-beam-groups", "2", "--diversity-penalty", "3", "--samples", "2"],
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 3.0, "num_return_sequences": 2},
        ),
        (["--penalty-alpha", "0.7", "--top-k", "4"], {"penalty_alpha": 0.7, "top_k": 4}),
        (["--strategy", "contrastive", "--penalty-alpha", "0.9"], {"strategy": "contrastive", "penalty_alpha": 0.9}),
        (["--cache", "static", "--cache-option", "max_cache_len=99"], {}),
        (["--prefill-chunk-tokens", "2", "--linears", "default", "--dtype", "float32", "--device", "cpu"], {}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_reach_the_library(cli, shipped, arguments, options):
    result = json.loads(cli(["generate", PROMPT, "--max-new-tokens", "20", "--json", *arguments]).stdout)
    torch.manual_seed(4)
    expected = shipped.generate(PROMPT, max_new_tokens=20, **options)
    assert [row["text"] for row in result["rows"]] == expected.text
    assert [row["finish_reason"] for row in result["rows"]] == expected.finish_reasons
    plain = shipped.generate(PROMPT, max_new_tokens=20).text
    assert (expected.text != plain) == bool(options)


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
        sampled = ["--temperature", "1.5", "--top-p", "0.9", "--seed", seed, "--max-new-tokens", "30"]
        return cli(["generate", PROMPT, *sampled, *more]).stdout

    assert text("1") == text("1") == text("1", "--cache", "static")
    assert text("1") != text("2")
    greedy = ["generate", PROMPT, "--max-new-tokens", "9"]
    assert cli([*greedy, "--temperature", "0"]).stdout == cli(greedy).stdout


@pytest.fixture
def settings(cli, monkeypatch):
    """The `EngineConfig` that a command line means; nothing is generated."""

    def record(self, model, config):
        raise engine.OptionError(json.dumps(dict(config)))

    def read(*arguments):
        done = cli(["generate", PROMPT, *arguments])
        return configs.EngineConfig.from_dict(json.loads(done.stderr.removeprefix("error: ")))

    monkeypatch.setattr("engine.generator.Generator.__init__", record)
    return read


OTHERS = {
    "compile": ("aot_eager", "eager"),
    "device_map": ("cpu", "cuda:1"),
    "dtype": ("bfloat16", "float32"),
    "linears": ("default", "onednn"),
    "prefill_chunk_tokens": (3, 5),
}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_options_win_over_a_configuration(settings, tmp_path, name):
    config, file = configs.EngineConfig(**{name: OTHERS[name][0] for name in OTHERS}), tmp_path / "config.json"
    config.to_json_file(file)
    default = configs.EngineConfig.defaults()[name]
    for value in (OTHERS[name][1], *[default] * (default is not None)):
        option = ["--" + name.replace("device_map", "device").replace("_", "-"), str(value)]
        assert settings("--config", str(file), *option) == config.update(**{name: value})[0]
        assert settings(*option) == configs.EngineConfig(**{name: value})
    assert settings("--config", str(file)) == config


@pytest.mark.parametrize("name", configs.presets())
def test_presets_on_the_command_line(settings, name):
    assert settings("--config", name) == configs.preset(name)
    assert settings("--config", name, "--prefill-chunk-tokens", "9").prefill_chunk_tokens == 9


def test_the_cache_of_a_configuration(cli, tmp_path):
    def stats(*more):
        arguments = ["generate", PROMPT, "--max-new-tokens", "4", "--config", str(file), "--json", *more]
        return json.loads(cli(arguments).stdout)["stats"]

    file = tmp_path / "config.json"
    file.write_text('{"cache": {"name": "static", "max_cache_len": 512}}')
    of_512, of_128 = stats(), stats("--cache-option", "max_cache_len=128")
    assert (of_512["cache"], of_128["cache"]) == ("static", "static")
    assert of_512["cache_bytes"] == 4 * of_128["cache_bytes"]
    assert stats("--cache", "static")["cache_bytes"] == of_128["cache_bytes"]
    assert stats("--cache", "dynamic")["cache"] == "dynamic"


def test_configurations_that_cannot_be_read(cli, tmp_path):
    def error(chosen, *more):
        done = cli(["generate", PROMPT, "--config", str(chosen), *more])
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        return done.stderr

    assert "neither a preset nor a JSON file that exists; presets: endless_streaming, long" in error("low_memori")
    assert "neither a preset" in error(tmp_path)
    file = tmp_path / "config.json"
    file.write_text('{"cache": \n}')
    assert error(file).startswith(f"error: {file} is no JSON: Expecting value: line 2 column 1")
    file.write_text('{"cash": 5}')
    assert error(file) == f"error: {file}: EngineConfig has no option 'cash'; did you mean 'cache'?\n"
    assert error("low_memory", "--compile", "fast").startswith("error: EngineConfig: compile='fast'")


def test_the_shipped_model_is_small_and_complete():
    size = sum(file.stat().st_size for file in engine.SHIPPED_MODEL.iterdir())
    assert size <= 12e6
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {f.name for f in engine.SHIPPED_MODEL.iterdir()}


def test_caches_lists_all_of_them_with_their_sizes(cli, shipped):
    report = json.loads(cli(["caches", "--tokens", "512", "--json"]).stdout)
    assert [cache["name"] for cache in report["caches"]] == caches.names()
    kept = [cache for cache in report["caches"] if "refused" not in cache]
    assert {"dynamic", "static", "none"} <= {cache["name"] for cache in kept}
    for cache in kept:
        config = {"max_cache_len": 512} if caches.recipe(cache["name"]).has_a_size else None
        ids = torch.randint(2, 99, (1, 511))
        out = shipped.generate(ids, cache=cache["name"], cache_config=config, max_new_tokens=2, min_new_tokens=2)
        assert cache["bytes"] == out.stats.cache_bytes
        half = json.loads(cli(["caches", cache["name"], "--tokens", "256", "--json"]).stdout)["caches"][0]
        assert cache["bytes_per_token"] == (cache["bytes"] - half["bytes"]) / 256
        assert cache["summary"] == caches.recipe(cache["name"]).summary
    table = cli(["caches", "--tokens", "1024"]).stdout
    assert all(name in table for name in caches.names())
    assert re.search(r"bytes per +1,024 ", table)
    alone = cli(["caches", "static", "--tokens", "1024"]).stdout
    assert "6,144 bytes per token, 6.3 MB for 1,024 tokens." in alone
    assert "max_cache_len" in alone
    assert "quantized" not in alone


FEW = ["llama", "gemma2", "deepseek_v3", "mamba2", "bamba"]
MANY = {*ARCHITECTURES, "mixtral", "biogpt", "gpt_oss", "mamba", "lfm2"} - set(FEW)


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(MANY))])
def test_sizes_are_found_without_weights(cli, tmp_path, name):
    model = tiny_model(name)
    model.config.save_pretrained(tmp_path)
    report = json.loads(cli(["caches", "dynamic", "--model", str(tmp_path), "--tokens", "128", "--json"]).stdout)
    [cache] = report["caches"]
    out = engine.generate(model, torch.ones(1, 127, dtype=torch.long), max_new_tokens=2, min_new_tokens=2)
    assert cache["bytes"] == out.stats.cache_bytes


def test_linears_says_what_is_not_measured(cli, monkeypatch):
    monkeypatch.setattr(linear_measurement, "fastest", lambda shapes: {})
    assert "Not all are measured" in " ".join(cli(["linears"]).stdout.split())
    assert json.loads(cli(["linears", "--json"]).stdout)["measured"] is False


def test_linears_lists_the_products_by_shape(cli):
    report = json.loads(cli(["linears", "--json", "--threads", str(torch.get_num_threads())]).stdout)
    assert report["threads"] == torch.get_num_threads()
    assert report["measured"] is True
    found = {(one["outputs"], one["inputs"]): one for one in report["shapes"]}
    assert set(found) == {(128, 256), (256, 256), (256, 704), (704, 256), (4096, 256)}
    assert found[704, 256]["layers"] == 12
    assert set(found[128, 256]["fastest"].values()) == {"torch"}  # too small
    assert found[704, 256]["fastest"]["2-4"] == "mm"  # as conftest.py stores it
    shown = cli(["linears"]).stdout.splitlines()
    rows = ["1", "row", "2-4", "5-8", "9-16", "17-32", "33-64", "more"]
    assert shown[0].split() == ["outputs", "x", "inputs", "layers", *rows]
    assert " ".join(shown[4].split()) == "704 x 256 12 torch mm onednn swapped swapped onednn torch"


def test_sizes_of_an_encoder_decoder_model(cli, tmp_path):
    model = tiny_encoder_decoder("bart")
    model.config.save_pretrained(tmp_path)
    report = json.loads(cli(["caches", "--model", str(tmp_path), "--tokens", "64", "--json"]).stdout)
    sizes = {cache["name"]: cache.get("bytes") for cache in report["caches"]}
    width, layers = model.config.d_model, model.config.decoder_layers
    assert sizes["dynamic"] == sizes["encoder_decoder"] == sizes["static"] == 4 * 4 * 64 * width * layers
    assert sizes["none"] == 0


def test_caches_says_what_is_refused(cli, tmp_path):
    tiny_model("mamba").config.save_pretrained(tmp_path)
    report = json.loads(cli(["caches", "--model", str(tmp_path), "--json"]).stdout)
    refused = {cache["name"]: cache.get("refused", "") for cache in report["caches"]}
    assert "the model has none" in refused["sliding_window"]
    assert "has no encoder" in refused["encoder_decoder"]
    assert refused["none"] == refused["dynamic"] == refused["mamba"] == ""
    shown = cli(["caches", "--model", str(tmp_path), "--tokens", "64"]).stdout
    others = shown.partition("option that has to be given: ")[2].partition(".")[0]
    assert set(others.replace(",", " ").split()) == {name for name, why in refused.items() if why}
    shown = cli(["caches", "hybrid", "--model", str(tmp_path)]).stdout
    assert "For this model there is no size: cache='hybrid' is for models of which" in " ".join(shown.split())


COMPLETIONS = """
import os, sys
from engine.cli import main
sys.argv = ["engine"]
os.environ["_ENGINE_COMPLETE"] = "complete_bash"
for words in sys.stdin.read().splitlines():
    os.environ |= {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    try:
        main()
    except SystemExit:
        print("---")
"""


def test_completion():
    expected = {
        "engine gen": ["generate"],
        "engine generate --cache ": [*caches.names(), "auto"],
        "engine plan --cache ": caches.names(),
        "engine generate --cache st": ["static"],
        "engine generate --linears one": ["onednn"],
        "engine generate --config ": configs.presets(),
        "engine generate --pre": ["--prefill-chunk-tokens"],
    }
    command = [sys.executable, "-c", COMPLETIONS]
    done = subprocess.run(command, input="\n".join(expected), capture_output=True, text=True, timeout=60)
    *found, end = done.stdout.split("---\n")
    assert end == ""
    for names, words in zip(found, expected.values(), strict=True):
        assert sorted(names.split()) == sorted(words)


@pytest.mark.slow
def test_on_a_terminal_it_says_what_it_does():
    shown, code = in_terminal(["engine", "generate", PROMPT, "--max-new-tokens", "200", "--stats"])
    assert code == 0
    assert "starting torch and transformers" in shown
    assert re.search(r"\d+ of 200 tokens, [\d.]+ tokens/s", shown)
    quiet = subprocess.run([*ENGINE, "generate", PROMPT, "--max-new-tokens", "5"], capture_output=True, timeout=120)
    assert quiet.stderr == b""


def test_a_draft_whose_vocabulary_has_more_ids_as_padding(cli, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(engine.SHIPPED_MODEL)
    model.resize_token_embeddings(model.config.vocab_size + 64)
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL).save_pretrained(tmp_path)
    plain = cli(["generate", PROMPT, "--max-new-tokens", "8"])
    drafted = cli(["generate", PROMPT, "--max-new-tokens", "8", "--draft", str(tmp_path)])
    assert (drafted.exit_code, drafted.stdout) == (0, plain.stdout), drafted.stderr
