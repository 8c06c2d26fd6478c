"""compile="auto": packages of compiled layers are built once, kept and checked, and left out where they are wrong."""

import copy
import os
import random
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import torch
from architectures import prompt, tiny_model
from compiled import AUTO, GREEDY, generator_of, reference
from transformers import StoppingCriteriaList

import caches
import engine
from caches.platform.machine import cache_folder
from configs import ConfigError
from engine.compiling import compiled_layer, layer_compiler, package_builder
from engine.compiling.layer_step import _structure, have_shapes, rows_like
from engine.compiling.package_builder import failure_of

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.timeout(600),
]


def test_other_models_and_processes_find_the_code(llama, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is built
    other = copy.deepcopy(llama)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    out = engine.Generator(other, config=AUTO).generate(prompt(4), **GREEDY)
    assert (out.stats.compiled, out.sequences.tolist()) == ("4 layers", reference(other, prompt(4)).tolist())
    if os.name == "posix":
        assert stat.S_IMODE((cache_folder() / "layers").stat().st_mode) == 0o700


def test_code_that_computes_something_else_is_not_used(llama, monkeypatch, caplog):
    load = compiled_layer.load_package

    def wrong(*arguments):
        return [lambda tensors, code=code: [code(tensors)[0] * 1.01] for code in load(*arguments)]

    monkeypatch.setattr(compiled_layer, "load_package", wrong)
    with caplog.at_level("WARNING", "engine"):
        out = engine.Generator(llama, config=AUTO).generate(prompt(2), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(2)))
    assert out.stats.compiled == "off: the compiled layers differ by 1.0% from the model's own"
    assert "without compiled layers" in caplog.text


@pytest.fixture
def own_folder(llama, tmp_path, monkeypatch):
    """A copy of the folder of packages, which other tests use meanwhile."""
    shutil.copytree(cache_folder(), tmp_path / "cache")
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("own_folder")
def test_a_package_that_cannot_be_loaded_is_left_out(llama, monkeypatch):
    def fail(path, constants):
        return [tensors["constant of the compiler"] for tensors in constants]

    monkeypatch.setattr(compiled_layer, "load_package", fail)
    out = engine.Generator(llama, config=AUTO).generate(prompt(2), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(2)))
    assert out.stats.compiled == "off: KeyError: 'constant of the compiler'"


@pytest.mark.slow
def test_mixed_calls_compile_nothing_more(llama, monkeypatch):
    generator, draw, compiled = engine.Generator(llama, config=AUTO), random.Random(0), 0
    for rows in (1, 2, 5):
        assert generator.warmup(prompt(rows, pads=0), **GREEDY) == "4 layers"
    assert generator.pools["graphs"] == 3
    loaded, load = [], compiled_layer.load_package
    monkeypatch.setattr(compiled_layer, "load_package", lambda *given: loaded.append(given) or load(*given))
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is built
    for _ in range(100):
        arguments = draw.choice(
            [{}, {}, {"num_beams": 2}, {"do_sample": True, "top_k": 1}, {"repetition_penalty": 1.3}]
        )
        inputs = prompt(draw.randint(1, 4), tokens=draw.randint(8, 90), seed=draw.randint(0, 99))
        out = generator.generate(inputs, **GREEDY | arguments)
        assert torch.equal(out.sequences, llama.generate(**inputs, **GREEDY | arguments))
        compiled += out.stats.compiled == "4 layers"
    assert compiled == 100
    assert not loaded


def with_one_row_of_positions(inputs):
    return inputs | {"position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}


def test_code_gets_no_tensors_that_it_was_not_compiled_for(llama, monkeypatch):
    """It would read and write beyond their ends, or take one data type for another."""
    generator, eager = generator_of(llama), engine.Generator(llama, config=engine.EngineConfig(cache="static"))
    inputs, given = prompt(4, pads=0), []
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is built
    monkeypatch.setattr(
        compiled_layer, "have_shapes", lambda *arguments: given.append(have_shapes(*arguments)) or given[-1]
    )
    for _ in range(3):  # a call of the one kind does not change the code for the other
        for kind, state in ((with_one_row_of_positions(inputs), "off: its layers were compiled for"),
                            (inputs, "4 layers"), (prompt(4), "4 layers")):  # fmt: skip
            out = generator.generate(**kind, **GREEDY)
            assert torch.equal(out.sequences, reference(llama, {name: kind[name] for name in inputs}))
            assert out.stats.compiled.startswith(state)
    assert given.count(False) == 3
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = (one.generate(prompt(2), **GREEDY) for one in (generator, eager))
    assert out.stats.compiled.startswith("off: autocast")
    assert torch.equal(out.sequences, expected.sequences)
    llama.set_attn_implementation("eager")
    assert torch.equal(generator.generate(prompt(2), **GREEDY).sequences, reference(llama, prompt(2)))
    llama.set_attn_implementation("sdpa")
    out = generator.generate(prompt(2), **GREEDY)
    assert (out.stats.compiled, out.sequences.tolist()) == ("4 layers", reference(llama, prompt(2)).tolist())


@pytest.mark.slow  # builds packages of its own
def test_another_attention_in_the_middle_of_a_run(llama):
    def changed(ids, scores):
        llama.set_attn_implementation("sdpa" if ids.shape[1] > length + 3 else "eager")
        return torch.zeros(len(ids), dtype=torch.bool)

    inputs = prompt(3)
    length, criteria = inputs["input_ids"].shape[1], StoppingCriteriaList([changed])
    generator = generator_of(llama, 3)
    llama.set_attn_implementation("eager")
    generator.warmup(inputs, **GREEDY)
    expected = reference(llama, inputs, stopping_criteria=criteria)
    llama.set_attn_implementation("eager")
    out = generator.generate(**inputs, **GREEDY, stopping_criteria=criteria)
    assert (out.stats.compiled, out.sequences.tolist()) == ("4 layers", expected.tolist())


@pytest.mark.slow
def test_what_most_calls_give_is_compiled(llama):
    generator, inputs = generator_of(llama), prompt(4, pads=0)
    for _ in range(5):
        generator.generate(**with_one_row_of_positions(inputs), **GREEDY)
    generator._runner.finish_compiling()
    for _ in range(2):
        out = generator.generate(**with_one_row_of_positions(inputs), **GREEDY)
        assert torch.equal(out.sequences, reference(llama, inputs))
    assert out.stats.compiled == "4 layers"
    assert torch.equal(generator.generate(prompt(4), **GREEDY).sequences, reference(llama, prompt(4)))


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path))
    return tmp_path


class Builder:
    """Stands for the process that compiles. code: its exit code; None while it runs."""

    pid, code = os.getpid(), None

    def __init__(self, command, **options):
        self.job = Path(command[-1])

    def poll(self):
        return self.code

    def wait(self):
        pass


@pytest.mark.usefixtures("empty_folder")
def test_no_call_waits(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", Builder)
    monkeypatch.setattr(package_builder, "_give_way", lambda process: None)
    model = tiny_model("llama")
    generator = engine.Generator(model, config=AUTO)
    for _ in range(3):
        out = generator.generate(prompt(2), **GREEDY)
        assert torch.equal(out.sequences, reference(model, prompt(2)))
        assert out.stats.compiled == "off: another process compiles the layers"
    [job] = (cache_folder() / "layers").glob("*.job")
    assert job.stat().st_size < 200_000  # without the weights
    monkeypatch.setattr(Builder, "code", 1)
    out = generator.generate(prompt(2), **GREEDY)
    assert torch.equal(out.sequences, reference(model, prompt(2)))
    assert out.stats.compiled == "off: the process that compiles its layers ended"


@pytest.mark.usefixtures("empty_folder")
def test_what_could_not_be_built_is_not_tried_in_every_process(monkeypatch):
    started = []

    def fail(command, **options):
        started.append(command)
        for package in packages:
            failure_of(package).write_text("it is too hot")
        return Builder(command)

    packages = []
    find = layer_compiler.package_of
    monkeypatch.setattr(layer_compiler, "package_of", lambda *a: packages.append(find(*a)) or packages[-1])
    monkeypatch.setattr(subprocess, "Popen", fail)
    monkeypatch.setattr(package_builder, "_give_way", lambda process: None)
    monkeypatch.setattr(Builder, "code", 0)
    model = tiny_model("llama")
    for _ in range(2):
        assert "it is too hot" in engine.Generator(model, config=AUTO).generate(prompt(2), **GREEDY).stats.compiled
    assert len(started) == 1
    assert "it is too hot" in engine.Generator(model, config=AUTO).warmup(prompt(2), **GREEDY)
    assert len(started) == 2


@pytest.mark.usefixtures("empty_folder")
def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    out = engine.Generator(tiny_model("llama"), config=AUTO).generate(prompt(2), **GREEDY)
    assert out.stats.compiled == "off: there is no C++ compiler (no-such-compiler), for example of the package g++"


def test_ranges_of_rows():
    assert [rows_like(rows) for rows in (1, 2, 4, 5, 9, 32)] == [(1, 1), (2, 4), (2, 4), (5, 8), (9, 16), (17, 32)]


def test_warmup_needs_the_name_of_a_cache():
    model = tiny_model("llama")
    live = caches.build("static", model.config, max_cache_len=32)
    with pytest.raises(engine.OptionError, match="give the name of a cache"):
        engine.Generator(model, config=AUTO).warmup(prompt(2), cache=live)


def test_warmup_without_compiled_layers_says_so():
    assert engine.Generator(tiny_model("llama")).warmup(prompt(2), max_new_tokens=3) == "off"


def test_a_layer_that_torch_has_compiled_shares_the_code_of_others():
    layers = [copy.deepcopy(tiny_model("llama").model.layers[0]) for _ in range(2)]
    torch.compile(layers[1].mlp.gate_proj)
    torch.compile(layers[1])
    assert list(_structure(layers[0])) == list(_structure(layers[1]))


def test_settings_of_a_configuration_are_part_of_the_key():
    """Layers read some of them in their forward; what belongs to other parts of the model is shared."""
    layers = [copy.deepcopy(tiny_model("llama").model.layers[0]) for _ in range(3)]
    for layer, setting in zip(layers[1:], ({"clip_qkv": 2.0}, {"vocab_size": 7, "eos_token_id": 3}), strict=True):
        config = copy.deepcopy(layer.self_attn.config)
        config.update(setting)
        for module in layer.modules():
            if "config" in vars(module):
                module.config = config
    first, clipped, other_vocabulary = (list(_structure(layer)) for layer in layers)
    assert first == other_vocabulary
    assert first != clipped


@pytest.mark.usefixtures("own_folder")
def test_without_a_kernel_packages_stay_for_others(llama, monkeypatch):
    generator_of(llama)
    packages = set((cache_folder() / "layers").glob("*.pt2"))

    def fail():
        raise ConfigError("no compiler")

    monkeypatch.setattr(layer_compiler.KERNELS, "or_error", fail)
    out = engine.Generator(copy.deepcopy(llama), config=AUTO).generate(prompt(2), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(2)))
    assert "no compiler" in out.stats.compiled
    assert packages
    assert set((cache_folder() / "layers").glob("*.pt2")) == packages


@pytest.mark.usefixtures("own_folder")
def test_a_damaged_package_is_built_again(llama):
    generator = generator_of(llama)
    [package] = {layer.package for one in generator._runner._packages._sets.values() for layer in one._layers}
    content = package.read_bytes()
    package.write_bytes(content[: len(content) // 2])
    other = engine.Generator(copy.deepcopy(llama), config=AUTO)
    out = other.generate(prompt(2), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(2)))
    assert out.stats.compiled.startswith("off")
    assert not package.exists()
    package.write_bytes(content)  # as another process would
    other.warmup(prompt(2), **GREEDY)
    assert other.generate(prompt(2), **GREEDY).stats.compiled == "4 layers"
