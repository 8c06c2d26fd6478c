"""GGUF files, whose linear layers and embeddings keep the codes that are in the file."""

import pytest
import torch
from architectures import prompt
from gguf_files import write_gguf
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import engine
from engine.kernels.low_bit_linears import LowBitEmbedding, LowBitLinear

gguf = pytest.importorskip("gguf")
dequant = pytest.importorskip("transformers.integrations.gguf.dequant", reason="transformers reads no headers yet")
TYPES = gguf.GGMLQuantizationType
BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}  # of 32 weights
TOKENS = {"vocab": {chr(33 + token): token for token in range(99)} | {"ab": 99, "cd": 100},
          "merges": [("a", "b"), ("c", "d")]}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Of random models with few heads for keys, by (type, is_tied)."""
    folder, written = tmp_path_factory.mktemp("gguf"), {}

    def file(type_name, is_tied=False, **sizes):
        if type_name in BYTES and TYPES[type_name] not in dequant.GGML_BLOCK:
            pytest.skip(f"the reader of headers in this transformers does not know {type_name} yet")
        key = type_name, is_tied, *sizes.items()
        if key not in written:
            torch.manual_seed(0)
            shape = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=101, initializer_range=0.3)  # fmt: skip
            config = LlamaConfig(**shape | sizes, tie_word_embeddings=is_tied, eos_token_id=None, bos_token_id=None)
            model = AutoModelForCausalLM.from_config(config)
            written[key] = write_gguf(model, folder / f"{len(written)}.gguf", TYPES[type_name], TOKENS)
        return written[key]

    return file


def loaded(file, weights="file", **options):
    gen = engine.Generator(file, config=engine.EngineConfig(weights=weights, **options))
    gen.model.generation_config.eos_token_id = None
    return gen


def theirs(file):
    """As transformers reads it, decoded."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def bytes_of(model):
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("type_name", BYTES)
@torch.no_grad()
def test_codes_are_the_weights_of_the_file(files, type_name, is_tied):
    model, full = loaded(files(type_name, is_tied)).model, theirs(files(type_name, is_tied))
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LowBitLinear)}
    assert not any(type(module) in (nn.Linear, nn.Embedding) for module in model.modules())
    assert len({id(layer) for layer in layers.values()}) == 2 * 7 + (1 if is_tied else 2)
    for name, layer in layers.items():
        weights = layer.blocks.rows(torch.arange(layer.out_features))[:, : layer.in_features]
        assert torch.equal(weights, full.get_submodule(name.removesuffix(".head")).weight), name
    matrices = [weight for name, weight in full.named_parameters() if weight.ndim == 2]
    filled = sum(-(-weight.shape[0] // 16) * 16 * weight.shape[1] // 32 * BYTES[type_name] for weight in matrices)
    others = sum(weight.nbytes for weight in full.parameters() if weight.ndim == 1) + bytes_of(model.model.rotary_emb)
    assert bytes_of(model) == filled + others


@pytest.mark.parametrize("arguments", [{}, {"cache": "static"}, {"num_beams": 3}, {"cache": "quantized"}], ids=str)
@pytest.mark.parametrize("type_name", BYTES)
def test_the_text_of_the_decoded_model(files, type_name, arguments):
    gen, full = loaded(files(type_name, is_tied=True)), loaded(files(type_name, is_tied=True), weights="full")
    assert type(full.model.lm_head) is nn.Linear
    inputs = prompt(2, tokens=12)
    out = gen.generate(inputs, **arguments, max_new_tokens=16, output_logits=True)
    expected = full.generate(inputs, **arguments, max_new_tokens=16, output_logits=True)
    assert out.tokens == expected.tokens
    assert (out.logits[0] - expected.logits[0]).abs().max() < 1e-3 * expected.logits[0].abs().max()


@pytest.mark.parametrize("type_name", ["F32", "F16", "Q5_0"])
def test_other_types_are_decoded(files, type_name):
    gen, full = loaded(files(type_name)), theirs(files(type_name))
    assert type(gen.model.lm_head) is nn.Linear
    inputs = prompt(1, pads=0)
    assert torch.equal(
        gen.generate(inputs, max_new_tokens=8).sequences, full.generate(**inputs, max_new_tokens=8, do_sample=False)
    )


def test_few_bits_of_another_kind_are_made_of_decoded_weights(files):
    gen = loaded(files("Q8_0"), weights="int4")
    assert gen.model.lm_head.blocks.bits == 4
    assert type(gen.model.model.embed_tokens) is nn.Embedding
    with pytest.raises(engine.OptionError, match="converted to another number of bits already"):
        engine.Generator(gen.model, config=engine.EngineConfig(weights="int8"))


def test_other_weights_have_the_data_type_that_was_asked_for(files):
    gen = loaded(files("Q4_1", is_tied=True), dtype="bfloat16")
    assert gen.model.model.norm.weight.dtype == torch.bfloat16
    assert type(gen.model.model.embed_tokens) is LowBitEmbedding
    out = gen.generate(prompt(1, pads=0), max_new_tokens=4, output_logits=True)
    assert out.logits[0].dtype in (torch.bfloat16, torch.float32)
    expected = loaded(files("Q4_1", is_tied=True)).generate(prompt(1, pads=0), max_new_tokens=4, output_logits=True)
    assert (out.logits[0] - expected.logits[0]).norm() < 0.05 * expected.logits[0].norm()


@pytest.mark.parametrize("weights", ["file", "full", "int8", "int4"])
@pytest.mark.parametrize(("type_name", "is_tied"), [("Q4_0", False), ("Q4_1", True), ("Q8_0", False), ("F16", True)])
def test_a_plan_counts_the_weights_that_stay(files, type_name, is_tied, weights, monkeypatch):
    file, run = files(type_name, is_tied), dict(cache="dynamic", prompt_tokens=20, max_new_tokens=4, device="cpu")
    model = loaded(file, weights).model
    expected = engine.plan(model, cache="dynamic", prompt_tokens=20, max_new_tokens=4)
    monkeypatch.setattr("caches.platform.transformers_api.GgufTensor.raw", lambda _: pytest.fail("weights were read"))
    plan = engine.plan(file, weights=weights, **run)
    assert plan.weight_bytes == bytes_of(model) == expected.weight_bytes
    assert (plan.dtype, plan.weights_are_loaded) == (expected.dtype, False)
    needs = [found["dynamic"].need_bytes["device"] for found in (plan, expected)]
    assert needs[0] - needs[1] == plan.weight_bytes


def test_settings_are_converted_once(files, monkeypatch, tmp_path):
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path / "folder"))
    file = files("Q8_0")
    first = loaded(file)
    (kept,) = (tmp_path / "folder" / "gguf").iterdir()
    assert (kept / "config.json").is_file()
    monkeypatch.setattr(engine.loading.gguf, "_convert_settings", lambda *_: pytest.fail("converted again"))
    assert loaded(file).tokenizer.get_vocab() == first.tokenizer.get_vocab()
    monkeypatch.undo()
    (tmp_path / "no folder").touch()
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path / "no folder"))
    assert loaded(file).generate(prompt(1, pads=0), max_new_tokens=2).sequences.shape[0] == 1


def test_a_file_that_lacks_weights(files, tmp_path, monkeypatch):
    file = files("Q8_0")
    content = file.read_bytes().replace(b"blk.1.ffn_norm.weight", b"blk.9.ffn_norm.weight")
    (tmp_path / "cut.gguf").write_bytes(content)
    with pytest.raises(engine.InputError, match=r"1 weights of a LlamaForCausalLM are missing: model\.layers\.1\.post"):
        loaded(tmp_path / "cut.gguf")
