"""compile="auto": layers as compiled code give the same text; whatever is wrong leaves them out."""

import copy
import dataclasses
import gc
import os
import random
import shutil
import stat
import subprocess
import threading
import types
import weakref
from pathlib import Path

import pytest
import torch
from architectures import prompt, suiting, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import caches
import engine
from caches.machine import cache_folder
from engine.model import compiled_layer, layer_attention, layer_packages, package_process
from engine.model.layer_chain import LayerChain, are_chained
from engine.model.layer_step import _structure, have_shapes, rows_like
from engine.model.package_builder import failure_of

AUTO = engine.EngineConfig(compile="auto")
GREEDY = {"max_new_tokens": 8, "do_sample": False}

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.timeout(600),
]


def reference(model, inputs, **arguments):
    return model.generate(**inputs, **GREEDY | arguments)


def generator_of(model, rows=2):
    generator = engine.Generator(model, config=AUTO)
    assert generator.warmup(prompt(rows), **GREEDY).endswith("layers")
    return generator


@pytest.fixture
def llama():
    """A model of its own, whose layers are compiled: once, as all tests here have the same shapes."""
    model = copy.deepcopy(tiny_model("llama"))
    generator_of(model)
    return model


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in
    ("gemma2", "gpt2", "mixtral", "jamba")), *(pytest.param(name, marks=pytest.mark.product) for name in
    ("opt", "qwen3"))])  # fmt: skip
def test_the_same_text_for_other_lengths_rows_and_weights(name):
    model = copy.deepcopy(tiny_model(name))
    generator = generator_of(model)
    for inputs in (prompt(2), prompt(3, tokens=20), prompt(4, tokens=5, pads=0), prompt(2, tokens=40, seed=1)):
        out = generator.generate(inputs, **GREEDY)
        assert torch.equal(out.sequences, reference(model, inputs))
        assert out.stats.compiled.endswith("layers")
    assert generator.pools["graphs"] == 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)  # in place: the code reads the weights where they are
    assert torch.equal(generator.generate(prompt(2), **GREEDY).sequences, reference(model, prompt(2)))


def test_other_strategies(llama):
    generator = engine.Generator(llama, config=AUTO)
    for arguments in ({"num_beams": 3}, {"num_beams": 2, "length_penalty": 0.5}, {"prompt_lookup_num_tokens": 3}):
        out = generator.generate(prompt(1, pads=0), **GREEDY | arguments)
        assert torch.equal(out.sequences, reference(llama, prompt(1, pads=0), **arguments))
        assert out.stats.compiled == "4 layers" or "prompt_lookup_num_tokens" in arguments
    out = generator.generate(prompt(65), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(65)))
    assert out.stats.compiled.startswith("off: for more than 64 rows")
    out = generator.generate(prompt(3), **GREEDY, output_hidden_states=True, return_dict_in_generate=True)
    assert torch.equal(out.sequences, reference(llama, prompt(3)))
    assert len(out.hidden_states) == GREEDY["max_new_tokens"]
    for one in (out, generator.generate(prompt(1, pads=0), **GREEDY, penalty_alpha=0.6, top_k=3)):
        assert one.stats.compiled == "off: a step returns what its layers record"


@pytest.mark.slow
def test_tokens_that_are_verified(llama, monkeypatch):
    generator, arguments = generator_of(llama, rows=1), GREEDY | {"max_new_tokens": 24, "prompt_lookup_num_tokens": 3}
    inputs = prompt(1, pads=0)["input_ids"].repeat(1, 3)
    text = reference(llama, {"input_ids": inputs}, **arguments)
    again = {"input_ids": torch.cat([text, inputs[:, -3:]], dim=1)}  # its own text proposes
    for _ in range(3):
        generator.generate(again, **arguments)
        generator._runner.finish_compiling()
    counted, compute = [], layer_packages._Set._chained

    def counting(self, inputs, attention):
        counted.append(inputs["input_ids"].shape[1])
        return compute(self, inputs, attention)

    monkeypatch.setattr(layer_packages._Set, "_chained", counting)
    out = generator.generate(again, **arguments)
    assert torch.equal(out.sequences, reference(llama, again, **arguments))
    assert out.stats.compiled == "4 layers"
    assert max(counted) == 4


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


def test_weights_that_move_are_bound_again(llama):
    generator = generator_of(llama)
    with torch.no_grad():
        for layer in llama.model.layers:
            layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight * 0.5)
            layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight * 0.5
    out = generator.generate(prompt(2), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(2)))
    assert out.stats.compiled == "4 layers"


def test_code_that_computes_something_else_is_not_used(llama, monkeypatch, caplog):
    load = compiled_layer.load_package
    monkeypatch.setattr(compiled_layer, "load_package", lambda *a: lambda tensors: [load(*a)(tensors)[0] * 1.01])
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
        return constants(["constant of the compiler"])

    monkeypatch.setattr(compiled_layer, "load_package", fail)
    out = engine.Generator(llama, config=AUTO).generate(prompt(2), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(2)))
    assert out.stats.compiled == "off: KeyError: 'constant of the compiler'"


@pytest.mark.slow
def test_mixed_calls_compile_nothing_more(llama, monkeypatch):
    generator, draw, compiled = engine.Generator(llama, config=AUTO), random.Random(0), 0
    for rows in (1, 2, 5, 9, 17):
        assert generator.warmup(prompt(rows, pads=0), **GREEDY) == "4 layers"
    assert generator.pools["graphs"] == 5
    loaded, load = [], compiled_layer.load_package
    monkeypatch.setattr(compiled_layer, "load_package", lambda *given: loaded.append(given) or load(*given))
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is built
    for _ in range(100):
        arguments = draw.choice(
            [{}, {}, {"num_beams": 2}, {"do_sample": True, "top_k": 1}, {"repetition_penalty": 1.3}]
        )
        inputs = prompt(draw.randint(1, 16), tokens=draw.randint(8, 90), seed=draw.randint(0, 99))
        out = generator.generate(inputs, **GREEDY | arguments)
        assert torch.equal(out.sequences, llama.generate(**inputs, **GREEDY | arguments))
        compiled += out.stats.compiled == "4 layers"
    assert compiled == 100
    assert not loaded


@pytest.mark.covering("values")
@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_in_few_bits(weights, rows):
    config = LlamaConfig(vocab_size=101, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
                         num_attention_heads=4, initializer_range=0.1, eos_token_id=None)  # fmt: skip
    torch.manual_seed(0)
    generator = engine.Generator(
        AutoModelForCausalLM.from_config(config).eval(), config=dataclasses.replace(AUTO, weights=weights)
    )
    scores = []
    for _ in range(2):
        out = generator.generate(prompt(rows, pads=0), **GREEDY, output_logits=True, return_dict_in_generate=True)
        scores.append(torch.stack(out.logits))
        state = generator.warmup(prompt(rows, pads=0), **GREEDY)
    assert state == out.stats.compiled == "3 layers"
    eager, compiled = scores
    assert (eager - compiled).norm() < 0.05 * eager.norm()  # activations are rounded to bfloat16


def test_hooks_of_the_user_are_called(llama):
    generator, calls = generator_of(llama), []
    hook = llama.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(generator.generate(prompt(2), **GREEDY).sequences, reference(llama, prompt(2)))
    assert len(calls) == 2 * GREEDY["max_new_tokens"]
    assert generator.generate(prompt(2), **GREEDY).stats.compiled == "off: its layers have hooks"
    hook.remove()
    calls.clear()
    assert generator.generate(prompt(2), **GREEDY).stats.compiled == "4 layers"
    assert calls == []


def test_hooks_outside_the_layers_are_called_once_per_step(llama):
    calls = []
    llama.model.norm.register_forward_hook(lambda *_: calls.append(1))
    out = engine.Generator(llama, config=AUTO).generate(prompt(2), **GREEDY)
    assert (out.stats.compiled, len(calls)) == ("4 layers", GREEDY["max_new_tokens"])


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


@pytest.mark.parametrize("when", ["before", "afterwards"])
def test_a_forward_of_the_user_stays_and_is_called(when, llama):
    def steered(module, hidden, *args, **kwargs):
        return type(module).forward(module, hidden * 0.7, *args, **kwargs)

    generator = generator_of(llama) if when == "afterwards" else engine.Generator(llama, config=AUTO)
    plain = reference(llama, prompt(2))
    changed = [llama.model.layers[1], llama.model.layers[2].mlp]
    for module in changed:
        module.forward = types.MethodType(steered, module)
    for _ in range(2):
        out = generator.generate(prompt(2), **GREEDY)
        assert torch.equal(out.sequences, reference(llama, prompt(2)))
        assert all("forward" in vars(module) for module in changed)
    assert not torch.equal(out.sequences, plain)
    if when == "before":
        assert "forward of its layers' LlamaDecoderLayer was replaced" in out.stats.compiled
    for module in changed:
        del module.forward
    assert torch.equal(generator.generate(prompt(2), **GREEDY).sequences, plain)


def test_a_bias_that_is_added_later(llama):
    generator = generator_of(llama)
    for layer in llama.model.layers:
        layer.self_attn.o_proj.bias = nn.Parameter(torch.ones(layer.self_attn.o_proj.out_features))
    assert torch.equal(generator.generate(prompt(2), **GREEDY).sequences, reference(llama, prompt(2)))


def test_the_model_is_as_it_was_in_other_threads_and_afterwards(llama):
    generator, found = generator_of(llama), []
    inputs, forward = prompt(2), llama.model.layers[0].mlp.act_fn.forward

    def elsewhere():
        with torch.no_grad():
            found.append(llama(**inputs).logits)

    def other_caller(chunk_ids):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    expected = llama(**inputs).logits
    for chunk in generator.stream(inputs, **GREEDY):
        other_caller(chunk)
    assert all(torch.equal(logits, expected) for logits in found)
    assert found
    assert not any("forward" in vars(module) for module in llama.modules())
    assert llama.model.layers[0].mlp.act_fn.forward == forward


def calls_of_chains(monkeypatch, change=lambda hidden: hidden):
    """The threads for which a chain was computed."""
    calls, compute = [], LayerChain._compute

    def counted(self, *args, **kwargs):
        calls.append(threading.get_ident())
        return change(compute(self, *args, **kwargs))

    monkeypatch.setattr(LayerChain, "_compute", counted)
    return calls


def test_all_layers_are_one_call(llama, monkeypatch):
    """Other threads have the model's own layers, at any moment."""
    generator, calls, found = generator_of(llama), calls_of_chains(monkeypatch), []
    inputs = prompt(2)
    expected, layers = llama(**inputs).logits, llama.model.layers

    def elsewhere():
        given = llama.model.layers
        with torch.no_grad():
            found.append((given is layers, len(given), given[3] is layers[3], llama(**inputs).logits))

    def other_caller(module, args):
        if len(found) < 3 and args[0].shape[1] == 1:  # in a step
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

    llama.model.norm.register_forward_pre_hook(other_caller)
    assert torch.equal(generator.generate(inputs, **GREEDY).sequences, reference(llama, inputs))
    assert [one[:3] for one in found] == [(False, 4, True)] * 3
    assert all(torch.equal(logits, expected) for *_, logits in found)
    assert calls == [threading.get_ident()] * (GREEDY["max_new_tokens"] - 1)
    assert llama.model.layers is layers


def test_other_layers_are_compiled_again(llama):
    generator = generator_of(llama)
    other = copy.deepcopy(llama.model.layers[2])
    with torch.no_grad():
        other.mlp.up_proj.weight.mul_(-0.5)
    llama.model.layers[2] = other
    out = generator.generate(prompt(2), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(2)))
    assert out.stats.compiled == "4 layers"
    llama.model.layers[1].mlp = copy.deepcopy(other.mlp)
    assert torch.equal(generator.generate(prompt(2), **GREEDY).sequences, reference(llama, prompt(2)))


def _fail(hidden):
    raise IndexError("list index out of range")


@pytest.mark.parametrize("change", [lambda hidden: hidden.flip(-1), _fail], ids=["other scores", "an error"])
def test_layers_that_are_no_chain_are_called_one_by_one(llama, monkeypatch, change):
    calls = calls_of_chains(monkeypatch, change)
    generator = generator_of(llama)
    assert len(calls) == 1
    out = generator.generate(prompt(2), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(2)))
    assert (out.stats.compiled, len(calls)) == ("4 layers", 1)


def test_layers_with_other_masks_are_no_chain():
    """While a text is shorter than the window, all get the same mask: none."""
    model = copy.deepcopy(tiny_model("qwen3"))
    generator = engine.Generator(model, config=AUTO)
    for _ in range(3):
        state = generator.warmup(prompt(2, tokens=2, pads=0), **GREEDY)
    for tokens in (2, 20):
        out = generator.generate(prompt(2, tokens=tokens, pads=0), **GREEDY)
        assert torch.equal(out.sequences, reference(model, prompt(2, tokens=tokens, pads=0)))
        assert out.stats.compiled == state == "2 layers"


@pytest.mark.parametrize("name", ["gemma4_text", "gemma3n_text"])
def test_layers_that_share_their_keys(name):
    model = tiny_model(name)
    out = engine.Generator(model, config=AUTO).generate(prompt(1, tokens=4, pads=0), **GREEDY)
    assert torch.equal(out.sequences, reference(model, prompt(1, tokens=4, pads=0)))


def test_a_dropped_result_frees_its_cache(llama):
    generator = generator_of(llama)
    gc.collect()
    gc.disable()
    try:
        cache = weakref.ref(generator.generate(prompt(2), **GREEDY).cache)
        assert cache() is None
    finally:
        gc.enable()


def test_an_exception_of_a_signal_comes_through_compiled_code():
    """Its handler ran before the operator could catch it: torch has made another error of it."""

    def code(inputs):
        raise RuntimeError("SystemExit: SIGTERM")

    with pytest.raises(SystemExit, match="SIGTERM"):
        layer_attention.run(code, [], lambda *new: new[0])


def test_a_run_without_steps_says_so(llama):
    generator = generator_of(llama)
    for arguments in ({"cache": "none"}, {"max_new_tokens": 1}):
        out = generator.generate(prompt(2), **GREEDY | arguments)
        assert out.stats.compiled == "off: no step after a prompt yet"


def test_which_layers_are_a_chain():
    one, two, three, mask, other = (torch.zeros(1) for _ in range(5))
    assert are_chained([(((one,), {"mask": mask}), two), (((two,), {"mask": mask}), three)])
    assert are_chained([(((one, 0.5), {}), two), (((two, 0.5), {}), three)])
    assert not are_chained([(((one,), {"mask": mask}), two), (((two,), {"mask": other}), three)])
    assert not are_chained([(((one,), {"mask": mask}), two), (((two,), {}), three)])
    assert not are_chained([(((one,), {}), two), (((other,), {}), three)])
    assert not are_chained([(((one, 0.5), {}), two), (((two, 0.6), {}), three)])
    assert not are_chained([(((one,), {}), (two,)), (((two,), {}), (three,))])
    assert not are_chained([(((), {"hidden": one}), two), (((), {"hidden": two}), three)])


class Scaled(nn.Linear):
    def forward(self, input):
        return super().forward(input) * self.scale


def test_modules_of_other_libraries_keep_their_own_forward(llama):
    llama.model.layers[2].mlp.up_proj.__class__ = Scaled
    llama.model.layers[2].mlp.up_proj.scale = 0.7
    out = engine.Generator(llama, config=AUTO).generate(prompt(2), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(2)))
    assert out.stats.compiled.startswith("off: its layers have modules of another library (test_compiled_layers.Scaled")


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
    monkeypatch.setattr(package_process, "_give_way", lambda process: None)
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
    find = layer_packages.package_of
    monkeypatch.setattr(layer_packages, "package_of", lambda *a: packages.append(find(*a)) or packages[-1])
    monkeypatch.setattr(subprocess, "Popen", fail)
    monkeypatch.setattr(package_process, "_give_way", lambda process: None)
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


@pytest.mark.parametrize("cache", suiting("llama"))
def test_all_caches(llama, cache):
    options = {"sink": {"window_length": 12}, "quantized_sink": {"window_length": 12}}.get(cache)
    arguments = {"cache": cache, "cache_config": options} | GREEDY
    generator, off = engine.Generator(llama, config=AUTO), engine.Generator(llama)
    for inputs, more in ((prompt(2), {}), (prompt(3, tokens=20), {}), (prompt(1, pads=0), {"num_beams": 3})):
        out, expected = (one.generate(inputs, **arguments | more) for one in (generator, off))
        assert torch.equal(out.sequences, expected.sequences)
        assert out.stats.compiled == ("off: no step after a prompt yet" if cache == "none" else "4 layers")


def test_prompts_of_a_batch(llama):
    prompts = [prompt(1, tokens=tokens, pads=0)["input_ids"] for tokens in (6, 19, 11)]
    found = {}
    for config in (AUTO, engine.EngineConfig()):
        generator = engine.Generator(llama, config=config)
        done = [item.result() for item in generator.generate_many(prompts, **GREEDY)]
        found[config.compile] = sorted(out.sequences.tolist() for out in done), {out.stats.compiled for out in done}
    assert found["auto"][0] == found["off"][0]
    assert found["auto"][1] == {"4 layers"}


def test_eager_attention(llama):
    llama.set_attn_implementation("eager")
    out = generator_of(llama).generate(prompt(2), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(2)))
    assert out.stats.compiled == "4 layers"


def test_a_cache_may_keep_what_it_is_given():
    """Compiled code writes other values there."""
    kept = []

    def code(inputs):
        found = torch.ops.kvengine.layer_attention(*inputs)
        for tensor in inputs:
            tensor.zero_()
        return [found]

    def attention(query, key, value):
        kept.extend((key, value))
        return query.transpose(1, 2)

    query, key, value = torch.rand(2, 4, 1, 8), torch.rand(2, 2, 1, 8), torch.rand(2, 2, 1, 8)
    before = key.clone(), value.clone()
    [found] = layer_attention.run(code, [query, key, value], attention)
    assert found.shape == (2, 1, 4, 8)
    assert all(map(torch.equal, kept, before))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()])
def test_what_a_cache_raises_comes_through_compiled_code(llama, error, monkeypatch):
    generator, calls, update = generator_of(llama), [], caches.Cache.update

    def failing(self, *arguments):
        calls.append(arguments)
        if len(calls) == 4 * 3 + 2:  # the third step, layer 1
            raise error
        return update(self, *arguments)

    monkeypatch.setattr(caches.Cache, "update", failing)
    expected = reference(llama, prompt(2))
    calls.clear()
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt) as stopped:
            generator.generate(prompt(2), **GREEDY)
        found = stopped.value.partial.sequences
        assert torch.equal(found, expected[:, : found.shape[1]])
    else:
        out = generator.generate(prompt(2), **GREEDY)
        assert torch.equal(out.sequences, expected)
        assert [fallback.name for fallback in out.stats.fallbacks] == ["release"]
    assert len(calls) > 4 * 3 + 1


def test_layers_with_another_attention_are_computed_without():
    for name, why in (
        ("falcon", "its layers do not give what a cache returns to an attention function"),
        ("deepseek_v3", "its layers do not give what a cache returns to an attention function"),
        ("mamba", "none of its layers"),
    ):
        model = tiny_model(name)
        out = engine.Generator(model, config=AUTO).generate(prompt(2), **GREEDY)
        assert torch.equal(out.sequences, reference(model, prompt(2)))
        assert out.stats.compiled.startswith(f"off: {why}")


def test_ranges_of_rows():
    assert [rows_like(rows) for rows in (1, 2, 4, 5, 9, 32)] == [(1, 1), (2, 4), (2, 4), (5, 8), (9, 16), (17, 32)]


def test_warmup_needs_the_name_of_a_cache():
    model = tiny_model("llama")
    live = caches.build("static", model.config, max_cache_len=32)
    with pytest.raises(engine.OptionError, match="give the name of a cache"):
        engine.Generator(model, config=AUTO).warmup(prompt(2), cache=live)


def test_warmup_without_compiled_layers_says_so():
    assert engine.Generator(tiny_model("llama")).warmup(prompt(2), max_new_tokens=3) == "off"


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


@pytest.mark.parametrize("what", ["an attribute", "training"])
def test_what_changes_within_layers_is_computed_by_themselves(llama, what, monkeypatch):
    generator = generator_of(llama)
    monkeypatch.setattr(layer_packages, "start_building", lambda *a: None)
    attention = llama.model.layers[1].self_attn
    if what == "training":
        attention.training = True
    else:
        attention.scaling *= 3
    expected = reference(llama, prompt(2))
    for _ in range(2):
        out = generator.generate(prompt(2), **GREEDY)
        assert torch.equal(out.sequences, expected)
    if what == "training":
        attention.training = False
        assert generator.generate(prompt(2), **GREEDY).stats.compiled == "4 layers"


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
