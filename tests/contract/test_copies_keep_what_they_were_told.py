"""What a cache was told besides tokens: copies of it know that too, and nothing is made up where nothing was told."""

from __future__ import annotations

import pytest
import torch
from architectures import prompt, tiny_model
from exact_codecs import Exactly

import caches
from caches import backends
from caches.core.row_selection import RowSelection
from caches.layers.read_by import ReadBy
from caches.protocol import TokenLog
from caches.transfer.comparison import first_layer
from configs import SinkCacheConfig


def filled(backend, tokens=40, **options):
    model = tiny_model("llama")
    cache = caches.build(backend, model.config, **options)
    with torch.no_grad():
        model(prompt(tokens=tokens, pads=0)["input_ids"], past_key_values=cache)
    return cache


def test_where_layers_compute():
    cache = filled("dynamic", dtype="float32")
    copy = caches.select_rows(cache, torch.tensor([0]))
    other = torch.ones(1, 2, 1, 8, dtype=torch.float64)
    with pytest.raises(caches.StepError, match="was built for float32"):
        copy.update(other, other, 0)


def test_which_layers_a_window_with_sinks_can_be_for():
    cache = caches.recipe("sink").make(None, SinkCacheConfig(window_length=64))
    with pytest.raises(caches.UnsupportedLayerError, match="would never show its first tokens"):
        cache.empty_like().check_fits(tiny_model("mistral").config)


def test_who_has_read_joined_logs():
    model, other = tiny_model("llama"), tiny_model("gpt2")
    own, now = ReadBy.of(model), ReadBy.of(other)
    ids = torch.ones(1, 3, dtype=torch.long)

    def joined(*read_by):
        return TokenLog.joined([TokenLog(ids, ids, read_by=one) for one in read_by])

    assert joined(own, ReadBy.of(model)).why_other(own) is None
    assert "of different models" in joined(own, now).why_other(own)
    assert joined(own, None).why_other(own) == "which model has filled it is not known"


def test_a_full_disk_does_not_undo_a_step_that_is_settled(monkeypatch):
    cache = filled("dynamic")
    cache.fork(2)
    monkeypatch.setattr("caches.timeline.shared_timeline.ForkedTimeline.should_unshare", True)

    def starved(self):
        raise caches.CapacityError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(RowSelection, "plan_unshare", starved)
        patch.setattr("caches.memory.buffers.DeviceBuffer._allocate", starved)
        patch.setattr("caches.stores.dense.GrowingStore.select_rows", lambda store, index: starved(store))
        cache.selection.unshare_if_materialized()
    assert not cache.unfinished
    cache.crop(0)
    assert not cache.shares
    assert (cache.total_tokens, cache.batch_size) == (40, 4)


def test_a_codec_that_does_not_say_its_bits_is_not_compared(monkeypatch):
    monkeypatch.setattr(backends, "new_codec", lambda options, name: Exactly())
    cache = filled("quantized", residual_length=4)
    with pytest.raises(caches.UnknownContentError, match=r"nothing says how the .* rounds"):
        first_layer(cache)


def test_only_encoded_columns_may_differ_by_a_rounding():
    """Of forked rows: those of the trunk, some in full, and then those of each row itself."""
    cache = filled("quantized", residual_length=8, q_group_size=8, nbits=2)
    trunk = first_layer(cache)[0][0].exact
    cache.fork(2)
    model = tiny_model("llama")
    with torch.no_grad():
        model(prompt(rows=4, tokens=30, pads=0)["input_ids"], past_key_values=cache)
    keys = first_layer(cache)[0][0]
    tail = cache.layers[0].timeline.suffix.encoded
    assert 0 < trunk < 40
    assert 0 < tail < 30
    assert (keys.exact, keys.later) == (trunk, range(40, 40 + tail))
    noise = torch.randn(keys.kept.shape, generator=torch.Generator().manual_seed(1))
    others = keys.kept + 0.01 * noise * keys.kept.std()  # more than products round, less than codes of two bits
    may_differ = (~keys.differ(others, 0)).all(dim=0)
    assert not may_differ[trunk:40].any()
    assert not may_differ[40 + tail :].any()
    assert may_differ[:trunk].any()
    assert may_differ[40 : 40 + tail].any()
