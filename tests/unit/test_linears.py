"""Linear layers through oneDNN and our own kernel: the same numbers up to rounding, and a model left as it was."""

import copy
import time

import pytest
import torch
from architectures import prompt, tiny_model
from helpers import needs_kernels
from torch import nn
from torch.nn.utils import prune

import configs
import engine
from caches import kernels
from engine import linears
from engine.linears import Linears

pytestmark = pytest.mark.skipif(not linears.has_onednn(), reason="this torch was built without oneDNN")


def wrapped(model):
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 48), (3, 7, 48), (48,)])
def test_equal_to_rounding(bias, shape):
    layer, input = nn.Linear(48, 33, bias=bias), torch.randn(shape)
    with torch.no_grad():
        expected = layer(input)
        with Linears(layer, "onednn"):
            assert wrapped(layer)
            torch.testing.assert_close(layer(input), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(layer(input.expand(2, *shape)[1]), expected, atol=1e-5, rtol=1e-5)
            assert layer(input).is_contiguous()  # models take views of it
        assert not wrapped(layer)


def test_new_weights_are_seen():
    layer, input = nn.Linear(8, 8), torch.randn(2, 8)
    route = Linears(layer, "onednn")
    layer.weight = nn.Parameter(torch.zeros(8, 8))
    layer.bias = nn.Parameter(torch.ones(8))
    with torch.no_grad(), route:
        assert torch.equal(layer(input), torch.ones(2, 8))


def test_what_is_routed(monkeypatch):
    model = copy.deepcopy(tiny_model("llama"))
    count = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert len(Linears(model, "onednn")) == count
    assert len(Linears(model, "default")) == 0
    for faster in (True, False):
        monkeypatch.setattr(linears, "onednn_is_faster", lambda faster=faster: faster)
        assert len(Linears(model, "auto")) == (count if faster else 0)
    model.lm_head.forward = lambda input: nn.Linear.forward(model.lm_head, input)  # somebody's hook
    assert len(Linears(model, "onednn")) == count - 1
    assert len(Linears(model.to(torch.bfloat16), "onednn")) == 0


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Quantized(torch.Tensor):
    """Says that it is float32, as those of quantization libraries do."""


def with_quantized_weight():
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantized))
    return layer


@pytest.mark.parametrize(
    "make", [lambda: Scaled(8, 8), with_quantized_weight, lambda: prune.identity(nn.Linear(8, 8), "weight")]
)
def test_layers_that_are_not_plain_are_left_alone(make):
    assert len(Linears(nn.Sequential(make(), nn.Linear(8, 8)), "onednn")) == 1


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generation(name):
    model, inputs = tiny_model(name), prompt()
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    for choice in ("default", "onednn"):
        generator = engine.Generator(model, config=engine.EngineConfig(linears=choice))
        assert torch.equal(generator.generate(inputs, max_new_tokens=20).sequences, expected)
    assert not wrapped(model)


def test_a_failing_forward_leaves_the_model_as_it_was(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(model.model.layers[1], "forward", lambda *args, **kwargs: 1 / 0)
    generator = engine.Generator(model, config=engine.EngineConfig(linears="onednn"))
    with pytest.raises(engine.Interrupted, match="ZeroDivisionError"):
        generator.generate(prompt(), max_new_tokens=5)
    assert wrapped(model) == ["model.layers.1"]  # what the test put there


def test_a_model_that_was_moved_is_left_alone():
    model = copy.deepcopy(tiny_model("llama"))
    generator = engine.Generator(model, config=engine.EngineConfig(linears="onednn"))
    model.to(torch.bfloat16)
    expected = model.generate(**prompt(), max_new_tokens=5, do_sample=False)
    assert torch.equal(generator.generate(prompt(), max_new_tokens=5).sequences, expected)


@needs_kernels
@pytest.mark.parametrize(("outs", "width"), [(1, 1), (5, 3), (33, 47), (64, 768), (4, 16)])
def test_one_row_through_our_own_kernel(outs, width):
    layer, row = nn.Linear(width, outs), torch.randn(1, 1, width)
    with torch.no_grad():
        expected = layer(row)
        with Linears(layer, "gemv"):
            torch.testing.assert_close(layer(row), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(layer(row.view(-1)), expected.view(-1), atol=1e-5, rtol=1e-5)
            strided = torch.randn(width, 2)[:, 0]
            torch.testing.assert_close(layer(strided), layer(strided[None].expand(2, -1))[0], atol=1e-5, rtol=1e-5)
            layer.weight.data = layer.weight.data.T.contiguous().T
            torch.testing.assert_close(layer(row), expected, atol=1e-5, rtol=1e-5)
            row[..., 0] = float("nan")
            assert layer(row).isnan().all()


@needs_kernels
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_generation_through_our_own_kernel(options):
    model, inputs = tiny_model("llama"), prompt(rows=1, pads=0)
    generator = engine.Generator(model, config=engine.EngineConfig(linears="gemv"))
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False, **options)
    assert torch.equal(generator.generate(inputs, max_new_tokens=20, **options).sequences, expected)
    assert not wrapped(model)


def test_a_compiler_that_is_missing(monkeypatch):
    from torch.utils import cpp_extension

    def fails(*arguments, **options):
        raise RuntimeError("no c++ here")

    monkeypatch.setattr(cpp_extension, "load", fails)
    kernels.compiled.cache_clear()
    try:
        with pytest.raises(
            configs.ConfigError, match=r"linears='gemv' needs a C\+\+ compiler and ninja.*no c\+\+ here"
        ):
            engine.Generator(tiny_model("llama"), config=engine.EngineConfig(linears="gemv"))
    finally:
        kernels.compiled.cache_clear()


def test_the_measurement_says_something():
    linears.onednn_is_faster.cache_clear()
    assert linears.onednn_is_faster() in (True, False)
    assert linears._median_times(lambda: time.sleep(0.03), lambda: time.sleep(0.01)) > 1.5
    assert linears._median_times(lambda: time.sleep(0.01), lambda: time.sleep(0.03)) < 0.7
