"""The kernel for several tokens per row gives what torch gives."""

import pytest
import torch
from architectures import ARCHITECTURES, prompt, tiny_model
from helpers import assert_rounded_once, needs_kernels, threads_of_torch, wide
from torch.nn.functional import scaled_dot_product_attention

import engine
from caches.attention import dispatch, kernels
from caches.attention.kernels import prompt_attention
from caches.platform.native import DTYPES


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch):
    monkeypatch.setattr(kernels, "_IS_FASTER", True)
    monkeypatch.setattr(kernels, "multiplies", lambda dtype: False)
    with threads_of_torch(2):
        yield


def causal(rows, tokens, slots):
    return torch.ones(rows, 1, tokens, slots, dtype=torch.bool).tril(slots - tokens)


def window(rows, tokens, slots, size=20):
    return causal(rows, tokens, slots).triu(slots - tokens - size)


def padded(rows, tokens, slots):
    mask = causal(rows, tokens, slots)
    for row in range(rows):
        mask[row, :, :, : slots // 2 * row] = False
    return mask


def scattered(rows, tokens, slots):
    return torch.rand(rows, 1, tokens, slots) < 0.4


MASKS = {
    "none": lambda *sizes: None, "causal": causal, "window": window, "padded": padded, "scattered": scattered,
    "window of blocks": lambda *sizes: window(*sizes, size=200),
    "of all rows": lambda rows, tokens, slots: causal(1, tokens, slots),
    "of all tokens": lambda rows, tokens, slots: causal(rows, 1, slots).expand(-1, -1, tokens, -1),
}  # fmt: skip


def asked(rows, heads, repeats, tokens, slots, widths):
    torch.manual_seed(0)
    query = 3 * torch.randn(rows, tokens, heads * repeats, widths[0]).transpose(1, 2)  # as models have it
    return query, wide(rows, heads, slots, widths[0]), wide(rows, heads, slots, widths[1])


def expected_of(query, key, value, **options):
    """In double precision. 0 where a token sees no slot."""
    of = [one.double() for one in (query, key, value)]
    return scaled_dot_product_attention(*of, enable_gqa=True, **options).nan_to_num(0).transpose(1, 2)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("rows", "heads", "repeats", "tokens", "slots", "widths"), [
    (1, 4, 3, 100, 100, (64, 64)), (2, 1, 7, 33, 290, (24, 40)), (3, 2, 1, 61, 61, (16, 8)), (1, 1, 71, 5, 97, (8, 8)),
    (2, 8, 4, 2, 300, (32, 32)), (2, 1, 1, 200, 1, (8, 8)),
])  # fmt: skip
def test_it_is_attention(rows, heads, repeats, tokens, slots, widths, threads, mask, dtype):
    query, key, value = (one.to(dtype) for one in asked(rows, heads, repeats, tokens, slots, widths))
    given = MASKS[mask](rows, tokens, slots)
    with threads_of_torch(threads):
        found = prompt_attention(query, key, value, given, 0.2)
    if given is None:
        given = torch.ones(tokens, slots, dtype=torch.bool).tril()
    assert_rounded_once(found, expected_of(query, key, value, attn_mask=given, scale=0.2))


@needs_kernels
def test_the_same_keys_for_all_heads():
    query, key, value = asked(2, 2, 3, 50, 50, (16, 16))
    key, value = (one[:, :1].expand(-1, 2, -1, -1) for one in (key, value))
    found, mask = prompt_attention(query, key, value, None, None), torch.ones(50, 50, dtype=torch.bool).tril()
    torch.testing.assert_close(found.double(), expected_of(query, key, value, attn_mask=mask), atol=2e-5, rtol=1e-4)


@needs_kernels
@pytest.mark.parametrize("threads", [2, 7, 10, 11])
def test_few_heads_for_many_threads(threads):
    """Threads take fewer queries at once, and torch computes where these are too few."""
    query, key, value = asked(1, 1, 4, 40, 40, (16, 16))
    with threads_of_torch(threads):
        found = prompt_attention(query, key, value, None, None)
    assert (found is None) == (threads > 10)
    if found is not None:
        mask = torch.ones(40, 40, dtype=torch.bool).tril()
        torch.testing.assert_close(found.double(), expected_of(query, key, value, attn_mask=mask), atol=2e-5, rtol=1e-4)


@needs_kernels
def test_a_mask_of_other_bytes():
    query, key, value = asked(1, 2, 2, 40, 40, (16, 16))
    mask = scattered(1, 40, 40)
    found = prompt_attention(query, key, value, (mask.to(torch.uint8) * 3).view(torch.bool), None)
    assert torch.equal(found, prompt_attention(query, key, value, mask, None))


@needs_kernels
@pytest.mark.parametrize("part", ["key", "value"])
def test_what_is_not_a_number_stays_so(part):
    """For the tokens that see it."""
    query, key, value = asked(1, 2, 2, 200, 200, (16, 16))
    (key if part == "key" else value)[0, 1, 130] = torch.nan
    found = prompt_attention(query, key, value, None, None)
    assert found[0, 130:, 2:].isnan().all()
    assert not found[0, :, :2].isnan().any()
    assert not found[0, :96, 2:].isnan().any()


@needs_kernels
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gemma2"])  # which caps its scores
def test_the_text_is_that_of_torchs_attention(name, monkeypatch):
    """Of prompts, of a text that goes on, and of drafts, in layers with windows and without."""
    model, found = tiny_model(name), []

    def counting(*arguments):
        result = prompt_attention(*arguments)
        found.append(result is not None)
        return result

    in_chunks = engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=5))
    calls = [
        lambda: engine.generate(model, prompt(1, 19), max_new_tokens=12),
        lambda: engine.generate(model, prompt(1, 19), max_new_tokens=12, prompt_lookup_num_tokens=3),
        lambda: engine.generate(model, prompt(2, 12, pads=3), cache="static", max_new_tokens=8),
        lambda: in_chunks.generate(prompt(1, 19), max_new_tokens=12),
    ]
    expected = [call().sequences for call in calls]
    monkeypatch.setattr(dispatch, "_MUCH", 0)
    monkeypatch.setattr(kernels, "prompt_attention", counting)
    for call, text in zip(calls, expected, strict=True):
        found.clear()
        assert torch.equal(call().sequences, text)
        assert found
        assert all(found)


@needs_kernels
def test_memory_that_is_out_is_reported_as_by_torch(monkeypatch):
    """What the tokens find is allocated by torch, whose error says so."""
    query, key, value = asked(1, 2, 2, 64, 64, (16, 16))
    error = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *sizes: (_ for _ in ()).throw(error))
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        prompt_attention(query, key, value, None, None)


@needs_kernels
def test_derivatives_and_autocast_are_torchs():
    query, key, value = asked(1, 2, 2, 64, 64, (16, 16))
    assert prompt_attention(query, key, value, None, None) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert prompt_attention(query, key, value, None, None) is None
    assert prompt_attention(query.requires_grad_(), key, value, None, None) is None


def zeros(*shape):
    return torch.zeros(shape)


@needs_kernels
@pytest.mark.parametrize("changed", [
    {"mask": zeros(1, 1, 64, 64)}, {"mask": torch.ones(1, 4, 64, 64, dtype=torch.bool)},
    {"mask": torch.ones(1, 1, 64, 65, dtype=torch.bool)}, {"mask": torch.ones(1, 1, 64, 128).bool()[..., ::2]},
    {"key": zeros(1, 2, 64, 16).double()}, {"key": zeros(1, 2, 16, 64).mT}, {"value": zeros(1, 2, 63, 16)},
    {"key": zeros(1, 3, 64, 16), "value": zeros(1, 3, 64, 16)},
    {"key": zeros(2, 2, 64, 16), "value": zeros(2, 2, 64, 16)},
    {"key": zeros(1, 2, 64, 8)}, {"key": zeros(1, 64, 2, 16).transpose(1, 2)},
    {"query": zeros(1, 4, 64, 12), "key": zeros(1, 2, 64, 12)},
])  # fmt: skip
def test_what_it_cannot_read(changed):
    query, key, value = asked(1, 2, 2, 64, 64, (16, 16))
    given = {"query": query, "key": key, "value": value, "mask": None}
    assert prompt_attention(**given, scale=None) is not None
    assert prompt_attention(**given | changed, scale=None) is None


@needs_kernels
@pytest.mark.parametrize(("shapes", "mask", "why"), [
    (((2, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8), (2, 9, 4, 8)), None, "keys and values that do not fit"),
    (((1, 4, 9, 8), (1, 2, 9, 16), (1, 2, 9, 8), (1, 9, 4, 8)), None, "keys and values that do not fit"),
    (((1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 8, 8), (1, 9, 4, 8)), None, "keys and values that do not fit"),
    (((1, 3, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8), (1, 9, 3, 8)), None, "keys and values that do not fit"),
    (((1, 3, 9, 8), (1, 0, 9, 8), (1, 0, 9, 8), (1, 9, 3, 8)), None, "keys and values that do not fit"),
    (((1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8), (1, 9, 4, 16)), None, "an output that does not fit"),
    (((1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8), (1, 9, 4, 8)), (1, 1, 9, 8), "a mask that does not fit"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(shapes, mask, why):
    kernel = kernels.KERNELS.or_error().prompt_attention
    query, key, value, out = map(torch.zeros, shapes)
    with pytest.raises(RuntimeError, match=why):
        kernel(query, key, value, None if mask is None else torch.ones(mask, dtype=torch.bool), 1.0, out)


@needs_kernels
def test_other_types_are_refused():
    kernel = kernels.KERNELS.or_error().prompt_attention
    query, key, value = asked(1, 2, 2, 64, 64, (16, 16))
    with pytest.raises(RuntimeError, match="float32"):
        kernel(query, key.double(), value, None, 1.0, torch.zeros(1, 64, 4, 16))
