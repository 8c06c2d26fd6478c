"""In 16 bits a greedy text rounds as transformers' does: its logits are the same, bit for bit."""

import copy
import functools

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, MORE_ARCHITECTURES, RARE_ARCHITECTURES, prompt, suiting, tiny_model
from helpers import new_cache
from transformers import AutoModelForCausalLM, AutoTokenizer

import engine
from caches.protocol import capabilities

ALL = ARCHITECTURES | MORE_ARCHITECTURES | RARE_ARCHITECTURES
OFTEN = ("llama", "gemma2", "inkling")  # the keys of the last one are not side by side
PROMPTS = ("def read_lines(path", "def add(a, b):\n    return")  # where packed heads round in another way
ASKED = {"max_new_tokens": 15, "do_sample": False, "output_logits": True, "eos_token_id": None, "pad_token_id": 0}


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
def test_a_trained_model(cache, dtype):
    model, prompts = trained(dtype)
    for number, ids in enumerate(prompts):
        out = engine.generate(model, ids, cache=cache, **ASKED)
        assert_same_bits(out, expected_of_trained(dtype, number, cache != "none"))


def lossless_backends(name):
    """Those that lose nothing of this architecture's text, by their names."""
    for backend in suiting(name):
        able = capabilities(new_cache(backend, tiny_model(name)))
        if not (able.is_quantized or able.imposes_windows):
            yield backend


# Of a rare architecture the full run has one of the two data types, the nightly run both.
@pytest.mark.covering("values")
@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in ALL if name not in OFTEN)]
)
@pytest.mark.parametrize(
    ("dtype", "pads"), [(torch.bfloat16, 0), pytest.param(torch.float16, 4, marks=pytest.mark.slow)], ids=str
)
def test_every_architecture(name, dtype, pads):
    if not hasattr(transformers, ALL[name][0]):
        pytest.skip("this release of transformers does not know it yet")
    if name == "inkling2":
        pytest.skip("transformers multiplies it with float32")
    model, inputs = copy.deepcopy(tiny_model(name)).to(dtype), prompt(rows=1, tokens=23, pads=pads)
    asked = ASKED | {"max_new_tokens": 9}
    expected = {
        use_cache: model.generate(**inputs, **asked, use_cache=use_cache, return_dict_in_generate=True)
        for use_cache in (True, False)
    }
    for backend in lossless_backends(name):
        out = engine.generate(model, inputs, cache=backend, **asked)
        assert_same_bits(out, expected[backend != "none"])
