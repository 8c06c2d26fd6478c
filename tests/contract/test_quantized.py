"""Quantized caches: what the codecs write, that it is written once, and that everything around them loses nothing."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from architectures import prompt, tiny_model
from contract import KINDS, is_taken
from exact_codecs import Exactly
from trial import Trial
from walk import walk

import caches
import engine
from caches import backends
from caches.attention.kv_view import KeyValueView
from caches.attention.segments import Segment
from caches.quantization.codec import CHOICES, Affine, new_codec
from configs import CODECS, ConfigError, QuantizedCacheConfig

pytestmark = pytest.mark.covering("values", "pairs")

WRITINGS = [
    {"backend": "quanto"},
    {"backend": "quanto", "rotate": False, "nbits_key": 2},
    {"backend": "quanto", "nbits": 2, "axis_key": -1, "axis_value": -1, "q_group_size": 16},
    {"backend": "hqq", "nbits": 1},
    {"backend": "hqq", "nbits": 2, "q_group_size": 4},
    {"backend": "hqq", "nbits": 3, "axis_key": 0, "q_group_size": 8},
    {"backend": "hqq", "nbits": 8, "axis_key": 0, "axis_value": 0, "q_group_size": 8},
    {"backend": "hqq", "nbits_key": 8, "nbits_value": 3},
    {"backend": "fp8"},
    {"backend": "fp8", "rotate": True, "q_group_size": 8},
    {"backend": "kivi", "nbits": 2, "q_group_size": 8},
    {"backend": "kivi", "nbits": 3, "q_group_size": 8},
]
each_writing = pytest.mark.parametrize("options", WRITINGS, ids=lambda options: "-".join(map(str, options.values())))


def columns_like_keys(rows=2, heads=2, count=64, width=32, seed=0):
    """[rows, heads, count, width] with channels of different sizes, as keys have."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(width, generator=generator) * 4
    return torch.randn(rows, heads, count, width, generator=generator) * sizes + sizes


def read(codec: Affine, columns: torch.Tensor) -> Segment:
    place = torch.empty_like(columns), torch.empty(columns.numel(), dtype=torch.uint8)
    return codec.decode(codec.encode(columns), lambda: place)


def written_and_read(codec: Affine, columns: torch.Tensor) -> torch.Tensor:
    return read(codec, columns).materialize()


# What is written.


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("axis", "per_channel"), [(0, False), (-1, True)])
def test_quanto_writes_what_the_library_does(axis, per_channel, bits):
    from optimum.quanto import MaxOptimizer, qint2, qint4
    from optimum.quanto.tensor.grouped import ungroup

    columns = columns_like_keys(rows=1, count=16, width=16)
    flat = columns[0].permute(1, 0, 2).reshape(16, -1)  # columns outermost
    scale, shift = MaxOptimizer()(flat, {2: qint2, 4: qint4}[bits], axis, group_size=16)
    codes = torch.ops.quanto.quantize_affine(flat, bits=bits, axis=axis, group_size=16, scale=scale, shift=shift)
    theirs = ungroup(codes * scale - shift, axis=axis, orig_shape=flat.shape).view(16, 2, 16).permute(1, 0, 2)
    ours = written_and_read(Affine(bits, 16, per_channel, CHOICES["quanto"]), columns)
    assert torch.allclose(ours[0], theirs, atol=1e-5)
    assert not torch.allclose(ours[0], columns[0], atol=1e-2)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("axis", "per_channel"), [(1, False), (0, True)])
def test_hqq_writes_what_the_library_does(axis, per_channel, bits):
    from hqq.core.quantize import Quantizer

    columns = columns_like_keys(rows=1, count=16, width=16)
    flat = columns[0].permute(1, 0, 2).reshape(16, -1)
    more = {"nbits": bits, "group_size": 16, "axis": axis, "optimize": False, "device": "cpu"}
    codes, meta = Quantizer.quantize(flat, **more, bitpack=False)
    theirs = Quantizer.dequantize(codes, meta | {"compute_dtype": torch.float32}).view(16, 2, 16).permute(1, 0, 2)
    ours = written_and_read(Affine(bits, 16, per_channel, CHOICES["hqq"]), columns)
    assert torch.allclose(ours[0], theirs, atol=1e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("per_channel", [False, True])
def test_equal_steps_from_the_least_to_the_greatest(per_channel, bits):
    """Half a step is the largest error, and the ends of every group are exact: as KIVI has it."""
    columns = columns_like_keys(count=24, width=24)
    found = written_and_read(Affine(bits, 8, per_channel, CHOICES["kivi"]), columns)
    groups = columns.unflatten(2, (-1, 8)).transpose(-1, -2) if per_channel else columns.unflatten(3, (-1, 8))
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    errors = (found - columns).abs()
    errors = errors.unflatten(2, (-1, 8)).transpose(-1, -2) if per_channel else errors.unflatten(3, (-1, 8))
    assert (errors <= step[..., None] / 2 * 1.001 + 1e-6).all()
    assert (errors.amax(-1) > step / 8).float().mean() > 0.9


def test_fp8_keeps_four_significant_bits():
    columns = columns_like_keys()
    error = (written_and_read(Affine(8, 32, False, CHOICES["fp8"]), columns) - columns).abs()
    assert (error <= columns.abs() / 16 + columns.abs().amax(-1, keepdim=True) / 448).all()
    big = torch.full((1, 1, 8, 8), 144.0)  # a scale of each group: nothing is frozen at what came first
    assert torch.allclose(written_and_read(Affine(8, 8, False, CHOICES["fp8"]), big), big, rtol=0.05)


@pytest.mark.parametrize("value", [0.0, -3.5])
@each_writing
def test_a_group_of_equal_numbers(options, value):
    config = QuantizedCacheConfig(**options)
    for name in ("keys", "values"):
        columns = torch.full((1, 2, 16, 16), value)
        assert torch.allclose(written_and_read(new_codec(config, name), columns), columns, atol=1e-3)


def test_kivi_groups_keys_per_channel_and_values_over_channels():
    config = QuantizedCacheConfig(backend="kivi", nbits=2)
    keys, values = new_codec(config, "keys"), new_codec(config, "values")
    assert (keys.per_channel, values.per_channel, keys.group, values.group) == (True, False, 32, 32)
    columns = columns_like_keys()  # channels of different sizes: what keys are like
    errors = [(written_and_read(codec, columns) - columns).abs().mean() for codec in (keys, values)]
    assert errors[0] < errors[1] / 1.3


@pytest.mark.parametrize(("width", "group"), [(80, 40), (96, 48), (64, 64), (20, 20), (7, 7), (128, 64)])
def test_a_group_divides_the_heads_width(width, group):
    config = QuantizedCacheConfig()
    parts = new_codec(config, "keys").encode(columns_like_keys(width=width))
    assert parts["scale"].shape[-1] == width // group
    assert written_and_read(new_codec(config, "keys"), columns_like_keys(width=width)).isfinite().all()


def test_scales_in_a_type_of_their_own():
    columns = columns_like_keys()
    full, half = (new_codec(QuantizedCacheConfig(compute_dtype=dtype), "keys") for dtype in (None, "float16"))
    assert full.encode(columns)["scale"].dtype == torch.float32
    assert half.encode(columns)["scale"].dtype == torch.float16
    assert torch.allclose(written_and_read(full, columns), written_and_read(half, columns), atol=0.03)


@each_writing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_codes_are_those_with_numbers(options, dtype):
    columns = columns_like_keys().to(dtype)
    queries, weights = torch.randn(2, 2, 3, 32).to(dtype), torch.rand(2, 2, 3, 64).to(dtype)
    codec = new_codec(QuantizedCacheConfig(**options), "values")
    close = 2**-7 if codec.rotate and dtype == torch.bfloat16 else 1e-5  # queries are rounded once more
    numbers = written_and_read(codec, columns)
    assert numbers.dtype == dtype
    scores, mixed = queries @ numbers.transpose(-1, -2), weights @ numbers
    for one, other in ((read(codec, columns).scores(queries), scores), (read(codec, columns).mixed(weights), mixed)):
        assert one.dtype == dtype
        assert (one - other).abs().max() <= close * other.abs().max()


# That it is written once.


def fed(cache, columns: torch.Tensor, steps: list[int]) -> torch.Tensor:
    """Keys and their negative as values, in steps; returns the keys that the cache then holds."""
    for part in columns.split(steps, dim=2):
        cache.begin(part.shape[2])
        cache.update(part, -part, 0)
        cache.commit()
    return cache.layers[0].keys


def quantized(**options) -> caches.Cache:
    recipe = caches.recipe("quantized")
    return recipe.build([KINDS["full"].specs[0]], recipe.options(**{"residual_length": 8, **options}))


@each_writing
def test_the_error_does_not_grow(options):
    """However many blocks were encoded since: transformers is_quantized all of them again each time."""
    cache, columns = quantized(**options), columns_like_keys(count=200)
    first = fed(cache, columns[:, :, :40], [40])[:, :, :32].clone()
    assert not torch.equal(first, columns[:, :, :32])
    last = fed(cache, columns[:, :, 40:], [1] * 60 + [37] + [1] * 63)
    assert torch.equal(last[:, :, :32], first)
    assert torch.equal(last[:, :, -1:], columns[:, :, -1:])  # the most recent ones are as they came


@each_writing
def test_steps_and_neighbours_change_nothing(options):
    columns = columns_like_keys(rows=3, count=120)
    whole = fed(quantized(**options), columns, [120])
    assert torch.equal(whole, fed(quantized(**options), columns, [30, 1, 1, 48, *[1] * 40]))
    for row in range(3):
        assert torch.equal(whole[row : row + 1], fed(quantized(**options), columns[row : row + 1], [120]))


@pytest.mark.parametrize("removed", [3, 10, 13, 50])
@each_writing
def test_crop_in_a_block_encodes_nothing_again(options, removed):
    cache, columns = quantized(**options), columns_like_keys(count=90)
    before = fed(cache, columns[:, :, :60], [60]).clone()
    cache.crop(-removed)
    kept, encoded = 60 - removed, cache.layers[0].timeline.encoded
    assert torch.equal(cache.layers[0].keys, before[:, :, :kept])
    after = fed(cache, columns[:, :, 60:], [17, *[1] * 13])
    assert encoded >= min(kept, 48)
    assert torch.equal(after[:, :, :encoded], before[:, :, :encoded])
    error = (after[:, :, kept:] - columns[:, :, 60:]).abs().mean()
    assert error <= (before - columns[:, :, :60]).abs().mean() * 1.5


# That nothing else is lost: with a codec that writes exactly, everything equals a cache that is_quantized nothing.


class Lazily(Exactly):
    """Decodes when its content is read, as code that computes with codes does: pieces are handed out again."""

    def has_kernel(self, dense):
        return True

    def decode(self, parts, place, in_codes):
        return Unread(partial(super().decode, parts, place, in_codes))


@dataclass
class Unread:
    read: Callable[[], Segment]

    @property
    def slots(self):
        return self.read().slots

    def materialize(self):
        return self.read().materialize()


@pytest.mark.covering("values")
@pytest.mark.parametrize("operations", [40, pytest.param(160, marks=pytest.mark.slow)])
@pytest.mark.parametrize("codec", [Exactly, Lazily])
@pytest.mark.parametrize("residual", [0, 3, 4])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if is_taken("quantized", KINDS[kind])])
def test_any_sequence_of_operations_with_blocks(kind, residual, codec, operations, monkeypatch):
    monkeypatch.setattr(backends, "new_codec", lambda options, name: codec())
    trial = Trial("quantized", kind, 3, residual_length=residual)
    for _ in walk(trial, f"{kind} {residual}", operations):
        pass


def test_blocks_that_were_cut_differently_cannot_be_joined(exactly):
    one, other = Trial("quantized", "full", 2), Trial("quantized", "full", 2)
    for trial in (one, other):
        trial.step(23)
    other.step(5)
    other.crop(-5)
    assert caches.join_rows([one.cache, one.cache]).batch_size == 4
    one.crop(-13)
    one.step(13)
    with pytest.raises(caches.StepError, match="taken back in one of them and its blocks are others"):
        caches.join_rows([one.cache, other.cache])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"nbits": 8}, "nbits=8 and 4, so one cannot hold the codes of the other"),
        ({"backend": "fp8", "nbits": 8}, "backend=fp8 and hqq, nbits=8 and 4, so one cannot"),
        ({"compute_dtype": "bfloat16"}, "compute_dtype=bfloat16 and None, so one cannot"),
        ({"nbits_key": 8}, "nbits_key=8 and None, so one cannot"),
        ({"rotate": False}, "rotate=False and None, so one cannot"),
        ({"residual_length": 6}, "residual_length=6 and 8, so one cannot"),
    ],
    ids=str,
)
def test_codes_of_another_format_cannot_be_joined(options, match):
    model, parts = tiny_model("llama"), []
    for other in ({}, options):
        parts.append(
            caches.build("quantized", model.config, **{"backend": "hqq", "nbits": 4, "residual_length": 8} | other)
        )
        with torch.no_grad():
            model(prompt(1, pads=0, tokens=30)["input_ids"], past_key_values=parts[-1])
    for join in (caches.join_rows, caches.DynamicCache.from_batch_splits):
        with pytest.raises(caches.StepError, match=match):
            join(parts)
        assert join([parts[1], parts[1]]).batch_size == 2


@pytest.mark.parametrize("chunk", [None, 5], ids=["whole", "in pieces"])
@pytest.mark.parametrize("pads", [0, 4])
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "mistral", "gemma3n_text", "deepseek_v3", "bamba", "falcon_h1", "bloom", "gpt2"]
)
def test_text_equals_transformers(as_they_are, name, pads, chunk):
    model, inputs = tiny_model(name), prompt(pads=pads)
    config = engine.EngineConfig(cache="quantized", prefill_chunk_tokens=chunk)
    out = engine.Generator(model, config=config).generate(
        inputs, cache_config={"residual_length": 6}, max_new_tokens=16
    )
    assert torch.equal(out.sequences, model.generate(**inputs, max_new_tokens=16, do_sample=False))
    assert out.cache.is_quantized


def test_padding_in_the_last_piece_of_a_prompt(as_they_are):
    """The first row is 5 of 40 tokens: its padding sees nothing, not even in a piece that reads blocks."""
    model, inputs = tiny_model("llama"), prompt(tokens=40, pads=35)
    config = engine.EngineConfig(cache="quantized", prefill_chunk_tokens=8)
    out = engine.Generator(model, config=config).generate(inputs, cache_config={"residual_length": 6}, max_new_tokens=9)
    assert torch.equal(out.sequences, model.generate(**inputs, max_new_tokens=9, do_sample=False))


def test_beams_and_turns(as_they_are):
    model, inputs = tiny_model("llama"), prompt(pads=0)
    ours = caches.build("quantized", model.config, residual_length=6)
    options = {"max_new_tokens": 20, "do_sample": False, "num_beams": 3}
    assert torch.equal(model.generate(**inputs, **options, past_key_values=ours), model.generate(**inputs, **options))
    first = engine.generate(model, inputs, cache="quantized", cache_config={"residual_length": 6}, max_new_tokens=9)
    ids = torch.cat([first.sequences, prompt(pads=0, tokens=5, seed=3)["input_ids"]], dim=1)
    second = engine.generate(model, ids, cache=first.cache, max_new_tokens=20)
    assert second.stats.prompt_tokens == 2 * 6
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert torch.equal(second.sequences, expected)


# What it costs, and what it says.


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_four_bits_are_a_fifth_of_float32(backend):
    columns = torch.randn(1, 4, 4096, 64)
    cache = quantized(backend=backend, residual_length=128)
    fed(cache, columns, [1024] * 4)
    beside = sum(tensor.nbytes for tensor in cache.scratch.tensors())
    assert cache.bytes - beside <= 0.2 * 2 * columns.nbytes
    assert beside <= 1.2 * 2 * columns.nbytes  # of one layer, whatever their number
    many = caches.recipe("quantized").make([KINDS["full"].specs[0]] * 5, QuantizedCacheConfig(backend=backend))
    for count in (3000, 1096):
        many.begin(count)
        for layer in range(5):
            many.update(columns[:, :, :count], columns[:, :, :count], layer)
        many.commit()
    assert sum(tensor.nbytes for tensor in many.scratch.tensors()) <= 1.1 * beside


@pytest.mark.parametrize("residency", ["device", "host", "disk"])
def test_buffers_of_scales_grow_as_seldom_as_those_of_codes(residency):
    cache, sizes = quantized(backend="kivi", q_group_size=8, residency=residency), {}
    columns = columns_like_keys(rows=1, count=1)
    for _ in range(400):
        fed(cache, columns, [1])
        for name, part in cache.layers[0].stores["keys"].parts.items():
            sizes.setdefault(name, set()).add(part.buffer.bytes)
    assert sizes.keys() == {"codes", "scale", "offset"}
    assert len(sizes["scale"]) == len(sizes["offset"]) == len(sizes["codes"]) < 10


@pytest.mark.parametrize(
    ("backend", "options"), [("quantized", {}), ("quantized_sink", {"window_length": 20, "num_sink_tokens": 2})]
)
@pytest.mark.parametrize("pads", [0, 4])
def test_a_step_never_decodes_a_layer_whole(monkeypatch, backend, options, pads):
    """Where attention takes it piece by piece."""
    wholes, whole = [], KeyValueView.materialize_for_model
    monkeypatch.setattr(KeyValueView, "materialize_for_model", lambda view: wholes.append(view) or whole(view))
    model, options = tiny_model("llama"), options | {"residual_length": 4}
    inputs = prompt(pads=pads)
    first = engine.generate(model, inputs, cache=backend, cache_config=options, max_new_tokens=2)
    wholes.clear()
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 2, dtype=torch.long)], dim=1)
    again = {"input_ids": first.sequences, "attention_mask": mask}
    engine.generate(model, again, cache=first.cache, max_new_tokens=40)
    assert not wholes


@pytest.mark.slow
def test_a_window_of_blocks_takes_constant_memory():
    model = tiny_model("llama")
    options = {"window_length": 40, "residual_length": 8, "num_sink_tokens": 2}
    sizes = set()
    for new in (110, 170, 230):
        out = engine.generate(model, prompt(), cache="quantized_sink", cache_config=options, max_new_tokens=new)
        sizes.add(out.stats.cache_bytes)
    assert len(sizes) == 1


def test_a_long_prompt_is_never_there_in_full():
    """Layers encode as they are written: of all but one nothing is in full but the residual."""
    recipe, columns = caches.recipe("quantized"), torch.randn(1, 2, 2048, 32)
    cache = recipe.build([KINDS["full"].specs[0]] * 6, recipe.options())
    cache.begin(2048)
    for layer in range(6):
        cache.update(columns.clone(), columns.clone(), layer)
    assert cache.bytes < 0.32 * 6 * 2 * columns.nbytes  # the next residual among them, until the step ends


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"backend": "quanto", "nbits": 3}, r"does not support 3 bits, only 2, 4"),
        ({"backend": "hqq", "nbits": 5}, r"does not support 5 bits, only 1, 2, 3, 4, 8"),
        ({"backend": "quanto", "axis_key": 1}, r"axis_key=1, but backend='quanto' has the axes -1, 0"),
        ({"backend": "HQQ", "axis_value": -1}, r"axis_value=-1, but backend='hqq' has the axes 0, 1"),
        ({"backend": "kivi", "axis_key": 0}, r"axis_key=0, but the groups of backend='kivi' are fixed"),
        ({"backend": "awq"}, r"no codec named 'awq'; known: fp8, hqq, kivi, quanto"),
        ({"backend": "quanto", "nbits_value": 8}, r"does not support 8 bits, only 2, 4"),
        ({"backend": "kivi", "rotate": True}, r"rotate=True, but backend='kivi' has groups per channel"),
        ({"backend": "hqq", "axis_value": 0, "rotate": True}, r"rotate=True, but backend='hqq' has groups per channel"),
        ({"q_group_size": 0}, r"q_group_size"),
        ({"nbits_key": 0}, r"nbits_key"),
        ({"residual_length": -1}, r"residual_length=-1"),
        ({"compute_dtype": "int8"}, r"compute_dtype='int8' is no floating-point type"),
    ],
)
def test_options_that_cannot_be(options, match):
    with pytest.raises(ConfigError, match=match):
        caches.build("quantized", tiny_model("llama").config, **options)


@pytest.mark.parametrize(("backend", "package"), [("quanto", "optimum-quanto"), ("hqq", "hqq")])
def test_a_library_that_is_not_installed(monkeypatch, backend, package):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"needs the package {package}, .*: pip install {package}"):
        caches.build("quantized", tiny_model("llama").config, backend=backend)
    assert caches.build("quantized", tiny_model("llama").config, backend="kivi").is_quantized


def test_every_codec_is_described_and_there():
    assert CHOICES.keys() == CODECS.keys()
    for backend, facts in CODECS.items():
        for bits in facts.bits:
            fed(quantized(backend=backend, nbits=bits, q_group_size=8), columns_like_keys(), [64])


def test_models_of_which_some_layers_encode_nothing():
    """Windows shorter than the residual and states stay as they are. Where nothing is left: test_backend_table.py."""
    cache = caches.build("quantized", tiny_model("gemma2").config, residual_length=16)
    assert [layer.spec.layer_type for layer in cache.layers if layer.is_quantized] == ["full_attention"]
