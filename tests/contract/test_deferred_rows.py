"""Another loop forks rows, its model materializes the prefix, and memory is out when rows stop sharing it."""

from __future__ import annotations

import pytest
import torch
from transformers import BartConfig, LlamaConfig

import caches

ROWS, COPIES = 2, 3
SIZES = {"num_attention_heads": 2, "vocab_size": 32}
LLAMA = LlamaConfig(hidden_size=16, num_hidden_layers=2, num_key_value_heads=2, **SIZES)
BART = BartConfig(d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2)


def feed(cache, tokens, rows):
    for layer in range(2):
        for read in cache.update(torch.randn(rows, 2, tokens, 8), torch.randn(rows, 2, tokens, 8), layer):
            read.clone()  # which materializes it


def forked(config):
    """A cache of which the last step, not committed yet, has materialized the prefix; and its keys before that step."""
    cache = caches.build("dynamic", config)
    if config is BART:
        for layer in range(2):
            cache.cross_attention_cache.update(torch.randn(ROWS, 2, 3, 8), torch.randn(ROWS, 2, 3, 8), layer)
    own = cache.parts[0]
    feed(own, 4, ROWS)
    cache.fork(COPIES)
    keys = [own[layer][0].clone() for layer in range(2)]
    feed(own, 1, ROWS * COPIES)
    return cache, keys


@pytest.fixture
def failing(monkeypatch):
    """Makes the selection of rows of the store with a number fail: of one, or of it and all after it."""
    select = caches.GrowingStore.select_rows

    def fail(number, for_good=False):
        count = 0

        def select_rows(store, index):
            nonlocal count
            count += 1
            if count == number or (for_good and count > number):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return select(store, index)

        monkeypatch.setattr(caches.GrowingStore, "select_rows", select_rows)

    return fail


OPERATIONS = {
    "fork": lambda cache: cache.fork(1),
    "reorder": lambda cache: cache.reorder_cache(torch.arange(ROWS * COPIES)),
    "unshare": lambda cache: cache.unshare(),
    "crop": lambda cache: cache.crop(0),
}


@pytest.mark.parametrize("config", [LLAMA, BART], ids=["one part", "two parts"])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("for_good", [False, True])
def test_all_layers_have_the_same_rows(config, operation, number, for_good, failing):
    cache, keys = forked(config)
    failing(number, for_good)
    if for_good:
        with pytest.raises(torch.OutOfMemoryError):
            operation(cache)
        failing(0)
    operation(cache)
    own = cache.parts[0]
    for layer in range(2):
        assert own[layer][0].shape == own[layer][1].shape == (ROWS * COPIES, 2, 5, 8)
        assert torch.equal(own[layer][0][:, :, :4], keys[layer])
    feed(own, 1, ROWS * COPIES)
    assert own[1][0].shape[2] == 6


def test_a_cache_can_be_emptied_by_crop(failing):
    cache, _ = forked(LLAMA)
    failing(1, for_good=True)
    cache.crop(-5)
    failing(0)
    feed(cache, 3, ROWS)
    assert (cache.total_tokens, cache.batch_size) == (3, ROWS)


def test_loading_discards_an_unfinished_selection(failing):
    cache = caches.build("dynamic", LLAMA)
    feed(cache, 4, ROWS)
    failing(2)
    with pytest.raises(torch.OutOfMemoryError):
        cache.select_rows(torch.tensor([1, 0, 1]))
    pairs = [(torch.randn(5, 2, 4, 8), torch.randn(5, 2, 4, 8)) for _ in range(2)]
    cache.load_keys_and_values(pairs)
    assert not cache.unfinished
    assert torch.equal(cache[0][0], pairs[0][0])
