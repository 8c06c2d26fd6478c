"""A sink cache step by step: every token sees the first tokens of its own row, turned to where its window begins."""

import copy
import dataclasses
import random
from functools import partial

import pytest
import torch
from exact_codecs import AsTheyAre

import caches
from caches import backends
from caches.core.sink_hook import SinkHook
from caches.layers.rope import RopeRotation
from caches.timeline.retention import KeepSinks
from engine.model.columns import Columns
from engine.model.masks import visible_slots


class Feeder:
    """A cache of one layer that is fed random keys, and in plain Python what every token has to see of them."""

    def __init__(self, pads, window=7, sinks=2, backend="sink", residual=2):
        self.window, self.sinks, self.pads = window, sinks, list(pads)
        self.rotation = RopeRotation((1.0, 0.3), interleaved=True)
        spec = dataclasses.replace(caches.layers.layer_spec.PLAIN, rotation=lambda: self.rotation)
        self.backend, chosen = backend, caches.recipe(backend)
        self.options = {"window_length": window, "num_sink_tokens": sinks, "max_batch_size": 6}
        if backend == "quantized_sink":
            self.options["residual_length"] = residual
        self.cache = chosen.build([spec], chosen.options(**self.options))
        self.cache.set_padding(self.pads)
        self.keys = [torch.zeros(0, 5, dtype=torch.float64) for _ in pads]

    @property
    def total_tokens(self):
        return len(self.keys[0])

    def step(self, count, rejected=0):
        rows, seen = len(self.keys), self.total_tokens
        new = torch.randn(rows, 1, count, 5, dtype=torch.float64)
        mask = (torch.arange(200) >= torch.tensor(self.pads)[:, None]).long()
        columns = Columns(mask, 200)
        copied = self.cache.view.extra_slots(0, count)
        length, offset = self.cache.get_mask_sizes(count, 0)
        visible = visible_slots(columns, seen, seen + count, offset, length, self.window, copied)
        self.cache.begin(count)
        keys, values = self.cache.update(new, new + 1, 0)
        together = [torch.cat([held, more[0]]) for held, more in zip(self.keys, new, strict=True)]
        for row, pads in enumerate(self.pads):
            for column in range(seen, seen + count):
                if column < pads:
                    continue
                looked_at = visible.expand(rows, -1, -1, -1)[row, 0, column - seen]
                seen_keys, seen_values = keys[row, 0, looked_at], values[row, 0, looked_at]
                must, first = together[row][pads : column + 1], 0
                if len(must) > self.window:
                    first = len(must) - self.window
                    must = torch.cat([must[: self.sinks], must[len(must) - self.window + self.sinks :]])
                torch.testing.assert_close(seen_values, must + 1)
                if first:
                    moved = self.rotation.rotated(must[None, None, : self.sinks], torch.tensor([[first]]))[0, 0]
                    must = torch.cat([moved, must[self.sinks :]])
                torch.testing.assert_close(seen_keys, must)
        self.cache.commit(rejected)
        self.keys = [held[: seen + count - rejected] for held in together]

    def select_rows(self, index):
        self.cache.select_rows(torch.tensor(index))
        self.keys, self.pads = [self.keys[row] for row in index], [self.pads[row] for row in index]

    def abort(self, count):
        self.cache.begin(count)
        noise = torch.randn(len(self.keys), 1, count, 5, dtype=torch.float64)
        self.cache.update(noise, noise, 0)
        self.cache.abort()

    def try_crop(self, count):
        """Whether the last tokens could be taken back."""
        try:
            self.cache.crop(-count)
        except caches.StepError:
            return False
        self.keys = [held[: len(held) - count] for held in self.keys]
        return True


@pytest.fixture(params=["sink", "quantized_sink"])
def backend(request, monkeypatch):
    monkeypatch.setattr(backends, "new_codec", lambda options, name: AsTheyAre())
    return request.param


@pytest.mark.parametrize("seed", range(8))
def test_every_token_sees_its_own_sinks_whatever_happens_to_the_cache(backend, seed):
    """Rows with different pads; long and short steps, dropped tokens, crops, aborts, rows, copies, in any order."""
    chance = random.Random(seed)
    feeder = Feeder([chance.choice([0, 0, 1, 3, 9, 14]) for _ in range(3)], 7, chance.choice([0, 1, 3, 6]), backend)
    while feeder.total_tokens < 60:
        count = chance.choice([1, 1, 1, 1, 2, 5, 12])
        feeder.step(count, rejected=chance.choice([0, 0, 0, chance.randrange(count + 1)]))
        match chance.randrange(6):
            case 0:
                feeder.select_rows([chance.randrange(len(feeder.pads)) for _ in range(chance.choice([2, 3, 5]))])
            case 1:
                feeder.abort(count)
            case 2 if feeder.total_tokens > 14:
                feeder.try_crop(chance.randrange(1, 5))
            case 3:
                feeder.cache = copy.deepcopy(feeder.cache)
            case 4 if feeder.total_tokens:
                feeder.cache = caches.convert(feeder.cache, backend, **feeder.options)
            case 5 if feeder.total_tokens:
                first = [caches.select_rows(feeder.cache, torch.tensor([row])) for row in range(len(feeder.pads))]
                joined = caches.join_rows(first)
                assert [layer.dense_state().keys() for layer in joined.layers] == [{"keys", "values"}]
                assert joined.stack.hook.state_dict(len(feeder.pads))["left_padding"].tolist() == feeder.pads


def test_the_last_step_can_be_taken_back_at_once():
    feeder = Feeder([0, 2])
    for count in (6, 1, 1, 1, 1, 1, 1, 1, 4, 1, 1):
        feeder.step(count)
        assert feeder.try_crop(count)
        feeder.step(count)
    assert not feeder.try_crop(3)


def test_pads_are_told_before_anything_is_forgotten():
    feeder = Feeder([1, 0])
    feeder.step(5)
    feeder.cache.set_padding([2, 0])
    feeder.cache.set_padding([1, 0])
    feeder.step(5)
    with pytest.raises(caches.StepError, match=r"begin with \[1, 0\] padding .* evicted .* with \[0, 0\]"):
        feeder.cache.set_padding(None)
    feeder.cache.reset()
    feeder.cache.set_padding([0, 2])
    feeder.pads, feeder.keys = [0, 2], [held[:0] for held in feeder.keys]
    for count in (5, 5, 1):
        feeder.step(count)


def test_rows_become_more_where_the_window_is_in_tensors_that_grow():
    feeder = Feeder([0, 2])
    hook = partial(SinkHook, feeder.window, lambda specs: None)
    feeder.cache = caches.Cache(
        "growing sinks",
        feeder.cache.specs,
        lambda slot: caches.GrowingStore(slot.timeline),
        retention=lambda spec: KeepSinks(feeder.window - 1, feeder.sinks),
        make_hook=hook,
    )
    feeder.cache.set_padding(feeder.pads)
    feeder.step(4)
    for index in ([0, 0, 1, 1], [3, 0], [1, 0, 1]):
        feeder.select_rows(index)
        for count in (1, 1, 5, 1):
            feeder.step(count)


def test_compiled_steps_look_at_no_slot_once_all_sinks_are_known(monkeypatch):
    feeder = Feeder([0, 2])
    feeder.step(5)
    monkeypatch.setattr(caches.GrowingStore, "memory", lambda *slots: pytest.fail(f"slots {slots[1:]} were read"))
    new = torch.randn(2, 1, 1, 5, dtype=torch.float64)
    feeder.cache.begin(1, graph=True)
    feeder.cache.update(new, new, 0)
    feeder.cache.commit()
    assert feeder.cache.total_tokens == 6


@pytest.mark.parametrize("residual", [2, 4])
def test_copies_of_sinks_are_written_over_no_token(residual, monkeypatch):
    """Where fewer tokens than there are sinks are quantized, copies come before tokens that are kept in full."""
    monkeypatch.setattr(backends, "new_codec", lambda options, name: AsTheyAre())
    feeder = Feeder([0, 1], sinks=6, backend="quantized_sink", residual=residual)
    for _ in range(20):
        feeder.step(1)
        feeder.cache.check_finite()  # reads what is kept
        layer, keys = feeder.cache.layers[0], torch.stack(feeder.keys)
        kept = layer.timeline.residual
        for name, must in {"keys": keys, "values": keys + 1}.items():
            assert torch.equal(layer.stores[name].store.residual[:, 0, :kept], must[:, feeder.total_tokens - kept :])
