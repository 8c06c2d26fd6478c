"""Models inside the wrappers of other libraries, and things that are no models."""

import copy
import logging
import socket

import peft
import pytest
import torch
from architectures import prompt, tiny_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import caches
import engine
from caches.platform.warn_once import warn_once

NEW = 6


def compiled(model):
    return torch.compile(model, backend="eager")


def with_adapters(model):
    options = {"target_modules": ["q_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=4, **options)).eval()


@pytest.fixture
def distributed():
    """A group of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = torch.distributed.TCPStore("127.0.0.1", port, 1, True)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_every_wrapper(distributed):
    model = tiny_model("llama")
    expected = engine.generate(model, prompt(), max_new_tokens=NEW).sequences
    for wrapped in (compiled(model), nn.DataParallel(model), nn.parallel.DistributedDataParallel(model)):
        assert engine.Generator(wrapped).model is model
        assert torch.equal(engine.generate(wrapped, prompt(), max_new_tokens=NEW).sequences, expected)
    assert engine.Generator(compiled(wrapped)).model is model
    adapted = with_adapters(model)
    inner = adapted.base_model.model
    assert engine.Generator(nn.DataParallel(compiled(adapted))).model is inner
    assert engine.plan(compiled(model), prompt_tokens=8, max_new_tokens=4).model == "LlamaForCausalLM"


def test_a_draft_too():
    model = tiny_model("llama")
    generator = engine.Generator(model)
    draft = compiled(model)
    for _ in range(2):
        out = generator.generate(prompt(), assistant_model=draft, max_new_tokens=NEW)
        assert out.stats.accepted_tokens == out.stats.drafted_tokens > 0
    assert generator._builder.draft.given is draft
    with pytest.raises(engine.OptionError, match=r"assistant_model: .* but a Linear was given"):
        generator.generate(prompt(), assistant_model=nn.Linear(2, 2))


def test_an_exported_step_too():
    model = tiny_model("llama")
    cache = caches.build("static", model.config, max_cache_len=32)
    engine.generate(model, prompt(), cache=cache, max_new_tokens=2)
    program = engine.export_step(compiled(model), cache)
    cache.begin(1, graph=True)
    inputs = engine.step_inputs(compiled(model), cache, torch.tensor([[3], [4]]))
    assert program.module()(**inputs).shape == (2, 101)
    cache.abort()


def test_what_is_lost_is_said_once(caplog):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="engine"):
        for _ in range(2):
            engine.Generator(compiled(tiny_model("llama")))
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "torch.compile's wrapper of the model is ignored"
    ]


class Pipeline:
    def __init__(self):
        self.model = tiny_model("llama")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "a NoneType was given"),
        (5, "a int was given"),
        (nn.Linear(2, 2), "a Linear was given"),
        (compiled(nn.Linear(2, 2)), "a OptimizedModule was given"),
        (nn.DataParallel(nn.Linear(2, 2)), "a DataParallel was given"),
        (LlamaForCausalLM, r"the class LlamaForCausalLM was given: load it with LlamaForCausalLM.from_pretrained"),
        (LlamaConfig(), "a LlamaConfig was given"),
        (Pipeline(), "a Pipeline was given: give its .model"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_is_no_model(given, told):
    for call in (engine.generate, engine.stream):
        with pytest.raises(engine.InputError, match=rf"model has to be a transformers PreTrainedModel .* but {told}"):
            call(given, prompt())


class PassesOn(LlamaForCausalLM):
    def forward(self, input_ids=None, **others):
        return super().forward(input_ids=input_ids, **others)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("how", ["in a class", "on the model"])
def test_a_forward_that_passes_its_arguments_on(how, cache):
    """What the forward that it calls takes is given: the mask of padded rows above all."""
    model, inputs = copy.deepcopy(tiny_model("llama")), prompt()
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    if how == "in a class":
        model.__class__ = PassesOn
    else:
        forward = model.forward
        model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    out = engine.generate(model, inputs, cache=cache, max_new_tokens=NEW)
    assert torch.equal(out.sequences, expected)
    assert out.stats.cache == cache


def test_a_model_without_a_head_is_refused():
    for model in (tiny_model("llama").model, nn.DataParallel(tiny_model("llama").model)):
        with pytest.raises(engine.InputError, match="LlamaModel has no head that predicts tokens"):
            engine.Generator(model)
