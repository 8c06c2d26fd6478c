"""compile="auto": hooks, forwards, weights and layers that change are taken into account; the model stays as it was."""

import copy
import shutil
import threading
import types

import pytest
import torch
from architectures import prompt, tiny_model
from compiled import AUTO, GREEDY, generator_of, reference
from torch import nn

import engine
from engine.compiling import layer_compiler
from engine.compiling.compiled_layer import LayerChain, are_chained

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.timeout(600),
]


def test_weights_that_move_are_bound_again(llama):
    generator = generator_of(llama)
    with torch.no_grad():
        for layer in llama.model.layers:
            layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight * 0.5)
            layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight * 0.5
    out = generator.generate(prompt(2), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(2)))
    assert out.stats.compiled == "4 layers"


def test_a_call_without_compiled_layers(llama, monkeypatch):
    """Also in a batch, where a step is joined with those of calls that would take them."""
    generator, calls = generator_of(llama), []
    compute = LayerChain._compute
    monkeypatch.setattr(LayerChain, "_compute", lambda *args, **kwargs: calls.append(1) or compute(*args, **kwargs))
    out = generator.generate(prompt(2), **GREEDY, disable_compile=True)
    assert torch.equal(out.sequences, reference(llama, prompt(2)))
    assert (out.stats.compiled, calls) == ("off: disable_compile=True", [])
    plain = prompt(1, pads=0)["input_ids"]
    for disabled in (False, True):
        calls.clear()
        asked = [{"prompt": plain, **GREEDY}, {"prompt": plain, "disable_compile": disabled, **GREEDY}]
        for one in generator.generate_many(asked):
            assert torch.equal(one.result().sequences, reference(llama, prompt(1, pads=0)))
        assert (len(calls) == 0) == disabled


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


@pytest.mark.usefixtures("builds_nothing")
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
    out = generator.generate(prompt(2), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(2)))
    assert out.stats.compiled == "4 layers"


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


@pytest.mark.slow
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
    assert out.stats.compiled.startswith("off: its layers have modules of another library (test_changed_layers.Scaled")


@pytest.mark.parametrize("what", ["an attribute", "training"])
def test_what_changes_within_layers_is_computed_by_themselves(llama, what, monkeypatch):
    generator = generator_of(llama)
    monkeypatch.setattr(layer_compiler, "start_building", lambda *a: None)
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
