"""In 16 bits logits are as near to those of float32 as transformers' are, whose text changes with torch's own products.
With torch's own products and attention a greedy text has the same logits, bit for bit."""

import copy
import functools

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, MORE_ARCHITECTURES, RARE_ARCHITECTURES, prompt, suiting, tiny_model
from helpers import needs_kernels, new_cache
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import engine
from caches.attention import dispatch
from caches.protocol import capabilities
from engine.kernels import linear_routes

ALL = ARCHITECTURES | MORE_ARCHITECTURES | RARE_ARCHITECTURES
OFTEN = ("llama", "gemma2", "inkling")  # the keys of the last one are not side by side
PROMPTS = ("def read_lines(path", "def add(a, b):\n    return")  # where packed heads round in another way
ASKED = {"max_new_tokens": 15, "do_sample": False, "output_logits": True, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def kernel_products(monkeypatch):
    """The products that the kernel computes from here on: their numbers of rows."""
    product, rows = linear_routes._kernel, []

    def noted(input, weight, bias):
        rows.append(input.numel() // input.shape[-1])
        return product(input, weight, bias)

    monkeypatch.setattr(linear_routes, "_kernel", noted)
    return rows


@functools.cache
def trained(dtype):
    """The shipped model, and the ids of the prompts."""
    tokenizer = AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(engine.SHIPPED_MODEL, dtype=dtype)
    return model, [tokenizer(text, return_tensors="pt").input_ids for text in PROMPTS]


@functools.cache
def expected_of_trained(dtype, number, use_cache):
    model, ids = trained(dtype)
    return model.generate(ids[number], **ASKED, use_cache=use_cache, return_dict_in_generate=True)


def assert_same_bits(out, expected):
    differ = [
        step for step, logits in enumerate(zip(out.logits, expected.logits, strict=True)) if not torch.equal(*logits)
    ]
    assert differ == []
    assert torch.equal(out.sequences, expected.sequences)


@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded", "offloaded_static", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_a_trained_model_with_products_of_torch(cache, dtype, monkeypatch):
    monkeypatch.setattr(dispatch, "_MUCH_IN_HALF", 0)  # attention is torch's too
    model, prompts = trained(dtype)
    generator = engine.Generator(model, config=engine.EngineConfig(linears="default"))
    for number, ids in enumerate(prompts):
        out = generator.generate(ids, cache=cache, **ASKED)
        assert_same_bits(out, expected_of_trained(dtype, number, cache != "none"))


@needs_kernels
@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_trained_model(cache, dtype, kernel_products, monkeypatch):
    """As near to float32, and another text only from a near tie on."""
    monkeypatch.setattr(dispatch, "_MUCH_IN_HALF", 0)  # elements of keys, from which on a kernel attends to them
    model, prompts = trained(dtype)
    exact = copy.deepcopy(model).float()
    ours, theirs = [], []
    for number, ids in enumerate(prompts):
        out, expected = engine.generate(model, ids, cache=cache, **ASKED), expected_of_trained(dtype, number, True)
        ours.append(deviations(exact, out))
        theirs.append(deviations(exact, expected))
        noise = theirs[-1].square().mean().sqrt()
        tokens, others = out.sequences[0, ids.shape[1] :], expected.sequences[0, ids.shape[1] :]
        step = next((step for step in range(len(tokens)) if tokens[step] != others[step]), None)
        if step is not None:
            scores = exact(out.sequences[:, : ids.shape[1] + step]).logits[0, -1]
            assert (scores[tokens[step]] - scores[others[step]]).abs() < 4 * noise
    assert kernel_products
    assert torch.cat(ours).norm() < 1.25 * torch.cat(theirs).norm()


def deviations(exact, out):
    """Of the logits from those that the model `exact` computes for the same text."""
    steps = len(out.logits)
    with torch.no_grad():
        expected = exact(out.sequences[:, :-1]).logits[0, -steps:]
    return torch.cat(out.logits).double() - expected


def skip_unless_it_can_be_compared(name):
    if not hasattr(transformers, ALL[name][0]):
        pytest.skip("this release of transformers does not know it yet")
    if name == "inkling2":
        pytest.skip("transformers multiplies it with float32")


def lossless_backends(name):
    """Those that lose nothing of this architecture's text, by their names."""
    for backend in suiting(name):
        able = capabilities(new_cache(backend, tiny_model(name)))
        if not (able.is_quantized or able.imposes_windows):
            yield backend


@needs_kernels
@pytest.mark.covering("values")
@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in ALL if name not in OFTEN)]
)
@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.bfloat16, 2), pytest.param(torch.float16, 1, marks=pytest.mark.slow)], ids=str
)
def test_products_and_attention_of_the_kernels(name, dtype, rows, monkeypatch, kernel_products):
    """In every architecture, with biases, in a prompt and in steps, until the texts part.

    The errors of single positions vary, and where experts are chosen near a tie they jump: their medians are compared,
    of several prompts where those of the first differ.
    """
    monkeypatch.setattr(linear_routes, "is_large", lambda shape: True)
    monkeypatch.setattr(dispatch, "_MUCH_IN_HALF", 0)
    skip_unless_it_can_be_compared(name)
    model = copy.deepcopy(tiny_model(name))
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.3)
    model.to(dtype)
    exact_model, errors = copy.deepcopy(model).float(), []
    for seed in range(8):
        inputs = prompt(rows=rows, tokens=23, pads=4 * (rows > 1), seed=seed)
        errors += errors_of(model, exact_model, inputs)
        if not kernel_products:
            pytest.skip("its products are not those of torch's linear layers")
        our_error, their_error = torch.stack(errors).median(dim=0).values
        if our_error < 1.25 * their_error + 1e-6:
            break
    assert rows in kernel_products
    assert our_error < 1.25 * their_error + 1e-6


def errors_of(model, exact_model, inputs):
    """Of the logits of each row and step where the texts are the same still: ours and transformers'."""
    asked = ASKED | {"max_new_tokens": 5}
    theirs, exact = (of.generate(**inputs, **asked, return_dict_in_generate=True) for of in (model, exact_model))
    ours = engine.generate(model, inputs, **asked)
    begin, errors = inputs["input_ids"].shape[1], []
    for step, logits in enumerate(zip(ours.logits, theirs.logits, exact.logits, strict=True)):
        texts = [out.sequences[:, : begin + step] for out in (ours, theirs, exact)]
        same = (texts[0] == texts[2]).all(dim=1) & (texts[1] == texts[2]).all(dim=1)
        our_logits, their_logits, expected = (tensor[same].double() for tensor in logits)
        errors += torch.stack([(our_logits - expected).norm(dim=1), (their_logits - expected).norm(dim=1)], dim=1)
    return errors


# Of a rare architecture the full run has one of the two data types, the nightly run both.
@pytest.mark.covering("values")
@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in ALL if name not in OFTEN)]
)
@pytest.mark.parametrize(
    ("dtype", "pads"), [(torch.bfloat16, 0), pytest.param(torch.float16, 4, marks=pytest.mark.slow)], ids=str
)
def test_every_architecture(name, dtype, pads):
    skip_unless_it_can_be_compared(name)
    model, inputs = copy.deepcopy(tiny_model(name)).to(dtype), prompt(rows=1, tokens=23, pads=pads)
    asked = ASKED | {"max_new_tokens": 9}
    expected = {
        use_cache: model.generate(**inputs, **asked, use_cache=use_cache, return_dict_in_generate=True)
        for use_cache in (True, False)
    }
    generator = engine.Generator(model, config=engine.EngineConfig(linears="default"))
    for backend in lossless_backends(name):
        out = generator.generate(inputs, cache=backend, **asked)
        assert_same_bits(out, expected[backend != "none"])
