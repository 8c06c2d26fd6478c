"""A repository that brings Python code: refused unless it is trusted, and nothing is ever asked on standard input."""

import json
import shutil

import pytest

import engine

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A local folder with a model type that transformers does not know, and the code of it."""
    folder = tmp_path_factory.mktemp("own_model") / "model"
    shutil.copytree(engine.SHIPPED_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_llama", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(CODE)
    return folder


@pytest.fixture(autouse=True)
def _nothing_is_asked(monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("standard input was asked"))


def test_it_is_refused(repository, tokenizer):
    for own in (None, tokenizer):
        with pytest.raises(engine.InputError, match=r"brings Python code of its own.*trust_remote_code=True"):
            engine.Generator(repository, own)


def test_its_configuration_is_refused(repository):
    with pytest.raises(engine.InputError, match=r"never runs to read a configuration.*model that was loaded"):
        engine.plan(repository, prompt_tokens=4, max_new_tokens=4)


def test_it_runs_where_it_is_trusted(repository, shipped, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    config = engine.EngineConfig(trust_remote_code=True, dtype="float32", device_map="cpu")
    generator = engine.Generator(repository, config=config)
    assert type(generator.model).__name__ == "OwnModel"
    assert generator.generate("def ", max_new_tokens=4).text == shipped.generate("def ", max_new_tokens=4).text


def test_the_command(repository, cli):
    done = cli(["generate", "def", "--model", str(repository)], input="y\n")
    assert done.exit_code == 2
    assert "brings Python code of its own" in done.stderr
    assert "--trust-remote-code" in done.stderr
    done = cli(["plan", str(repository)])
    assert done.exit_code == 2
    assert "--trust-remote-code" not in done.stderr
