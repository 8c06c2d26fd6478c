"""EngineConfig(weights=...): linear layers with codes of 8 or 4 bits in place of their weights."""

import argparse
import copy
import inspect
import logging
import os
import subprocess
import sys
import weakref
from pathlib import Path

import optimum.quanto
import peft
import pytest
import torch
from architectures import prompt
from helpers import needs_kernels
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, LlamaConfig, OlmoConfig

import caches
import engine
from caches.platform.warn_once import warn_once
from engine.kernels import block_codes, linear_routes, low_bit_linears, weight_conversion
from engine.kernels.block_codes import pack
from engine.kernels.linear_kernels import has_integer_products, has_matrix_units, kernels
from engine.kernels.low_bit_linears import ENCODERS, LowBitEmbedding, LowBitLinear
from engine.kernels.weight_conversion import convert_linears


def layer_of(weights, weight, bias=None):
    return LowBitLinear(ENCODERS[weights](weight.detach()), weight.detach(), bias, ENCODERS[weights])


def weights_of(layer):
    """The weights in full, [outs, width]."""
    return layer.blocks.rows(torch.arange(layer.out_features))[:, : layer.in_features]


def without_kernels(monkeypatch):
    for module in (low_bit_linears, block_codes):
        monkeypatch.setattr(module, "kernels", lambda: None)


def relative(one, other):
    return ((one - other).norm() / other.norm()).item()


def model_with(weights, **sizes):
    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=101)
    config = LlamaConfig(**shape | {"initializer_range": 0.3} | sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    if weights is not None:
        convert_linears(model, weights)
    return model


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", ENCODERS)
@pytest.mark.parametrize(("outs", "width"), [(33, 64), (64, 128), (1, 64), (200, 192)])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_any_rows_of_any_shape(bias, outs, width, weights, dtype, has_kernels, monkeypatch):
    if not has_kernels:
        without_kernels(monkeypatch)
    linear = nn.Linear(width, outs, bias=bias)
    layer = layer_of(weights, linear.weight, linear.bias).to(dtype)
    full, offsets = weights_of(layer).float(), layer.bias.float() if bias else None
    assert relative(full, linear.weight) < {"int8": 0.01, "int4": 0.1}[weights]
    shapes = [(1, 1), (3, 5), (16,), (17,), (2, 40), (130,), (), (0,)]
    inputs = [torch.randn(*shape, width).to(dtype) for shape in shapes]
    last_tokens, transposed = torch.randn(3, 5, width).to(dtype)[:, -1:], torch.randn(width, 16).to(dtype).T
    for input in [*inputs, last_tokens, transposed]:
        out, expected = layer(input), nn.functional.linear(input.float(), full, offsets)
        assert out.shape == expected.shape
        assert out.dtype == dtype
        most = input.float().norm(dim=-1, keepdim=True) * full.norm(dim=-1) + expected.abs()
        assert ((out - expected).abs() <= 0.005 * most).all()  # activations and results in bfloat16


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 12, 13, 16, 17, 33, 64, 100, 600])
@pytest.mark.parametrize("weights", ENCODERS)
@pytest.mark.parametrize("width", [192, 1600])
@torch.no_grad()
def test_products_in_float32(weights, rows, width):
    """Rows of any number, of inputs whose sum is far from zero."""
    if kernels() is None:
        pytest.skip("needs the kernels")
    layer, input = layer_of(weights, torch.randn(200, width)), torch.randn(rows, width) + 3
    expected = nn.functional.linear(input.double(), weights_of(layer).double())
    assert all(relative(one, other) < 3e-6 for one, other in zip(layer(input), expected, strict=True))


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@torch.no_grad()
def test_codes_keep_their_values(bits, halves, has_kernels, monkeypatch):
    """Of any number of outputs, with scales of any size that float16 has."""
    if not has_kernels:
        without_kernels(monkeypatch)
    for outs, groups in [(1, 1), (5, 3), (33, 4), (64, 2)]:
        codes = torch.randint(0, 2**bits, (outs, groups, 32), dtype=torch.uint8)
        scales = (torch.randn(outs, groups, halves) * 10.0 ** torch.randint(-7, 4, (outs, groups, halves))).half()
        blocks = pack(codes, scales, bits)
        full = codes.float() - (2 ** (bits - 1) if halves == 1 else 0)
        expected = full * scales[..., :1].float() + (scales[..., 1:].float() if halves == 2 else 0)
        assert torch.equal(blocks.weights()[:outs], expected.flatten(1))
        assert torch.equal(blocks.rows(torch.arange(outs)), expected.flatten(1))
        assert sum(tensor.nbytes for tensor in blocks) == -(-outs // 16) * 16 * groups * (4 * bits + 2 * halves)


@pytest.mark.parametrize("has_kernels", [True, False])
@torch.no_grad()
def test_a_bit_more_halves_the_error(has_kernels, monkeypatch):
    if not has_kernels:
        without_kernels(monkeypatch)
    weight = torch.randn(48, 320)
    errors = {bits: relative(block_codes.fitted(weight, bits).rows(torch.arange(48)), weight) for bits in (4, 5, 6)}
    assert errors[6] < errors[5] / 1.9 < errors[4] / 1.9**2 < 0.021


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("weights", ENCODERS)
@torch.no_grad()
def test_weights_of_inputs_of_any_size_have_the_same_relative_error(weights, has_kernels, monkeypatch):
    """Else that of the largest in a group would be the error of all."""
    if not has_kernels:
        without_kernels(monkeypatch)
    weight, sizes = torch.randn(64, 333), 10 ** (2 * torch.rand(333) - 1)
    error, uneven = relative(weights_of(layer_of(weights, weight)), weight), layer_of(weights, weight * sizes)
    assert relative(weights_of(uneven) / sizes, weight) < 1.05 * error
    input = torch.randn(5, 333)
    torch.testing.assert_close(uneven(input), nn.functional.linear(input, weights_of(uneven)), atol=1e-3, rtol=1e-4)
    few = low_bit_linears._product_in_full(input, uneven.blocks)[:, :64]
    torch.testing.assert_close(uneven(input), few, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("weights", "bits", "halves"), [("int4", 4, 1), ("int4", 4, 2), ("int8", 8, 1)])
@torch.no_grad()
def test_weights_on_a_grid_are_found_again(weights, bits, halves):
    """Those that were decoded before."""
    least = 1 if bits == 8 else 0  # of 8 bits there are as many codes above the middle as below
    codes = torch.randint(least, 2**bits, (64, 2, 32), dtype=torch.uint8)
    codes[..., :2] = torch.tensor([least, 2**bits - 1], dtype=torch.uint8)
    scales = torch.rand(64, 2, halves).half() + 0.5
    full = pack(codes, scales, bits).weights()
    blocks = ENCODERS[weights](full)
    assert (blocks.input_scales == 1).all()
    torch.testing.assert_close(blocks.weights(), full, atol=2e-3, rtol=2e-3)


@torch.no_grad()
def test_layers_with_fewer_outputs_than_inputs_have_a_bit_more():
    assert [ENCODERS["int4"](torch.randn(outs, 64)).bits for outs in (32, 64, 96)] == [5, 4, 4]
    assert [ENCODERS["int8"](torch.randn(outs, 64)).bits for outs in (32, 64, 96)] == [8, 8, 8]


@torch.no_grad()
def test_inputs_without_an_end():
    for weights in ENCODERS:
        layer = layer_of(weights, torch.randn(32, 64))
        for value in (torch.nan, torch.inf):
            input = torch.randn(5, 64)
            input[2, 40] = value
            out = layer(input)
            assert not out[2].isfinite().any()
            assert out[[0, 1, 3, 4]].isfinite().all()


@torch.no_grad()
def test_codes_do_not_depend_on_the_size_of_weights():
    """Inputs and weights of any magnitude: scales have float16's range, from 6e-8 to 65504."""
    weight, input = torch.randn(32, 64), torch.randn(3, 64)
    for weights in ENCODERS:
        for size in (1e-3, 1e3):
            layer = layer_of(weights, weight * size)
            assert relative(weights_of(layer), weight * size) < {"int8": 0.01, "int4": 0.1}[weights]
            for of_input in (1e-20, 1e20):
                expected = input.double() * of_input @ weights_of(layer).double().T
                assert relative(layer(input * of_input), expected) < 3e-6


@pytest.mark.parametrize("rows", [11, 16])
@torch.no_grad()
def test_inputs_of_another_width_are_refused(rows):
    if kernels() is None:
        pytest.skip("needs the kernels")
    for weights in ENCODERS:
        with pytest.raises(RuntimeError, match="128 wide, and the weights 64"):
            layer_of(weights, torch.randn(100, 64))(torch.randn(rows, 128))


@torch.no_grad()
def test_blocks_of_weights_in_full(monkeypatch):
    without_kernels(monkeypatch)
    for weights in ENCODERS:
        layer, input = layer_of(weights, torch.randn(300, 64)), torch.randn(20, 64)
        at_once = layer(input)
        monkeypatch.setattr(low_bit_linears, "_IN_FULL", 64 * 70)
        assert torch.allclose(layer(input), at_once, atol=1e-5)
        assert torch.allclose(at_once, input @ weights_of(layer).T, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_layers_are_traced_without_a_break(dtype):
    for weights in ENCODERS:
        layer = layer_of(weights, torch.randn(96, 64)).to(dtype)
        compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=False)
        for rows in (1, 20):
            input = torch.randn(rows, 64).to(dtype)
            assert torch.equal(compiled(input), layer(input))


def test_compiled_rows_have_one_kind_of_product(monkeypatch):
    for integers in (True, False):
        monkeypatch.setattr(low_bit_linears, "has_integer_products", lambda: integers)  # noqa: B023
        most = low_bit_linears._most_rows()
        assert most in linear_routes.ROW_LIMITS or most > linear_routes.ROW_LIMITS[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_matrix_units_are_used_where_there_are_some():
    if kernels() is None:
        pytest.skip("needs the kernels")
    assert has_matrix_units() == ("amx_bf16" in Path("/proc/cpuinfo").read_text())


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the other tests are with AVX2")
def test_products_of_the_library_for_older_processors():
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    module = "from engine.kernels.linear_kernels import has_matrix_units, kernels"
    code = f"{module}; assert kernels() is not None; assert not has_matrix_units()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    names = "products_in_float32 or keep_their_values"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", names]
    subprocess.run(command, env=environment, check=True)


@torch.no_grad()
def test_scales_of_four_bits_lose_less_than_the_whole_range():
    weight = torch.randn(64, 256)
    groups = weight.view(64, -1, 32)
    least, most = groups.aminmax(dim=-1, keepdim=True)
    scale = (most - least) / 15
    plain = (((groups - least) / scale).round() * scale + least).flatten(1)
    assert relative(weights_of(layer_of("int4", weight)), weight) < 0.95 * relative(plain, weight)


@pytest.mark.parametrize("weights", ENCODERS)
@pytest.mark.parametrize("arguments", [
    {}, {"cache": "static"}, {"cache": "offloaded"}, {"num_beams": 3}, {"cache": "static", "num_beams": 2},
    {"prompt_lookup_num_tokens": 3},
], ids=str)  # fmt: skip
def test_the_same_text_as_transformers_with_the_same_layers(arguments, weights):
    generator = engine.Generator(model_with(None), config=engine.EngineConfig(weights=weights))
    assert all(type(one) is not nn.Linear for one in generator.model.modules())
    inputs = prompt(1 if "prompt_lookup_num_tokens" in arguments else 2, tokens=20, pads=0)
    theirs = {name: value for name, value in arguments.items() if name != "cache"}
    expected = generator.model.generate(**inputs, **theirs, max_new_tokens=12, do_sample=False)
    assert torch.equal(generator.generate(inputs, **arguments, max_new_tokens=12).sequences, expected)


def test_perplexity_of_the_shipped_model():
    tokenizer = AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)
    text = inspect.getsource(argparse)
    ids = torch.tensor(tokenizer(text)["input_ids"])[: 16 * 256].view(16, 256)
    nats, sizes = {}, {}
    for weights in ("full", *ENCODERS):
        model = engine.Generator(engine.SHIPPED_MODEL, config=engine.EngineConfig(weights=weights)).model
        with torch.inference_mode():
            nats[weights] = model(ids, labels=ids).loss
        sizes[weights] = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert (nats["int8"] - nats["full"]).abs() < 0.001
    assert nats["int4"] - nats["full"] < 0.03
    assert sizes["int8"] < 0.28 * sizes["full"]
    assert sizes["int4"] < 0.19 * sizes["full"]


@pytest.mark.parametrize("weights", ENCODERS)
def test_tied_embeddings_share_the_codes_of_the_output_layer(weights):
    model = model_with(None, tie_word_embeddings=True)
    full, ids = model.get_input_embeddings().weight.detach().clone(), torch.tensor([[3, 100, 7]])
    convert_linears(model, weights)
    embeddings = model.get_input_embeddings()
    assert type(embeddings) is LowBitEmbedding
    assert embeddings.head is model.lm_head
    assert relative(embeddings(ids), full[ids]) < 0.01
    assert torch.equal(embeddings(ids)[0], weights_of(model.lm_head)[ids[0]])
    generated = engine.generate(model, ids, max_new_tokens=5)
    assert torch.equal(generated.sequences, model.generate(ids, max_new_tokens=5, do_sample=False))


def bytes_of(model):
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def model_of(name, **sizes):
    torch.manual_seed(0)
    shape = {"bart": dict(d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                          decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, scale_embedding=True,
                          max_position_embeddings=32),
             "gpt2": dict(n_embd=64, n_layer=1, n_head=2, n_positions=64),
             }.get(name, dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                              num_key_value_heads=1, head_dim=32))  # fmt: skip
    config = AutoConfig.for_model(name, vocab_size=501, initializer_range=0.3, **shape | sizes)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_config(config).eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


@pytest.mark.parametrize("weights", ENCODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gemma3_text", "bart"])
@torch.no_grad()
def test_tied_embeddings_that_scale_their_rows(name, dtype, weights):
    model, ids = model_of(name).to(dtype), torch.tensor([[3, 500, 7]])
    tables = ["model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"]
    tables = tables if name == "bart" else ["model.embed_tokens"]
    full = [model.get_submodule(table)(ids) for table in tables]
    size = bytes_of(model)
    convert_linears(model, weights)
    for table, rows in zip(tables, full, strict=True):
        embeddings = model.get_submodule(table)
        assert embeddings.head is model.lm_head
        assert model.lm_head.blocks.bits == 8
        assert embeddings(ids).dtype == dtype
        assert relative(embeddings(ids).float(), rows.float()) < 0.01
    assert bytes_of(model) < (0.62 if dtype == torch.bfloat16 else 0.35) * size
    generated = engine.generate(model, ids, max_new_tokens=5)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(generated.sequences[:, -5:], expected[:, -5:])


class NormedEmbedding(nn.Embedding):
    def forward(self, input):
        return nn.functional.normalize(super().forward(input), dim=-1)


class CenteredEmbedding(NormedEmbedding):
    embed_scale = 2.0


@pytest.mark.parametrize("kind", [NormedEmbedding, CenteredEmbedding])
@pytest.mark.parametrize("weights", ENCODERS)
def test_tied_embeddings_that_do_more_keep_their_weights_with_the_output_layer(weights, kind, caplog):
    model = model_with(None, tie_word_embeddings=True)
    table = kind(101, 64)
    table.weight = model.lm_head.weight
    model.set_input_embeddings(table)
    caplog.set_level(logging.WARNING, "engine")
    warn_once.cache_clear()
    for _ in range(2):  # a conversion that goes on
        convert_linears(model, weights)
        assert model.get_input_embeddings() is table
        assert type(model.lm_head) is nn.Linear
        assert model.lm_head.weight is table.weight
        assert type(model.model.layers[0].mlp.up_proj) is LowBitLinear
    assert caplog.text.count("lm_head") == caplog.text.count(f"the {kind.__name__} that shares them") == 1


@pytest.mark.parametrize("weights", ENCODERS)
@torch.no_grad()
def test_linear_layers_with_transposed_weights(weights):
    model, ids = model_of("gpt2"), torch.tensor([[3, 100, 7]])
    layer = model.transformer.h[0].attn.c_attn
    input, size = torch.randn(3, 64), bytes_of(model)
    expected, full = model(ids).logits, layer(input)
    convert_linears(model, weights)
    converted = model.transformer.h[0].attn.c_attn
    assert converted.encode is ENCODERS[weights]
    assert (converted.in_features, converted.out_features) == (64, 192)
    assert relative(converted(input), full) < {"int8": 0.01, "int4": 0.1}[weights]
    assert relative(model(ids).logits, expected) < {"int8": 0.02, "int4": 0.2}[weights]
    assert bytes_of(model) < 0.4 * size
    generated = engine.generate(model, ids, max_new_tokens=5)
    assert torch.equal(generated.sequences, model.generate(ids, max_new_tokens=5, do_sample=False))


def test_what_stays_in_full_is_said_once(caplog):
    caplog.set_level(logging.WARNING, "engine")
    warn_once.cache_clear()
    for _ in range(2):
        convert_linears(model_of("mixtral", num_local_experts=4), "int8")
    (said,) = caplog.messages
    assert "weights='int8': 53 % of the bytes of MixtralForCausalLM" in said
    assert "model.layers.*.mlp.experts.gate_up_proj" in said
    caplog.clear()
    for model in (model_of("gemma3_text"), model_of("gpt2"), model_of("bart"), model_with(None)):
        for _ in range(2):
            convert_linears(model, "int4")
    assert not caplog.messages


@torch.no_grad()
@pytest.mark.parametrize("weights", ENCODERS)
def test_a_model_that_has_no_parameters_left(weights, tmp_path):
    """OLMo 1: its norms have no weights and its embeddings are tied, so transformers found no data type."""
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=101)
    config = OlmoConfig(**shape, tie_word_embeddings=True, eos_token_id=None, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    gen = engine.Generator(model, config=engine.EngineConfig(weights=weights))
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cpu")
    assert bytes_of(model) == sum(tensor.nbytes for tensor in model.buffers())
    out = gen.generate(**prompt(rows=2), max_new_tokens=5, pad_token_id=0)
    out.cache.save(tmp_path / "cache", model)
    assert caches.load(tmp_path / "cache", model).total_tokens == out.cache.total_tokens
    again = engine.Generator(model, config=engine.EngineConfig(weights=weights))
    assert again.generate(**prompt(rows=2), max_new_tokens=5, pad_token_id=0).tokens == out.tokens


@torch.no_grad()
def test_layers_that_quanto_has_quantized():
    model = nn.Sequential(nn.Linear(64, 48))
    optimum.quanto.quantize(model, weights=optimum.quanto.qint8)
    optimum.quanto.freeze(model)
    full = model[0].qweight.dequantize()
    convert_linears(holder := Holder(model), "int8")
    assert relative(weights_of(holder.model[0]), full) < 0.01


@torch.no_grad()
def test_layers_that_hqq_has_quantized():
    config = BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
    layer = HQQLinear(nn.Linear(64, 48), config, compute_dtype=torch.float32, device="cpu")
    full = layer.dequantize()
    holder = Holder(nn.Sequential(layer))
    convert_linears(holder, "int4")
    assert relative(weights_of(holder.model[0]), full) < 0.05


class Holder(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


def test_a_second_generator_takes_the_layers_as_they_are():
    model = model_with("int8")
    head = model.lm_head
    engine.Generator(model, config=engine.EngineConfig(weights="int8"))
    assert model.lm_head is head
    assert engine.generate(model, torch.ones(1, 3, dtype=torch.long), max_new_tokens=2).sequences.shape == (1, 5)


def test_a_conversion_that_was_stopped_goes_on(monkeypatch):
    replace, replaced = weight_conversion.replace_linear, []

    def stopped(*arguments):
        replaced.append(arguments)
        if len(replaced) == 4:
            raise KeyboardInterrupt
        replace(*arguments)

    model = model_with(None, tie_word_embeddings=True)
    monkeypatch.setattr(weight_conversion, "replace_linear", stopped)
    with pytest.raises(KeyboardInterrupt):
        convert_linears(model, "int4")
    monkeypatch.undo()
    convert_linears(model, "int4")
    assert not any(type(module) is nn.Linear for module in model.modules())
    convert_linears(model, "int4")
    with pytest.raises(engine.OptionError, match="converted to another number of bits already: load it again"):
        convert_linears(model, "int8")
    with pytest.raises(engine.OptionError, match="another number of bits"):
        convert_linears(model_with("int8"), "int4")


@pytest.mark.parametrize("weights", ENCODERS)
def test_weights_are_freed_one_after_the_other(monkeypatch, weights):
    """Or a model that just fits into memory would not be there twice, but a quarter more."""
    model, alive = model_with(None), []
    kept = [weakref.ref(module) for module in model.modules() if type(module) is nn.Linear]
    replace = weight_conversion.replace_linear

    def counted(*arguments):
        replace(*arguments)
        alive.append(sum(one() is not None for one in kept))

    monkeypatch.setattr(weight_conversion, "replace_linear", counted)
    convert_linears(model, weights)
    assert alive == list(range(len(kept), 0, -1))


@pytest.mark.parametrize("weights", ENCODERS)
@pytest.mark.parametrize("name", ["lora", "t5", "mamba", "jamba"])
def test_models_that_read_weights_by_themselves(name, weights):
    """The data types of converted layers, the values of layers that are left as they are."""
    if name == "lora":
        options_of_lora = peft.LoraConfig(
            r=64, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model_with(None), options_of_lora).eval()
    else:
        sizes = {"t5": {"d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 2, "d_kv": 32, "vocab_size": 101,
                        "decoder_start_token_id": 0},
                 "mamba": {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 101},
                 "jamba": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 101,
                           "num_attention_heads": 2, "num_key_value_heads": 2, "attn_layer_period": 2,
                           "attn_layer_offset": 1, "mamba_dt_rank": 64, "use_mamba_kernels": False, "num_experts": 1,
                           }}[name]  # fmt: skip
        config = AutoConfig.for_model(name, **sizes)
        kind = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
        model = kind.from_config(config).eval()
    options = {"max_new_tokens": 4, "do_sample": False}
    plain = engine.generate(model, prompt(1, pads=0), **options, output_logits=True)
    generator = engine.Generator(model, config=engine.EngineConfig(weights=weights))
    out = generator.generate(prompt(1, pads=0), **options, output_logits=True)
    assert relative(out.logits[0], plain.logits[0]) < {"int8": 0.05, "int4": 0.5}[weights]
    assert out.tokens == model.generate(**prompt(1, pads=0), **options)[:, -4:].tolist()
    if name == "lora":
        model.add_adapter("other", options_of_lora)
        model.set_adapter("other")
        again = generator.generate(prompt(1, pads=0), **options, output_logits=True)
        assert torch.isfinite(again.logits[0]).all()
        assert not torch.equal(again.logits[0], out.logits[0])


def test_products_beyond_the_range_of_float16():
    linear = nn.Linear(64, 1, bias=False).half()
    linear.weight.data.fill_(1.0)
    layer = layer_of("int8", linear.weight)
    for rows in (16, 17):
        out = layer(torch.full((rows, 64), 100.0).half())
        assert (out.dtype, out[0].tolist()) == (torch.float16, [6400.0])


def test_ids_outside_of_tied_embeddings_are_refused():
    generator = engine.Generator(model_with(None, tie_word_embeddings=True), config=engine.EngineConfig(weights="int8"))
    for wrong in (-1, 101):
        with pytest.raises(engine.InputError, match=f"{wrong}.*101"):
            generator.generate(torch.tensor([[3, wrong]]), max_new_tokens=2)
    for wrong, said in ((torch.tensor([[3, 112]]), "token id 112 .* of 101 tokens"), (torch.tensor([3.0]), "integers")):
        with pytest.raises(engine.InputError, match=said) as refused:
            generator.model.get_input_embeddings()(wrong)
        assert refused.value.__suppress_context__  # the kernel's error names a file that was compiled


def test_widths_that_are_no_multiple_are_filled_up():
    for weights in ENCODERS:
        model = model_with(weights, intermediate_size=70)
        assert all(type(module) is not nn.Linear for module in model.modules())
        out = engine.generate(model, prompt(), max_new_tokens=4)
        assert torch.equal(out.sequences, model.generate(**prompt(), max_new_tokens=4, do_sample=False))


def test_what_cannot_be_converted_is_refused(monkeypatch):
    holder = Holder(nn.Sequential(nn.LayerNorm(8)))
    with pytest.raises(engine.OptionError, match="has no linear layers that can be converted"):
        convert_linears(holder, "int4")
    with pytest.raises(engine.ConfigError, match="weights='int3', but it is one of file, full, int8, int4"):
        engine.EngineConfig(weights="int3")
    monkeypatch.setattr(weight_conversion, "is_dispatched", lambda _: True)
    with pytest.raises(engine.OptionError, match="are for CPUs, and LlamaForCausalLM is elsewhere"):
        convert_linears(model_with(None), "int8")


@needs_kernels
@pytest.mark.parametrize("compile", ["off", "auto"])
@pytest.mark.parametrize("weights", ENCODERS)
def test_inputs_of_eight_bits(weights, compile, tmp_path, monkeypatch):
    if not has_integer_products():
        pytest.skip("this processor has no AVX-512 VNNI")
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path))
    config = engine.EngineConfig(weights=weights, activations="int8", compile=compile)
    generator = engine.Generator(model_with(None), config=config)
    exact = engine.Generator(model_with(None), config=engine.EngineConfig(weights=weights))
    assert "bits, times inputs of 8 bits" in repr(generator)
    assert "times" not in repr(exact)
    inputs, asked = prompt(2, tokens=20, pads=0), {"output_logits": True, "max_new_tokens": 6}
    if compile == "auto":
        generator.warmup(inputs, **asked)
    found, expected = (one.generate(inputs, **asked) for one in (generator, exact))
    assert 1e-4 < relative(found.logits[0], expected.logits[0]) < 0.1
    assert found.stats.compiled.startswith("2 layers" if compile == "auto" else "off")
    assert "times inputs of 8 bits" in repr(engine.Generator(generator.model)), "the model keeps it"


def test_where_inputs_cannot_be_rounded_it_is_refused(monkeypatch):
    with pytest.raises(engine.ConfigError, match="activations='int8' is for products with codes, and weights='full'"):
        engine.EngineConfig(weights="full", activations="int8")
    with pytest.raises(engine.OptionError, match=r"activations='int8' .* LlamaForCausalLM has none: ask for weights="):
        engine.Generator(model_with(None), config=engine.EngineConfig(activations="int8"))
    monkeypatch.setattr(weight_conversion, "kernels", lambda: None)
    with pytest.raises(engine.OptionError, match=r"activations='int8' needs the kernels .* AVX-512 VNNI"):
        engine.Generator(model_with("int8"), config=engine.EngineConfig(activations="int8"))


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("weights", ENCODERS)
def test_there_is_no_checkpoint_without_weights(weights, is_tied, tmp_path):
    model = model_with(weights, tie_word_embeddings=is_tied)
    for save in (lambda: model.save_pretrained(tmp_path / "model"), model.state_dict):
        with pytest.raises(engine.OptionError, match="save the model before it is given to a Generator"):
            save()
    assert not list(tmp_path.rglob("*.safetensors"))
    texts = [engine.generate(one, prompt(), max_new_tokens=4).tokens for one in (model, copy.deepcopy(model))]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("weights", ENCODERS)
def test_codes_are_made_anew_of_weights_that_are_loaded(weights, is_tied, is_strict):
    model, other = (model_with(None, tie_word_embeddings=is_tied) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    for one in (model, other):
        convert_linears(one, weights)
    first = engine.generate(model, prompt(), max_new_tokens=8)
    assert not any(model.load_state_dict(state, strict=is_strict))
    out = engine.generate(model, prompt(), max_new_tokens=8)
    assert out.tokens == engine.generate(other, prompt(), max_new_tokens=8).tokens != first.tokens
    with pytest.raises(engine.InputError, match="since it was filled, weights were written"):
        engine.generate(model, first.sequences, cache=first.cache, max_new_tokens=2)
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(RuntimeError, match=r"up_proj.weight has the shape \(3, 64\), and the layer \(128, 64\)"):
        model.load_state_dict({name: state[name][:3]}, strict=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("weights", ENCODERS)
def test_a_cast_leaves_codes_and_scales(weights, is_tied, dtype):
    model = model_with(weights, tie_word_embeddings=is_tied)
    copied = copy.deepcopy(model).to(dtype)
    for one, other in zip(model.modules(), copied.modules(), strict=True):
        if isinstance(one, LowBitLinear):
            assert all(map(torch.equal, one.buffers(), other.buffers()))
            assert other.weight.dtype == dtype
    embeddings = copied.get_input_embeddings()
    assert (copied.dtype, embeddings.weight.dtype, embeddings(torch.tensor([3])).dtype) == (dtype,) * 3
    out = engine.generate(copied, prompt(), max_new_tokens=4, output_logits=True)
    expected = engine.generate(model, prompt(), max_new_tokens=1, output_logits=True)
    assert relative(out.logits[0].float(), expected.logits[0]) < 0.1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_the_weights_in_full_is_given_back():
    code = """
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import engine
from caches.platform.host_allocator import give_back_freed_memory

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

model = LlamaForCausalLM(LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=12, vocab_size=64))
in_full = sum(parameter.nbytes for parameter in model.parameters())
generator = engine.Generator(model, config=engine.EngineConfig(weights="int8"))
left = resident()
give_back_freed_memory()
print((left - resident()) / in_full)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 0.1
