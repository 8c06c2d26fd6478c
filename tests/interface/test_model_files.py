"""Models in other files than those of `save_pretrained`: GGUF, and adapters of PEFT."""

import importlib.util
import json

import pytest
import torch
from gguf_files import write_gguf
from transformers import AutoModelForCausalLM

import engine

PROMPT = "import os\n"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """The small model of the package."""
    gguf = pytest.importorskip("gguf")
    model = AutoModelForCausalLM.from_pretrained(engine.SHIPPED_MODEL, dtype=torch.float32)
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    tokenizer = json.loads((engine.SHIPPED_MODEL / "tokenizer.json").read_text())["model"]
    return write_gguf(model, path, gguf.GGMLQuantizationType.F32, tokenizer)


@pytest.mark.slow
def test_a_gguf_file_is_a_model(cli, shipped, gguf_file):
    gen, expected = engine.Generator(gguf_file), shipped.generate(PROMPT, max_new_tokens=8)
    assert gen.generate(PROMPT, max_new_tokens=8).text == expected.text
    [score], [same] = gen.score(PROMPT), shipped.score(PROMPT)
    assert score.logprobs == pytest.approx(same.logprobs, abs=1e-3)
    done = cli(["generate", PROMPT, "--model", str(gguf_file), "-n", "8"])
    assert (done.exit_code, done.stdout) == (0, expected.text[0] + "\n"), done.stderr
    assert cli(["plan", str(gguf_file), "--cache", "dynamic"]).exit_code == 0


def test_a_gguf_file_without_its_package(tmp_path, monkeypatch):
    gguf_file = tmp_path / "small.gguf"
    gguf_file.touch()
    find = importlib.util.find_spec
    monkeypatch.setattr(engine.loading.load, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(engine.InputError, match="package gguf, which is not installed: pip install gguf"):
        engine.Generator(gguf_file)


def test_a_broken_gguf_file(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(engine.InputError, match=r"^no model could be loaded from") as failure:
        engine.Generator(tmp_path / "broken.gguf")
    assert "\n" not in str(failure.value)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """One without a tokenizer, whose weights change the text."""
    peft = pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(engine.SHIPPED_MODEL)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


def test_an_adapter_has_the_tokenizer_of_its_model(cli, shipped, adapter):
    gen = engine.Generator(adapter)
    assert gen.tokenizer.get_vocab() == shipped.tokenizer.get_vocab()
    out = gen.generate(PROMPT, max_new_tokens=8)
    assert out.text != shipped.generate(PROMPT, max_new_tokens=8).text
    for options in (["--model", str(adapter)], ["--adapter", str(adapter)]):
        done = cli(["generate", PROMPT, "-n", "8", *options])
        assert (done.exit_code, done.stdout) == (0, out.text[0] + "\n"), done.stderr


def test_adapters_that_do_not_fit(cli, adapter, tmp_path):
    done = cli(["generate", PROMPT, "--adapter", str(tmp_path)])
    assert done.exit_code == 2
    assert "has no adapter_config.json: give the folder" in done.stderr
    done = cli(["generate", PROMPT, "--adapter", str(adapter), "--tp", "2"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    (tmp_path / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    done = cli(["generate", PROMPT, "--adapter", str(tmp_path)])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: no model could be loaded from")
