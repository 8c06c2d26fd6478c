"""The kernel for several tokens per row gives what torch gives."""

import pytest
import torch
from architectures import ARCHITECTURES, prompt, tiny_model
from helpers import needs_kernels, threads_of_torch, wide
from torch.nn.functional import scaled_dot_product_attention

import engine
from caches.attention import prompt_attention as module
from caches.attention.prompt_attention import prompt_attention
from engine.model import packed_attention


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
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("rows", "heads", "repeats", "tokens", "slots", "widths"), [
    (1, 4, 3, 100, 100, (64, 64)), (2, 1, 7, 33, 290, (24, 40)), (3, 2, 1, 61, 61, (16, 8)), (1, 1, 71, 5, 97, (8, 8)),
    (2, 8, 4, 2, 300, (32, 32)), (2, 1, 1, 200, 1, (8, 8)),
])  # fmt: skip
def test_it_is_attention(rows, heads, repeats, tokens, slots, widths, threads, mask):
    query, key, value = asked(rows, heads, repeats, tokens, slots, widths)
    given = MASKS[mask](rows, tokens, slots)
    with threads_of_torch(threads):
        found = prompt_attention(query, key, value, given, True, 0.2)
    if given is None:
        given = torch.ones(tokens, slots, dtype=torch.bool).tril()
    torch.testing.assert_close(
        found.double(), expected_of(query, key, value, attn_mask=given, scale=0.2), atol=2e-5, rtol=1e-4
    )


@needs_kernels
def test_tokens_that_see_all():
    query, key, value = asked(2, 2, 3, 50, 130, (16, 16))
    found = prompt_attention(query, key, value, None, False, None)
    torch.testing.assert_close(found.double(), expected_of(query, key, value), atol=2e-5, rtol=1e-4)


@needs_kernels
def test_what_is_not_a_number_stays_so():
    query, key, value = asked(1, 2, 2, 40, 40, (16, 16))
    key[0, 1, 30] = torch.nan
    found = prompt_attention(query, key, value, None, True, None)
    assert found[0, 30:, 2:].isnan().all()
    assert not found[0, :30].isnan().any()
    assert not found[0, :, :2].isnan().any()


@needs_kernels
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_text_is_that_of_torchs_attention(name, monkeypatch):
    """Of prompts, of a text that goes on, and of drafts, in layers with windows and without."""
    model, found = tiny_model(name), []

    def counting(*arguments):
        result = prompt_attention(*arguments)
        found.append(result is not None)
        return result

    in_chunks = engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=5))

    def texts():
        yield engine.generate(model, prompt(1, 19), max_new_tokens=12).sequences
        yield engine.generate(model, prompt(1, 19), max_new_tokens=12, prompt_lookup_num_tokens=3).sequences
        yield engine.generate(model, prompt(2, 12), cache="static", max_new_tokens=8).sequences
        yield in_chunks.generate(prompt(1, 19), max_new_tokens=12).sequences

    expected = [*texts()]
    monkeypatch.setattr(packed_attention, "_MUCH", 0)
    monkeypatch.setattr(packed_attention, "prompt_attention", counting)
    monkeypatch.setattr(module, "_QUERIES_OF_THREAD", 0)
    assert all(map(torch.equal, texts(), expected))
    assert any(found) == (name != "gemma2"), "whose scores are capped"


@needs_kernels
def test_derivatives_and_autocast_are_torchs():
    query, key, value = asked(1, 2, 2, 64, 64, (16, 16))
    with torch.autocast("cpu", torch.bfloat16):
        assert prompt_attention(query, key, value, None, True, None) is None
    assert prompt_attention(query.requires_grad_(), key, value, None, True, None) is None


@needs_kernels
@pytest.mark.parametrize("changed", [
    {"mask": torch.zeros(1, 1, 64, 64)}, {"mask": torch.ones(1, 4, 64, 64, dtype=torch.bool)},
    {"mask": torch.ones(1, 1, 64, 65, dtype=torch.bool)}, {"mask": torch.ones(1, 1, 64, 128).bool()[..., ::2]},
    {"key": torch.zeros(1, 2, 64, 16).double()}, {"key": torch.zeros(1, 2, 16, 64).mT},
    {"key": torch.zeros(1, 3, 64, 16)}, {"value": torch.zeros(1, 2, 63, 16)}, {"query": torch.zeros(1, 4, 1, 16)},
])  # fmt: skip
def test_what_it_cannot_read(changed):
    query, key, value = asked(1, 2, 2, 64, 64, (16, 16))
    given = {"query": query, "key": key, "value": value, "mask": None} | changed
    assert prompt_attention(**given, is_causal=True, scale=None) is None


@needs_kernels
@pytest.mark.parametrize(("shapes", "mask", "why"), [
    (((2, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8)), None, "do not fit the queries"),
    (((1, 4, 9, 8), (1, 2, 9, 16), (1, 2, 9, 8)), None, "do not fit the queries"),
    (((1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 8, 8)), None, "do not fit the queries"),
    (((1, 3, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8)), None, "do not fit the queries"),
    (((1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8)), (1, 1, 9, 8), "a mask that does not fit"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(shapes, mask, why):
    kernel = module.KERNELS.or_error().prompt_attention
    given = [torch.zeros(shape) for shape in shapes]
    with pytest.raises(RuntimeError, match=why):
        kernel(*given, None if mask is None else torch.ones(mask, dtype=torch.bool), True, 1.0)
