"""What the contract of all backends does not ask: how room is made, what is left when that fails, the log."""

import copy

import pytest
import torch
from contract import KINDS, WINDOW, build, each_cell, keys_of
from trial import Trial

import caches
from caches.layers.layer_spec import AttentionSpan, LayerSpec
from configs import DynamicCacheConfig

pytestmark = pytest.mark.covering("values", "pairs")


@pytest.fixture
def growing():
    return Trial("dynamic", "full + sliding")


def buffer(trial, layer=1):
    return trial.cache.layers[layer].stores["keys"].buffer


def test_room_is_made_geometrically_and_windows_stay_small(growing):
    moves, widths, address = 0, [], None
    for _ in range(1000):
        growing.step(1)
        moves += buffer(growing).data_ptr() != address
        address = buffer(growing).data_ptr()
        widths.append(buffer(growing).shape[2])
    assert moves <= 8  # not 1000
    assert buffer(growing, 0).shape[2] <= (WINDOW - 1) + 16
    assert max(widths) <= 1.5 * 1000 + 64


@pytest.mark.parametrize("before", [0, 5])
def test_reserving_makes_room_once(growing, before):
    for _ in range(before):
        growing.step(1)
    growing.cache.reserve(300)
    growing.step(1)
    address = buffer(growing).data_ptr()
    for _ in range(299 - before):
        growing.step(1)
    growing.check()
    assert buffer(growing).data_ptr() == address
    assert buffer(growing).shape[2] == 320


def test_out_of_memory_while_making_room_changes_nothing(growing, monkeypatch):
    growing.step(64)

    def fails(*_):
        raise MemoryError

    # The stores of the layer before are larger by then.
    monkeypatch.setattr(growing.cache.layers[3].stores["values"], "_allocate", fails)
    with pytest.raises(MemoryError):
        growing.cache.begin(64)
    growing.check()
    monkeypatch.undo()
    growing.step(64)
    growing.check()


def test_columns_that_a_window_evicted_come_back_while_nothing_has_overwritten_them():
    trial = Trial("dynamic", "sliding")
    for count in (4, *[1] * 8):
        trial.step(count)
    trial.crop(-2)
    trial.check()
    for _ in range(5):
        trial.step(1)
        trial.check()


@pytest.mark.parametrize("max_cache_len", [3, WINDOW - 1])
def test_a_fixed_cache_smaller_than_the_window(max_cache_len):
    cache = build("static", KINDS["sliding"], max_cache_len=max_cache_len)
    assert cache.max_tokens == max_cache_len
    cache.begin(max_cache_len)
    for layer in range(4):
        keys = keys_of([range(max_cache_len)], layer)
        cache.update(keys, keys, layer)
    cache.commit()
    with pytest.raises(caches.CapacityError):
        cache.begin(1)


@each_cell
def test_a_cache_made_in_inference_mode_goes_on_outside(backend, kind):
    trial = Trial(backend, kind)
    with torch.inference_mode():
        trial.step(3)
    trial.select_rows([2, 0, 1])
    trial.step(2)
    trial.check()


def test_a_window_that_no_row_of_the_table_has():
    specs = [LayerSpec("sliding_attention", frozenset({"kv"}), AttentionSpan("window", 1))]
    cache = caches.recipe("dynamic").make(specs, DynamicCacheConfig())
    for position in range(3):
        cache.begin(1)
        keys, _ = cache.update(*[keys_of([[position]], 0)] * 2, 0)
        cache.commit()
        assert torch.equal(keys, keys_of([[position]], 0))


def test_the_log_follows(growing):
    cache = growing.cache
    growing.step(9)
    cache.log = caches.TokenLog(torch.arange(27).view(3, 9), torch.ones(3, 9))
    growing.select_rows([2, 1, 0])
    growing.crop(-2)
    assert cache.log.ids.tolist() == [list(range(begin, begin + 7)) for begin in (18, 9, 0)]
    assert cache.log.mask.shape == (3, 7)
    assert torch.equal(copy.deepcopy(cache).log.ids, cache.log.ids)
    growing.feed(1)  # another loop feeds it
    assert cache.log is None
