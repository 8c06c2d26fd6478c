"""The kernels that multiply with codes as they are give what unpacking first gives."""

import copy
import dataclasses
import weakref
from functools import partial

import pytest
import torch
from architectures import prompt, tiny_model
from helpers import needs_kernels

import caches
import engine
from caches.attention import fused as kernel_of_codes
from caches.attention.kv_view import KeyValueView
from caches.attention.segments import CacheRows, DenseSegment
from caches.platform.native import DTYPES
from caches.quantization.codec import CHOICES, Affine, new_codec
from configs import ConfigError, QuantizedCacheConfig

CODECS = [("quanto", 4), ("quanto", 2), ("hqq", 8), ("hqq", 1), ("kivi", 4), ("kivi", 2)]


@needs_kernels
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("backend", "bits"), CODECS)
@pytest.mark.parametrize(("width", "group"), [(64, 64), (64, 16), (128, 64), (40, 8)])
def test_products_are_those_of_the_numbers(width, group, backend, bits, per_channel):
    torch.manual_seed(0)
    plain, kernel = (Affine(bits, group, per_channel, CHOICES[backend], fused=fused) for fused in (False, True))
    parts = plain.encode(torch.randn(3, 2, 10 * group, width) + 0.5)
    parts = {name: part.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for name, part in parts.items()}
    for begin, count in ((0, 10 * group), (group, 5 * group), (2 * group, group + 3), (0, 1)):
        blocks = slice(begin // group, begin // group - (-count // group))
        chosen = {
            name: part[:, :, blocks if plain.per_block(name) else slice(begin, begin + count)]
            for name, part in parts.items()
        }
        decode = partial(decoded, chosen, count, width)
        for tokens in (1, 3, 7, kernel_of_codes.FEW + 1):
            queries, weights = torch.randn(3, 2, tokens, width), torch.rand(3, 2, tokens, count)
            # Queries and weights are rounded to 16 bits where neighbouring channels share a scale.
            close = CLOSE if per_channel else CLOSE | {"atol": 5e-3}
            torch.testing.assert_close(decode(kernel).scores(queries), decode(plain).scores(queries), **close)
            torch.testing.assert_close(decode(kernel).mixed(weights), decode(plain).mixed(weights), **close)
        assert torch.equal(decode(kernel).materialize(), decode(plain).materialize())


CLOSE = {"atol": 1e-3, "rtol": 1e-4}


def decoded(parts, count, width, codec, dtype=torch.float32):
    out, scratch = torch.empty(3, 2, count, width, dtype=dtype), torch.empty(3 * 2 * count * width, dtype=torch.uint8)
    return codec.decode(parts, lambda: (out, scratch), codec.has_kernel(out))


@needs_kernels
@pytest.mark.parametrize(("mask", "dtype"), [
    (None, torch.float32), ("seen", torch.float32), *(("added", dtype) for dtype in DTYPES),
], ids=str)  # fmt: skip
@pytest.mark.parametrize(("backend", "bits"), CODECS)
@pytest.mark.parametrize(
    ("width", "group", "tokens", "repeats"),
    [(64, 8, 1, 3), (64, 64, 1, 3), (128, 8, 5, 1), (128, 32, 2, 1), (40, 8, 2, 8), (64, 8, 2, 9)],
)
def test_attention_is_that_of_the_numbers(width, group, tokens, repeats, backend, bits, mask, dtype):
    """Over codes in several pieces and what is kept in full; more queries than the kernel is for go another way."""
    torch.manual_seed(0)
    columns, query = (128, 64, 192, 7), torch.randn(3, 2 * repeats, tokens, width).to(dtype)
    views, numbers = [], []
    for name in ("keys", "values"):
        codec = new_codec(QuantizedCacheConfig(backend=backend, nbits=bits, q_group_size=group, fused=True), name)
        unpacked = dataclasses.replace(codec, fused=False)
        pieces, exact = [], []
        for count in columns[:-1]:
            parts = codec.encode((torch.randn(3, 2, count, width) * 2 + 0.5).to(dtype))
            parts = {name: part.contiguous() for name, part in parts.items()}
            pieces.append(decoded(parts, count, width, codec, dtype))
            in_full = {name: part.float() if part.is_floating_point() else part for name, part in parts.items()}
            exact.append(decoded(in_full, count, width, unpacked).materialize())
        pieces.append(DenseSegment(torch.randn(3, 2, 10, width).to(dtype)[:, :, : columns[-1]]))
        rows = CacheRows((3, 2, sum(columns), width), (), partial(list, pieces), in_codes=codec.has_kernel(query))
        views.append(KeyValueView([rows], query))
        numbers.append(torch.cat([*exact, pieces[-1].tensor.float()], dim=2))
    attn_mask = None
    if mask is not None:
        attn_mask = torch.rand(3, 1, tokens, sum(columns)) > 0.3
        attn_mask[0, :, :, :50] = False  # pads, more than the kernel takes at a time
        attn_mask[2, :, -1] = mask == "added"  # a query of padding sees nothing
    if mask == "added":
        attn_mask = torch.where(attn_mask, torch.randn(attn_mask.shape), torch.finfo(dtype).min).to(dtype)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    of_float = attn_mask.float() if mask == "added" else attn_mask
    expected = attend(query.float(), *numbers, attn_mask=of_float)
    attend = partial(attend, attn_mask=attn_mask)
    is_rounded_once = dtype == torch.float32 or tokens * repeats <= kernel_of_codes.FEW
    rounding = torch.finfo(dtype).eps / 2 if is_rounded_once else 8 * torch.finfo(dtype).eps
    found = attend(query, *views)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, atol=2e-3 if is_rounded_once else 0.2, rtol=1e-4 + rounding)
    query[1, 0, 0, 0] = float("nan")
    spoilt = attend(query, *views).isnan().flatten(2).any(-1)
    assert spoilt.nonzero().tolist() == [[1, 0]], "it is told, and the other heads and rows do not suffer"


@needs_kernels
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"penalty_alpha": 0.6, "top_k": 4}], ids=str)
@pytest.mark.parametrize(
    ("cache", "codec"),
    [
        ("quantized", {}),
        ("quantized", {"axis_key": -1, "axis_value": -1, "q_group_size": 8}),
        ("quantized", {"backend": "hqq", "nbits": 8}),
        ("quantized", {"backend": "kivi", "q_group_size": 8}),
        ("offloaded_quantized", {}),
        ("quantized_sink", {"window_length": 24, "num_sink_tokens": 3}),
    ],
    ids=str,
)
def test_the_text_is_the_same(cache, codec, options):
    check_text(tiny_model("llama"), cache, codec | {"residual_length": 8}, options)


@needs_kernels
@pytest.mark.parametrize("pads", [35, 39])
def test_the_text_is_the_same_with_padding_in_the_last_piece_of_a_prompt(pads):
    config = engine.EngineConfig(cache="quantized", prefill_chunk_tokens=8)
    generator = engine.Generator(tiny_model("llama"), config=config)
    texts = [
        generator.generate(prompt(tokens=40, pads=pads), cache_config=more | {"residual_length": 8}, max_new_tokens=30)
        for more in ({"fused": False}, {"fused": True})
    ]
    assert torch.equal(texts[0].sequences, texts[1].sequences)


@needs_kernels
@pytest.mark.parametrize("codec", [{}, {"backend": "kivi"}], ids=str)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_the_text_is_the_same_with_windows_that_begin_inside_of_a_block(options, codec):
    model = tiny_model("gemma2")
    assert model.config.sliding_window == 8
    check_text(model, "quantized", codec | {"residual_length": 4, "q_group_size": 4}, options)


def check_text(model, cache, codec, options):
    inputs = prompt()
    plain, ours = (
        engine.generate(model, inputs, cache=cache, cache_config=codec | more, max_new_tokens=30, **options)
        for more in ({"fused": False}, {})
    )
    assert torch.equal(ours.sequences, plain.sequences)


@needs_kernels
@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.release(),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.reserve(1000),
    ],
    ids=["release", "rows", "reserve"],
)
def test_columns_are_not_kept_alive(change):
    """Attention remembers where they are from step to step, and would hold buffers that are no longer used."""
    options = {"residual_length": 4}
    cache = engine.generate(tiny_model("llama"), prompt(), cache="quantized", cache_config=options).cache
    stores = [store for layer in cache.layers for store in layer.stores.values()]
    seen = [weakref.ref(piece) for store in stores for piece in store._segments[1]]
    assert len(seen) >= len(stores) == 2 * len(cache.layers)
    assert all(piece() for piece in seen)
    change(cache)
    assert not any(piece() for piece in seen)


@needs_kernels
def test_other_types_are_refused_with_the_first_step():
    model = copy.deepcopy(tiny_model("llama")).double()
    options = {"cache": "quantized", "cache_config": {"fused": True, "residual_length": 4}}
    with pytest.raises(
        engine.GenerationInterrupted, match=r"fused=True needs keys of float32, bfloat16 or float16 on a CPU.*float64"
    ) as stopped:
        engine.generate(model, prompt(), **options)
    assert stopped.value.partial.cache.total_tokens == 0


@needs_kernels
def test_derivatives_are_refused_and_plain_calls_are_not():
    model, cache = tiny_model("llama"), caches.build("quantized", tiny_model("llama").config, residual_length=4)
    ids = prompt(rows=1, tokens=13, pads=0)["input_ids"]
    with torch.no_grad():
        model(ids[:, :12], past_key_values=cache)
    logits = model(ids[:, 12:], past_key_values=cache).logits
    with pytest.raises(caches.StepError, match="attention over codes, which has no derivative"):
        logits.sum().backward()


@needs_kernels
@pytest.mark.parametrize("group", [256, 512])
def test_the_largest_codes_and_queries_do_not_overflow(group):
    """512 channels of 255 times 32767 are more than an integer of 32 bits holds."""
    codes = torch.full((1, 1, 5, 512), 255, dtype=torch.uint8)
    scale = torch.full((1, 1, 5, 512 // group), 1e-3)
    keys = kernel_of_codes.QuantizedSegment(codes, scale, None, 8, 0, lambda: DenseSegment(codes * 1e-3))
    queries = torch.full((1, 1, 2, 512), 3.0)
    queries[:, :, 1] *= -1
    torch.testing.assert_close(keys.scores(queries), queries @ (codes * 1e-3).mT, rtol=1e-4, atol=0)


@pytest.mark.parametrize("options", [{"backend": "fp8"}, {"backend": "kivi", "nbits": 3}, {"compute_dtype": "float16"}])
def test_what_has_no_kernel_is_refused(options):
    with pytest.raises(ConfigError, match="fused=True, but there is no kernel for"):
        QuantizedCacheConfig(fused=True, **options)


@pytest.mark.usefixtures("no_kernels")
def test_without_kernels_it_says_what_is_missing():
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match=r"fused=True needs the kernels .* not built .*C\+\+ compiler.*leave it out"):
        caches.build("quantized", model.config, fused=True)
    check_text(model, "quantized", {"residual_length": 4}, {})
