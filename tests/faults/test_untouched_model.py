"""A run leaves the model's modules alone, also while it computes: copies, pickles and moves see an untouched model.

Only the class of linear layers is another one in a step, and says that it is torch's.
"""

import copy
import gc
import io
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
from torch.nn.utils import parametrize
from transformers import DynamicCache

import caches
import engine
from engine.kernels import linear_backend, linear_routes
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


def pickled(model):
    data = pickle.dumps(model)
    assert b"engine" not in data  # it loads without this package
    return pickle.loads(data)


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    assert b"engine" not in file.getvalue()
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def types_of(model):
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, torch_saved])
def test_a_copy_made_during_a_step_has_weights_of_its_own(duplicate):
    # A new one: transformers leaves hooks in a model that has recorded hidden states, which cannot be pickled.
    model, inputs, copies = tiny_model.__wrapped__("llama"), prompt(), []
    expected = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    untouched = types_of(model)

    def hook(*_):
        assert attributes(model).keys() == before.keys()
        assert all(attributes(model)[name] == of for name, of in before.items())
        assert linear_backend.RoutedLinear in types_of(model)
        assert [module.__class__ for module in model.modules()] == untouched
        if not copies:
            copies.append(None)
            handle.remove()
            copies[0] = duplicate(model)

    handle = hidden_layer(model).register_forward_hook(hook)
    before = attributes(model)
    generator = engine.Generator(model, config=ROUTED)
    generator.generate(inputs, max_new_tokens=3)
    found = copies[0]
    assert types_of(found) == types_of(model) == types_of(duplicate(model)) == untouched
    assert not any("forward" in module.__dict__ for module in found.modules())
    assert torch.equal(found.generate(**inputs, max_new_tokens=3, do_sample=False), expected)
    zeroed(found)
    with torch.no_grad():
        assert not found(**inputs).logits.any()
    assert torch.equal(  # the zeros are the copy's alone
        engine.generate(model, inputs, max_new_tokens=3).sequences,
        model.generate(**inputs, max_new_tokens=3, do_sample=False),
    )


def test_torchs_own_linear_layers_are_never_replaced():
    """By no call, and while a stream waits: the model computes to the bit what it did, and has gradients."""
    own, model, inputs = vars(nn.Linear)["forward"], tiny_model("llama"), prompt()
    untouched, before = types_of(model), attributes(model)

    def is_plain():
        with torch.no_grad():
            logits = model(**inputs).logits
        return torch.equal(logits, expected) and types_of(model) == untouched and vars(nn.Linear)["forward"] is own

    with torch.no_grad():
        expected = model(**inputs).logits
    generators = [engine.Generator(model, config=ROUTED) for _ in range(2)]
    draft = {"assistant_model": model, "num_assistant_tokens": 2}
    for options in ({}, {"cache": "static"}, {"num_beams": 3}, draft):
        streams = [one.stream(inputs, max_new_tokens=4, **options) for one in generators]
        for _ in range(2):
            for stream in streams:
                next(stream)
                assert is_plain()
        assert streams[0].result().tokens == streams[1].result().tokens
    generators[0].release()
    assert is_plain()
    assert generators[1].generate(inputs, max_new_tokens=3).stats.linears != "torch"
    del generators, streams, stream
    gc.collect()
    assert is_plain()
    assert attributes(model) == before
    assert model(**inputs).logits.requires_grad


def test_modules_are_as_they_were_after_two_ctrl_c():
    assert interrupted_twice(tries=10, seed=0)["tries"] == 10


@pytest.mark.slow  # `make interrupts` goes on to 1,000
def test_modules_are_as_they_were_after_many_ctrl_c():
    assert interrupted_twice(tries=50, seed=1)["tries"] == 50


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


def test_routes_are_taken_in_the_thread_of_the_step_alone():
    """And by its model alone."""
    model, other, inputs, threads = tiny_model("llama"), copy.deepcopy(tiny_model("llama")), prompt(), []

    @torch.no_grad()
    def use(plain):
        found.append(torch.equal(plain(**inputs).logits, expected))

    def hook(*_):
        if not threads:  # else the models that it calls would call it
            assert linear_backend.active.routes is not None
            threads.append(threading.Thread(target=use, args=[model]))
            threads[0].start()
            threads[0].join(30)
            use(other)

    found = []
    with torch.no_grad():
        expected = other(**inputs).logits
    handle = hidden_layer(model).register_forward_hook(hook)
    try:
        engine.Generator(model, config=ROUTED).generate(inputs, max_new_tokens=1)
    finally:
        handle.remove()
    assert found == [True, True]


@pytest.mark.parametrize("linears", ["onednn", "default"])
def test_a_step_inside_of_a_step_leaves_the_routes_to_the_outer_one(linears, monkeypatch):
    """And takes them itself where its generator has routes."""
    taken, seen, model = [], [], tiny_model("llama")
    routes = {name: lambda *inputs, route=route: taken.append(0) or route(*inputs)
              for name, route in linear_routes.routes().items()}  # fmt: skip
    monkeypatch.setattr(linear_backend, "routes", lambda: routes)
    generator, inner = (engine.Generator(model, config=engine.EngineConfig(linears=one)) for one in ("onednn", linears))
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())

    def hook(*_):
        if not seen:
            seen.append(0)
            before = len(taken)
            inner.generate(prompt(), max_new_tokens=2)
            seen.append(len(taken) - before)
            seen.append(types_of(model).count(linear_backend.RoutedLinear))

    handle = hidden_layer(model).register_forward_hook(hook)
    try:
        generator.generate(prompt(), max_new_tokens=1)
    finally:
        handle.remove()
    assert seen == [0, 2 * layers if linears == "onednn" else 0, layers]
    assert len(taken) == layers + seen[1]


def test_a_cache_that_was_made_inside_of_a_step_can_be_continued():
    model, made = copy.deepcopy(tiny_model("llama")), []

    def hook(*_):
        handle.remove()
        made.append(generator.generate(prompt(pads=0), max_new_tokens=2))

    generator = engine.Generator(model, config=ROUTED)
    handle = hidden_layer(model).register_forward_hook(hook)
    generator.generate(prompt(), max_new_tokens=1)
    [first] = made
    later = generator.generate(first.sequences, cache=first.cache, max_new_tokens=2)
    assert torch.equal(later.sequences, generator.generate(prompt(pads=0), max_new_tokens=4).sequences)


@pytest.mark.parametrize("use", [torch.jit.script, lambda layer: torch.compile(layer, backend="eager", fullgraph=True),
                                 torch.fx.symbolic_trace,
                                 lambda layer: pickle.loads(pickle.dumps(layer.forward))])  # fmt: skip
def test_other_users_of_linear_layers_see_no_difference(use):
    model = copy.deepcopy(tiny_model("llama"))  # torch.compile sets an attribute of the layer
    generator = engine.Generator(model, config=ROUTED)
    generator.generate(prompt(), max_new_tokens=2)
    layer, plain, rows = model.model.layers[0].mlp.gate_proj, nn.Linear(32, 64, bias=False), torch.randn(3, 32)
    plain.weight = layer.weight
    assert torch.equal(use(layer)(rows), use(plain)(rows))


def test_a_model_that_is_changed_while_a_generator_lives():
    """As PEFT, accelerate and quantization change it; each before and after a call."""
    inputs, changes = prompt(), [with_adapter, with_hooks, with_parametrization]
    for change in changes:
        model = tiny_model.__wrapped__("llama")
        generator = engine.Generator(model, config=ROUTED)
        generator.generate(inputs, max_new_tokens=2)
        changed, undo = change(model)
        expected = changed.generate(**inputs, max_new_tokens=6, do_sample=False)
        assert torch.equal(generator.generate(inputs, max_new_tokens=6).sequences, expected)
        undo()
        assert torch.equal(
            generator.generate(inputs, max_new_tokens=6).sequences,
            model.generate(**inputs, max_new_tokens=6, do_sample=False),
        )
        assert linear_backend.RoutedLinear not in types_of(model)
        assert not any("engine" in type(module).__mro__[1].__module__ for module in model.modules())


def with_adapter(model):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    return adapted, adapted.unload


def with_hooks(model):
    hooks = pytest.importorskip("accelerate.hooks")
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.ModelHook())
    return model, lambda: hooks.remove_hook_from_module(model, recurse=True)


def with_parametrization(model):
    layer = model.model.layers[0].mlp.up_proj
    parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return model, lambda: parametrize.remove_parametrizations(layer, "weight")


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
