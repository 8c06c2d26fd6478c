"""A live cache moves to another backend: everything is there afterwards, hardly anything twice on the way."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import pytest
import torch
from architectures import tiny_model
from contract import CELLS, KINDS, options_of
from failing_memory import each_cell_with, memory, moments
from forks import ROWS, SIBLINGS, Loop, feed_columns, model_with
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from trial import Trial, refused, with_room
from unfinished import CHOICES, OUT, asked, chosen, goes_on, prepared

import caches
from caches.attention.kv_view import plain
from caches.core.transfer import Share
from caches.quantization.codec import Affine
from caches.transfer import convert
from caches.transfer.convert import empty_for
from configs import ConfigError

pytestmark = pytest.mark.covering("values", "pairs")

TARGETS = [*caches.names(), "offloaded to disk"]


def options_for(target: str, kind: str) -> tuple[str, dict]:
    """A backend and its options, with room for what `with_room` has."""
    name, *elsewhere = target.split(" to ")
    options = {"residency": elsewhere[0]} if elsewhere else {}
    if "max_batch_size" in caches.recipe(name).options.option_names():
        options["max_batch_size"] = 8
    return name, options | options_of(name, KINDS[kind])


def moved(trial: Trial, target: str, kind: str) -> Trial:
    name, options = options_for(target, kind)
    source, (log, last_step) = trial.cache, (trial.cache.log, trial.last_step)
    other = trial.holding(caches.migrate(source, name, **options))
    assert (source.total_tokens, source.batch_size, source.bytes, source.unfinished, source.log) == (
        0,
        -1,
        0,
        False,
        None,
    )
    assert other.cache.log is log
    other.last_step, other.room_for_rows = last_step, 8 if other.cache.fixed else None
    return other


def takes(target: str, kind: str) -> bool:
    return (target.split(" to ")[0], kind) in CELLS


# Nothing is lost.


def forked(trial: Trial) -> Trial:
    trial.fork(2)
    trial.step(2)
    return trial


PREPARED = {
    "empty": lambda backend, kind: with_room(backend, kind, 8),
    "some rows": prepared,
    "fed by others": lambda *cell: fed(prepared(*cell)),
    "forked": lambda *cell: forked(prepared(*cell)),
}


def fed(trial: Trial) -> Trial:
    trial.feed(1)
    return trial


@each_cell_with(TARGETS)
def test_everything_is_there_afterwards_or_it_is_refused(backend, kind, choices, most):
    for target, prepare in itertools.product(choices, PREPARED.values()):
        trial = prepare(backend, kind)
        name, options = options_for(target, kind)
        if not takes(target, kind):
            with pytest.raises((caches.CacheError, ConfigError)):
                caches.migrate(trial.cache, name, **options)
            trial.check()
            continue
        other = moved(trial, target, kind)
        other.check()
        if other.last_step and other.can_crop(other.last_step):
            copied = copy.deepcopy(other)
            copied.crop(-copied.last_step)
            goes_on(copied)
        goes_on(other)
        trial.forget(2)
        trial.step(3)  # what was emptied can be used again
        trial.check()


@each_cell_with(TARGETS)
def test_rows_that_were_half_chosen_are_chosen_on_the_way(backend, kind, choices, most):
    ways = list(CHOICES.values())
    for target in (target for target in choices if takes(target, kind)):
        for before, choose in [ways[len(backend + kind + target) % len(ways)]] if len(choices) == 1 else ways:
            trial = before(prepared(backend, kind))
            must = chosen(trial, choose)
            for moment in moments(asked(trial, choose), min(most, 5)):
                other = copy.deepcopy(trial)
                with memory(moment), pytest.raises(OUT):
                    choose(other)
                assert other.cache.unfinished
                other = moved(must.holding(other.cache), target, kind)
                assert not other.cache.unfinished
                goes_on(other)


# Failures on the way.


@each_cell_with(TARGETS)
def test_what_fails_on_the_way_changes_nothing(backend, kind, choices, most):
    """Of a cache whose rows are half chosen what has been moved may come back chosen."""
    whole, half = forked(prepared(backend, kind)), forked(prepared(backend, kind))
    with memory(3), pytest.raises(OUT):
        half.cache.select_rows(torch.tensor([3, 3, 0]))
    for target, trial in itertools.product([target for target in choices if takes(target, kind)], (whole, half)):
        name, options = options_for(target, kind)
        for moment in moments(asked(trial, lambda other: caches.migrate(other.cache, name, **options)), most):  # noqa: B023
            other = copy.deepcopy(trial)
            with memory(moment), pytest.raises(OUT):
                caches.migrate(other.cache, name, **options)
            assert other.cache.unfinished == trial.cache.unfinished
            if trial is half:
                other.cache.finish()
                other = other.holding(other.cache, [3, 3, 0])
            goes_on(other)


def test_what_cannot_come_back_either_is_empty_and_says_so():
    trial = prepared("dynamic", "full")
    with memory() as counted:
        caches.migrate(copy.deepcopy(trial).cache, "offloaded")
    memory_is_out = memory(range(counted.count - 1, 10**6))
    with (
        memory_is_out,
        pytest.raises(caches.StepError, match=r"(?s)moving the dynamic cache failed.*so did bringing back"),
    ):
        caches.migrate(trial.cache, "offloaded")
    assert (trial.cache.total_tokens, trial.cache.bytes) == (0, 0)
    trial.forget(3)
    trial.step(2)
    trial.check()


@pytest.mark.parametrize("backend", ["dynamic", "static", "offloaded", "quantized"])
def test_hardly_more_than_a_layer_is_there_twice(backend, monkeypatch):
    trial = with_room(backend, "full", 8)
    for count in (100, 1, 30):
        trial.step(count)
    twice, handed, before = [], Share._hand_over, trial.cache.bytes
    found: list[caches.Cache] = []
    monkeypatch.setattr(convert, "empty_for", lambda *given: found.append(empty_for(*given)) or found[-1])

    def hand_over(*given):
        handed(*given)
        twice.append(trial.cache.bytes + found[0].bytes)

    monkeypatch.setattr(Share, "_hand_over", hand_over)
    moved(trial, "offloaded_quantized" if backend == "quantized" else "offloaded to disk", "full")
    assert len(twice) == 2 * 4
    assert max(twice) <= before + before / 4
    assert trial.cache.bytes == 0


class Largest(TorchDispatchMode):
    """The most numbers of a tensor with memory of its own that is made meanwhile."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            known = {given.untyped_storage()._cdata for given in args if isinstance(given, torch.Tensor)}
            if made.untyped_storage()._cdata not in known:
                self.numbers = max(self.numbers, made.numel())
        return made


@pytest.mark.parametrize("backend", ["dynamic", "static"])
def test_to_the_disk_it_takes_no_memory_on_the_way(backend):
    """There may be none."""
    trial = with_room(backend, "full", 8)
    trial.step(200)
    with Largest() as largest:
        other = caches.migrate(trial.cache, "offloaded", residency="disk")
    assert largest.numbers == 0
    trial.holding(other).check()


# As it was written down.


@pytest.fixture
def encoded(monkeypatch):
    """Columns that were encoded."""
    found, encode = [], Affine.encode
    monkeypatch.setattr(Affine, "encode", lambda codec, columns: found.append(columns) or encode(codec, columns))
    return found


def codes(cache) -> list[torch.Tensor]:
    return [
        part.buffer.read(0, store.span(name, 0, 0)[1])
        for layer in cache.layers
        for whole in layer.stores.values()
        for store in getattr(whole, "row_holders", (whole,))
        for name, part in store._open_parts()
    ]


WRITINGS = [
    {"backend": "kivi", "nbits": 2}, {"backend": "fp8"}, {"backend": "hqq", "axis_key": 0, "nbits": 3},
    {"backend": "hqq", "nbits_key": 4, "nbits_value": 2},
]  # fmt: skip


@pytest.mark.parametrize("options", WRITINGS, ids=lambda options: "-".join(map(str, options.values())))
def test_codes_stay_as_they_are(options, encoded):
    model = model_with("llama")
    loop, must = (Loop(model, "quantized", residual_length=5, **options) for _ in range(2))
    for one in (loop, must):
        one.step(90)
        one.cache.crop(-7)  # in the middle of a block
        one.mask = one.mask[:, :-7]
        one.fork(SIBLINGS)
        one.step(70)
    before, count = codes(loop.cache), len(encoded)
    for target, place in (("offloaded_quantized", "host"), ("quantized", "device"), ("offloaded_quantized", "disk")):
        loop.cache = caches.migrate(loop.cache, target, residency=place)
        assert all(torch.equal(one, other) for one, other in zip(codes(loop.cache), before, strict=True))
    assert len(encoded) == count
    assert loop.forks
    assert torch.equal(loop.beams(), must.beams())
    before, count = codes(loop.cache), len(encoded)
    loop.cache = caches.migrate(loop.cache, "quantized", residual_length=40)
    if "axis_key" in options or options["backend"] == "kivi":  # others encode as many at a time as stay in full
        assert len(encoded) == count
        assert all(torch.equal(one, other) for one, other in zip(codes(loop.cache), before, strict=True))
    assert torch.isfinite(loop.step(3)).all()


def test_another_way_to_write_is_written_anew(encoded):
    cache = caches.build("quantized", tiny_model("llama").config, backend="kivi", residual_length=5)
    feed_columns(cache, 100)
    held = [plain(layer.keys) for layer in cache.layers]
    count = len(encoded)
    new = caches.migrate(cache, "quantized", backend="fp8", residual_length=5)
    assert len(encoded) == count + 8
    for layer, keys in zip(new.layers, held, strict=True):
        torch.testing.assert_close(plain(layer.keys), keys, atol=0.3, rtol=0.1)


def test_a_prompt_is_moved_once_for_all_its_rows():
    cache = caches.recipe("dynamic").make(KINDS["full"].specs, caches.recipe("dynamic").options())
    feed_columns(cache, 1024)
    cache.fork(SIBLINGS)
    feed_columns(cache, 1, ROWS)
    before = cache.bytes
    new = caches.migrate(cache, "offloaded")
    assert new.bytes == before
    assert [(fork.prefix.rows, fork.rows_per_prefix) for fork in new.stack.shared_timelines] == [(2, 3)]


@pytest.mark.parametrize("target", ["offloaded", "offloaded to disk", "static", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "jamba", "falcon_h1", "lfm2", "bart"])
def test_the_next_steps_compute_the_same(name, target):
    model = model_with(name)
    loop, must = Loop(model), Loop(model)
    for prepare in (lambda one: one.step(3), lambda one: one.fork(SIBLINGS), lambda one: one.step(), Loop.reorder):
        for one in (loop, must):
            prepare(one)
        name, options = options_for(target, "full")
        loop.cache = caches.migrate(loop.cache, name, **options)
        assert torch.equal(loop.step(), must.step())


def test_a_fixed_cache_has_room_for_all_rows_that_share_a_prompt():
    trial = forked(prepared("dynamic", "full"))
    other = trial.holding(caches.migrate(trial.cache, "static", max_cache_len=256))
    assert (other.cache.max_rows, len(other.cache.stack.shared_timelines)) == (4, 1)
    other.cache.unshare()
    other.room_for_rows = 4
    goes_on(other)


def test_rows_that_share_nothing_any_more_are_ordinary_ones_after_the_next_step():
    trial = forked(prepared("dynamic", "full"))
    must = chosen(trial, lambda one: one.select_rows([3, 1]))
    with memory(2), pytest.raises(OUT):
        trial.cache.select_rows(torch.tensor([3, 1]))
    other = must.holding(caches.migrate(trial.cache, "offloaded"))
    other.step(1)
    other.check()
    assert not other.cache.stack.shared_timelines


def test_rows_that_cannot_share_there_get_all_they_need():
    trial = forked(prepared("dynamic", "full"))
    other = trial.holding(caches.migrate(trial.cache, "sliding_window", window_length=100, max_batch_size=8))
    other.check()
    assert not other.cache.stack.shared_timelines
    quantized = with_room("quantized", "full", 8)
    quantized.step(3)
    quantized.fork(2)
    quantized.step(20)
    to_window = partial(caches.migrate, quantized.cache, "sliding_window", window_length=100)
    refused(quantized, to_window, match=r"has no place for them: convert\(\)")


# What cannot be moved, and what is said about sizes.


def test_caches_that_are_not_ours_are_refused():
    for cache in (DynamicCache(), caches.driven(DynamicCache()), caches.NoCache()):
        with pytest.raises(caches.UnsupportedLayerError, match="is in no layers of ours"):
            caches.migrate(cache, "offloaded")
    trial = prepared("dynamic", "full")
    refused(
        trial, lambda: caches.migrate(trial.cache, "none"), error=caches.UnsupportedLayerError, match="would be lost"
    )
    refused(trial, lambda: caches.migrate(trial.cache, "static", max_cache_len=5), error=caches.CapacityError)
    refused(
        trial,
        lambda: caches.migrate(trial.cache, "static", max_cache_len=50, max_batch_size=1),
        error=caches.CapacityError,
    )
    refused(trial, lambda: caches.migrate(trial.cache, "sliding_window", window_length=5), match="would be lost")
    trial.cache.begin(1)
    with pytest.raises(caches.StepError, match="a step is open"):
        caches.migrate(trial.cache, "offloaded")


def test_a_copy_leaves_the_cache_alone():
    for kind in ("full", "encoder, full"):
        trial = prepared("dynamic", kind)
        other = trial.holding(caches.convert(trial.cache, "offloaded", residency="disk"))
        other.check()
        trial.check()
        assert other.cache.name == "offloaded"


def test_bytes_of_the_device_that_computes():
    trial = prepared("dynamic", "full + sliding")
    assert trial.cache.device_bytes == trial.cache.bytes
    on_host, on_disk = (caches.convert(trial.cache, "offloaded", residency=place) for place in ("host", "disk"))
    assert on_host.device_bytes == on_host.bytes  # the host computes
    assert on_disk.device_bytes == 0
    assert on_disk.bytes > 0
    for layer in on_host.layers:  # as if a GPU did
        for buffer in layer.offloaded_buffers():
            buffer.device = torch.device("cuda")
    assert on_host.device_bytes == 0
    assert caches.NoCache().device_bytes == 0
    foreign = caches.driven(DynamicCache())
    foreign.handle.update(*[torch.zeros(1, 2, 3, 4)] * 2, 0)
    assert foreign.device_bytes == foreign.bytes == 2 * 24 * 4


def test_the_log_comes_along():
    trial = prepared("dynamic", "full")
    trial.cache.log = caches.TokenLog(torch.arange(28).view(2, 14), torch.ones(2, 14))
    with memory(4), pytest.raises(OUT):
        trial.cache.select_rows(torch.tensor([1, 1, 0]))
    new = caches.migrate(trial.cache, "offloaded")
    assert new.log.ids[:, 0].tolist() == [14, 14, 0]
