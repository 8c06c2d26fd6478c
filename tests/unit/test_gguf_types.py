"""Codes of GGUF files in our order: their values are those of the package gguf, and their products those of float32."""

import os
import subprocess
import sys

import pytest
import torch
from gguf_files import random_blocks
from torch import nn

from engine.kernels import block_codes, low_bit_linears
from engine.kernels.linear_kernels import kernels
from engine.kernels.low_bit_linears import LowBitEmbedding, LowBitLinear
from engine.loading.gguf import _ENCODERS
from engine.loading.gguf_types import LAYOUTS, blocks_of

gguf = pytest.importorskip("gguf")


def raw_of(type_name, outs, width):
    return random_blocks(gguf.GGMLQuantizationType[type_name], outs, width)


def values(raw, type_name):
    """As the package gguf decodes them, float32 [outs, width]."""
    return torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[type_name]))


def layer_of(raw, type_name):
    full, blocks = values(raw, type_name), blocks_of(raw, type_name)
    return LowBitLinear(blocks, full, None, _ENCODERS[blocks.bits])


@pytest.fixture(params=["kernels", "torch"])
def with_or_without_kernels(request, monkeypatch):
    if request.param == "torch":
        for module in (block_codes, low_bit_linears):
            monkeypatch.setattr(module, "kernels", lambda: None)


@pytest.mark.usefixtures("with_or_without_kernels")
@pytest.mark.parametrize("type_name", LAYOUTS)
@torch.no_grad()
def test_values_are_those_of_the_file(type_name):
    for outs, width in [(1, 256), (5, 1024), (16, 512), (33, 768)]:
        raw = raw_of(type_name, outs, width)
        blocks, expected = blocks_of(raw, type_name), values(raw, type_name)
        assert torch.equal(blocks.weights()[:outs], expected)
        assert not blocks.weights()[outs:].any()
        assert torch.equal(blocks.rows(torch.arange(outs)), expected)
        filled = -(-outs // 16) * 16
        assert sum(tensor.nbytes for tensor in blocks) <= 1.03 * raw.nbytes / outs * filled


@pytest.mark.usefixtures("with_or_without_kernels")
@pytest.mark.parametrize("rows", [1, 3, 6, 7, 16, 17, 64, 300])
@pytest.mark.parametrize("type_name", LAYOUTS)
@torch.no_grad()
def test_products_in_float32(type_name, rows):
    """Of inputs whose sum is far from zero."""
    raw, input = raw_of(type_name, 40, 768), torch.randn(rows, 768) + 3
    expected = nn.functional.linear(input.double(), values(raw, type_name).double())
    error = (layer_of(raw, type_name)(input) - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 3e-6


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the other tests are with AVX2")
def test_products_of_the_library_for_older_processors():
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    names = "values_are or products_in_float32"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", names]
    subprocess.run(command, env=environment, check=True)


@pytest.fixture
def without_graphs():
    """There is a limit to those of a function."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("without_graphs")
@pytest.mark.parametrize("type_name", LAYOUTS)
@torch.no_grad()
def test_layers_and_embeddings_are_traced_without_a_break(type_name):
    layer = layer_of(raw_of(type_name, 96, 256), type_name)
    table, ids = LowBitEmbedding(nn.Embedding(96, 256), layer), torch.tensor([[3, 95], [7, 0]])
    for module, inputs in [(layer, [torch.randn(1, 256), torch.randn(20, 256)]), (table, [ids])]:
        compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=False)
        for input in inputs:
            assert torch.equal(compiled(input), module(input))
    assert torch.equal(table(ids), layer.blocks.rows(torch.arange(96))[ids])


@pytest.mark.parametrize("rows", [1, 7, 17])
@pytest.mark.parametrize("names", [("Q4_0", "Q4_1", "Q4_K"), ("Q5_0", "Q5_1", "Q5_K"), ("Q6_K", "Q6_K")])
@torch.no_grad()
def test_products_of_one_input_by_codes_with_scales_of_several_forms(names, rows):
    if kernels() is None:
        pytest.skip("needs the kernels")
    input, blocks = torch.randn(rows, 512), [blocks_of(raw_of(name, 32, 512), name) for name in names]
    product = kernels().block_linears
    each = [product(input, *([tensor] for tensor in tensors)) for tensors in blocks]
    assert torch.equal(product(input, *map(list, zip(*blocks, strict=True))), torch.cat(each, dim=1))


@pytest.mark.parametrize("type_name", LAYOUTS)
@torch.no_grad()
def test_weights_that_are_loaded_into_a_layer_get_codes_of_as_many_bits(type_name):
    layer, weight = layer_of(raw_of(type_name, 40, 256), type_name), torch.randn(40, 256)
    assert not any(layer.load_state_dict({"weight": weight}, strict=False))
    assert layer.blocks.bits == LAYOUTS[type_name].bits
    error = (layer.blocks.rows(torch.arange(40)) - weight).norm() / weight.norm()
    assert error < {4: 0.1, 5: 0.05, 6: 0.025, 8: 0.01}[layer.blocks.bits]


def test_codes_of_other_blocks_are_refused():
    if kernels() is None:
        pytest.skip("needs the kernels")
    codes, scales, factors, _ = blocks_of(raw_of("Q6_K", 16, 512), "Q6_K")
    for wrong, message in [
        ((codes[..., :256].contiguous(), scales, factors), "codes of 4 bits with scales of halves"),
        ((codes[..., :192].contiguous(), scales, factors[:, :, :0]), "scales are of different blocks"),
        ((codes, scales, factors[:, :8].contiguous()), "codes and factors are of different blocks"),
        ((codes[:, :4].contiguous(), scales, factors[:, :4].contiguous()), "scales with factors are of 256 inputs"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            kernels().block_weights(*wrong)
