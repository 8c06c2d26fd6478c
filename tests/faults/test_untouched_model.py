"""A run leaves the model's modules alone, also while it computes: copies, pickles and moves see an untouched model."""

import copy
import pickle

import pytest
import torch
from architectures import prompt, tiny_model
from interrupts import attributes, interrupted_twice
from leaks import hidden_layer
from torch import nn

import engine
from engine import linears

pytestmark = pytest.mark.skipif(not linears.has_onednn(), reason="this torch was built without oneDNN")

ROUTED = engine.EngineConfig(linears="onednn")


def zeroed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_during_a_step_has_weights_of_its_own(duplicate):
    # A new one: transformers leaves hooks in a model that has recorded hidden states, which cannot be pickled.
    model, inputs, copies = tiny_model.__wrapped__("llama"), prompt(), []

    def hook(*_):
        assert attributes(model).keys() == before.keys()
        assert all(attributes(model)[name] == of for name, of in before.items())
        if not copies:
            copies.append(None)
            handle.remove()
            copies[0] = duplicate(model)

    handle = hidden_layer(model).register_forward_hook(hook)
    before = attributes(model)
    engine.Generator(model, config=ROUTED).generate(inputs, max_new_tokens=3)
    found = zeroed(copies[0])
    assert not any("forward" in module.__dict__ for module in found.modules())
    with torch.no_grad():
        assert not found(**inputs).logits.any()
    assert torch.equal(  # the zeros are the copy's alone
        engine.generate(model, inputs, max_new_tokens=3).sequences,
        model.generate(**inputs, max_new_tokens=3, do_sample=False),
    )


def test_modules_are_as_they_were_after_two_ctrl_c():
    assert interrupted_twice(tries=10, seed=0)["tries"] == 10


@pytest.mark.slow
def test_modules_are_as_they_were_after_many_ctrl_c():
    assert interrupted_twice(tries=300, seed=1)["tries"] == 300


def test_routes_are_taken_in_the_thread_of_the_step_alone():
    layer, row = nn.Linear(48, 48), torch.randn(1, 48)
    assert linears.active.table is None
    with torch.no_grad():
        plain = layer(row)
        linears.table_for(layer, "onednn")
        assert torch.equal(layer(row), plain)


@pytest.mark.parametrize("use", [torch.jit.script, lambda layer: torch.compile(layer, backend="eager", fullgraph=True),
                                 torch.fx.symbolic_trace, pickle.dumps])  # fmt: skip
def test_other_users_of_linear_layers_see_no_difference(use):
    linears.table_for(nn.Linear(8, 8), "onednn")
    layer, rows = nn.Linear(8, 8), torch.randn(3, 8)
    used = use(layer)
    if callable(used):
        assert torch.equal(used(rows), layer(rows))
