"""GGUF files, whose linear layers and embeddings keep the codes that are in the file."""

import shutil

import pytest
import torch
from architectures import prompt
from gguf_files import write_gguf
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import engine
from engine.kernels.low_bit_linears import LowBitEmbedding, LowBitLinear

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers.integrations.gguf.reader", reason="transformers reads no headers yet")
TYPES = gguf.GGMLQuantizationType
BYTES = {"Q8_0": 34, "Q5_0": 22, "Q5_1": 24, "Q4_0": 18, "Q4_1": 20, "Q4_K": 18.5, "Q5_K": 22.5, "Q6_K": 26.25}  # of 32
SIMPLE = [type_name for type_name in BYTES if not type_name.endswith("K")]
MIXTURES = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}
LARGER = ("token_embd", "output.", "blk.0.attn_v", "blk.0.ffn_down")  # matrices of a mixture, of the type Q6_K
OF_THE_MODEL = ("model.embed_tokens", "lm_head", "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.down_proj")
TOKENS = {"vocab": {chr(33 + token): token for token in range(99)} | {"ab": 99, "cd": 100},
          "merges": [("a", "b"), ("c", "d")]}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Of random models with few heads for keys, by (type, is_tied)."""
    folder, written = tmp_path_factory.mktemp("gguf"), {}

    def file(type_name, is_tied=False, **sizes):
        key = type_name, is_tied, *sizes.items()
        if key not in written:
            torch.manual_seed(0)
            shape = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=101, initializer_range=0.3)  # fmt: skip
            if type_name in MIXTURES:
                shape |= {"hidden_size": 256, "intermediate_size": 512}
            config = LlamaConfig(**shape | sizes, tie_word_embeddings=is_tied, eos_token_id=None, bos_token_id=None)
            model = AutoModelForCausalLM.from_config(config)
            written[key] = write_gguf(model, folder / f"{len(written)}.gguf", blocks_of(type_name), TOKENS)
        return written[key]

    return file


def blocks_of(type_name):
    """The type of a matrix by its name, as llama.cpp mixes them, or that of all."""
    if type_name not in MIXTURES:
        return TYPES[type_name]
    return lambda name: TYPES.Q6_K if name.startswith(LARGER) else TYPES[MIXTURES[type_name]]


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
@pytest.mark.parametrize("type_name", [*SIMPLE, *MIXTURES])
@torch.no_grad()
def test_codes_are_the_weights_of_the_file(files, type_name, is_tied):
    model, full = loaded(files(type_name, is_tied)).model, theirs(files(type_name, is_tied))
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LowBitLinear)}
    assert not any(type(module) in (nn.Linear, nn.Embedding) for module in model.modules())
    assert len({id(layer) for layer in layers.values()}) == 2 * 7 + (1 if is_tied else 2)
    for name, layer in layers.items():
        weights = layer.blocks.rows(torch.arange(layer.out_features))[:, : layer.in_features]
        assert torch.equal(weights, full.get_submodule(name.removesuffix(".head")).weight), name
    filled = 0.0
    for name, weight in full.named_parameters():
        if weight.ndim == 2:
            is_larger = type_name in MIXTURES and name.startswith(OF_THE_MODEL)
            bytes_of_32 = BYTES["Q6_K" if is_larger else MIXTURES.get(type_name, type_name)]
            filled += -(-weight.shape[0] // 16) * 16 * weight.shape[1] // 32 * bytes_of_32
    others = sum(weight.nbytes for weight in full.parameters() if weight.ndim == 1) + bytes_of(model.model.rotary_emb)
    assert bytes_of(model) == filled + others


@pytest.mark.parametrize("arguments", [{}, {"cache": "static"}, {"num_beams": 3}, {"cache": "quantized"}], ids=str)
@pytest.mark.parametrize("type_name", ["Q8_0", "Q5_0", "Q4_1", *MIXTURES])
def test_the_text_of_the_decoded_model(files, type_name, arguments):
    gen, full = loaded(files(type_name, is_tied=True)), loaded(files(type_name, is_tied=True), weights="full")
    assert type(full.model.lm_head) is nn.Linear
    inputs = prompt(2, tokens=12)
    out = gen.generate(inputs, **arguments, max_new_tokens=16, output_logits=True)
    expected = full.generate(inputs, **arguments, max_new_tokens=16, output_logits=True)
    assert out.tokens == expected.tokens
    assert (out.logits[0] - expected.logits[0]).abs().max() < 1e-3 * expected.logits[0].abs().max()


def test_the_table_of_transformers_is_as_before(files):
    table = pytest.importorskip("transformers.integrations.gguf.dequant").GGML_BLOCK
    before = dict(table)
    for type_name in ("Q5_0", "Q5_1"):
        loaded(files(type_name))
        assert table == before


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_layers_of_several_types_are_compiled(files):
    """Products of one input by codes of as many bits are one product; the others are computed alone."""
    gen, full = loaded(files("Q4_K_M"), compile="auto"), loaded(files("Q4_K_M"), weights="full")
    inputs = prompt(2, tokens=12)
    assert gen.warmup(inputs, max_new_tokens=16) == "2 layers"
    out = gen.generate(inputs, max_new_tokens=16, output_logits=True)
    expected = full.generate(inputs, max_new_tokens=16, output_logits=True)
    assert out.stats.compiled == "2 layers"
    assert out.tokens == expected.tokens
    assert (out.logits[-1] - expected.logits[-1]).abs().max() < 1e-3 * expected.logits[-1].abs().max()


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
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
    assert (plan.dtype, plan.weights, plan.weights_are_loaded) == (expected.dtype, expected.weights, False)
    bits = {"full": "", "int8": "8", "int4": "4, 5 and 8" if is_tied else "4 and 5"}.get(weights, type_name[1:2])
    has_codes = weights in ("int8", "int4") or (weights == "file" and type_name != "F16")
    assert plan.weights == (f"codes of {bits} bits (the rest float32)" if has_codes else "float32")
    assert f"LlamaForCausalLM, {plan.weights} on cpu" in " ".join(str(plan).split())
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


@pytest.mark.parametrize("size", [0, 20, 0.5, 0.99], ids="{} of its bytes".format)
def test_a_file_that_is_cut_short(files, tmp_path, size):
    """size: bytes, or a share of all."""
    content = files("Q8_0").read_bytes()
    content = content[: size if isinstance(size, int) else int(size * len(content))]
    (tmp_path / "cut.gguf").write_bytes(content)
    with pytest.raises(
        engine.InputError, match=rf"its {len(content):,} bytes are damaged or a part .* download it again"
    ):
        loaded(tmp_path / "cut.gguf")


def test_a_file_that_lacks_weights(files, tmp_path, monkeypatch):
    file = files("Q8_0")
    content = file.read_bytes().replace(b"blk.1.ffn_norm.weight", b"blk.9.ffn_norm.weight")
    (tmp_path / "cut.gguf").write_bytes(content)
    with pytest.raises(engine.InputError, match=r"1 weights of a LlamaForCausalLM are missing: model\.layers\.1\.post"):
        loaded(tmp_path / "cut.gguf")
