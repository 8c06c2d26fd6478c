"""A run leaves the model's modules alone, also while it computes: copies, pickles and moves see an untouched model."""

import copy
import gc
import pickle
import threading
from contextlib import contextmanager, suppress

import pytest
import torch
from architectures import prompt, tiny_model
from interrupts import attributes, interrupted_twice
from leaks import hidden_layer
from multimodal import seeing_model, seen_prompt
from torch import nn
from transformers import DynamicCache

import caches
import engine
from engine.kernels import linear_backend
from engine.model.columns import Columns
from engine.model.model_inputs import ModelInputs
from engine.model.model_lock import turn_of

pytestmark = pytest.mark.skipif(not linear_backend.has_onednn(), reason="this torch was built without oneDNN")

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
    assert interrupted_twice(tries=150, seed=1)["tries"] == 150


@pytest.mark.parametrize("name", ["dynamic", "static", "quantized"])
def test_derivatives_stay_on_where_a_context_was_stopped_as_it_ended(name, monkeypatch):
    """As Ctrl-C may: the guard inside of such a context is then destroyed with the traceback, after the run."""
    enter, leave, were_on = torch.inference_mode.__enter__, torch.inference_mode.__exit__, []

    def entered(self):
        were_on.append(torch.is_grad_enabled())
        enter(self)

    def stopped(self, *error):
        if not were_on.pop():  # within the run
            raise KeyboardInterrupt
        leave(self, *error)

    monkeypatch.setattr(torch.inference_mode, "__enter__", entered)
    monkeypatch.setattr(torch.inference_mode, "__exit__", stopped)
    with suppress(KeyboardInterrupt):
        engine.generate(tiny_model("llama"), prompt(), num_beams=2, max_new_tokens=3, cache=name)
    gc.collect()
    found = torch.is_grad_enabled()
    torch.set_grad_enabled(True)  # for other tests
    assert found


def test_routes_are_taken_in_the_thread_of_the_step_alone(monkeypatch):
    model, layer, row, taken = tiny_model("llama"), nn.Linear(48, 48), torch.randn(1, 48), []
    route = linear_backend.Table.route
    monkeypatch.setattr(
        linear_backend.Table, "route", lambda self, *of: taken.append(threading.current_thread()) or route(self, *of)
    )

    @torch.no_grad()
    def use():
        plain.append(layer(row))

    def hook(*_):
        other = threading.Thread(target=use)
        other.start()
        other.join(30)
        assert linear_backend.active.table is not None
        use()

    plain = []
    handle = hidden_layer(model).register_forward_hook(hook)
    try:
        engine.Generator(model, config=ROUTED).generate(prompt(), max_new_tokens=1)
    finally:
        handle.remove()
    assert set(taken) == {threading.current_thread()}
    assert torch.equal(plain[0], nn.functional.linear(row, layer.weight, layer.bias))
    assert len(plain) == 2


@pytest.mark.parametrize("use", [torch.jit.script, lambda layer: torch.compile(layer, backend="eager", fullgraph=True),
                                 torch.fx.symbolic_trace,
                                 lambda layer: pickle.loads(pickle.dumps(layer.forward))])  # fmt: skip
def test_other_users_of_linear_layers_see_no_difference(use):
    linear_backend.table_for(nn.Linear(8, 8), "onednn")
    layer, rows = nn.Linear(8, 8), torch.randn(3, 8)
    assert torch.equal(use(layer)(rows), layer(rows))


@contextmanager
def forwards_in_turn(model):
    """Collects, of every forward of a part of the model, whether it had the model's lock and kept no graph."""
    had = []
    hooks = [
        module.register_forward_pre_hook(
            lambda *_: had.append(turn_of(model)._is_owned() and not torch.is_grad_enabled())
        )
        for module in model.modules()
    ]
    try:
        yield had
    finally:
        for hook in hooks:
            hook.remove()


def generates(model):
    return lambda: engine.generate(model, prompt(), max_new_tokens=2)


def sees(model):
    return lambda: engine.generate(model, seen_prompt("llava"), max_new_tokens=2)


def looks_up(model):
    """After tokens that only the cache has read: whether the model reads drafts on is tried, and this one does not."""
    first, generator = engine.generate(model, prompt(rows=1, pads=0), max_new_tokens=2), engine.Generator(model)
    generator._runner.facts._answers.whys.clear()
    generator._runner.facts._file = lambda: None  # another test may have tried it
    options = {"attention_mask": torch.ones(1, 15), "prompt_lookup_num_tokens": 3, "max_new_tokens": 2}

    def look_up():
        with pytest.raises(engine.OptionError, match="has to read all again"):
            generator.generate(first.sequences[:, -1:], cache=first.cache, **options)

    return look_up


def compares(model):
    """What a plain call has read, and a prompt part of which is given as embeddings."""
    inputs, cache = prompt(pads=0), DynamicCache(config=model.config)
    ids = torch.cat([inputs["input_ids"], inputs["input_ids"][:, -3:]], dim=1)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        embeds = model.get_input_embeddings()(ids[:, :5])
    runner, columns = engine.Generator(model)._runner, Columns(torch.ones_like(ids), 16)

    def compare():
        runner.first_keys(ids, columns, 0, 13, ModelInputs(embeds))
        engine.generate(model, ids, cache=cache, max_new_tokens=2)

    return compare


def exports(model):
    cache = caches.build("static", model.config, max_cache_len=32)
    engine.generate(model, prompt(), cache=cache, max_new_tokens=1)
    return lambda: engine.export_step(model, cache)


@pytest.mark.parametrize(
    ("make", "name", "prepare"),
    [
        (tiny_model, "llama", generates),
        (seeing_model, "llava", sees),
        (tiny_model, "jamba", looks_up),
        (tiny_model, "llama", compares),
        (tiny_model, "llama", exports),
    ],
)
def test_whatever_computes_has_its_turn(make, name, prepare):
    model = make(name)
    call = prepare(model)
    with forwards_in_turn(model) as had:
        call()
    assert had
    assert all(had)


def test_a_comparison_takes_no_memory_for_the_text_to_come():
    model, ids = tiny_model("llama"), prompt(pads=0)["input_ids"]
    columns, model_kwargs = Columns(torch.ones_like(ids), 10**13), {"token_type_ids": torch.zeros_like(ids)}
    keys, _ = engine.Generator(model)._runner.first_keys(ids, columns, 0, 6, ModelInputs(model_kwargs=model_kwargs))
    assert keys.shape[-2] == 6
