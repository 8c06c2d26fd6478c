"""Caches and stores that are not the project's own: subclasses and layouts given by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from architectures import tiny_model
from transformers import LlamaConfig

import caches
import engine
from caches import registry
from caches.layers.layer_spec import PLAIN
from caches.protocol import Capabilities
from caches.transfer.split_rows import halves
from configs import PlacedCacheConfig

CONFIG = LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)


class Own(caches.Cache):
    """A cache class of a user's."""


def growing(slot):
    return caches.GrowingStore(slot.timeline)


def fed(cache, rows=2, tokens=5):
    cache.begin(tokens)
    for layer in range(2):
        cache.update(torch.randn(rows, 2, tokens, 8), torch.randn(rows, 2, tokens, 8), layer)
    cache.commit()
    return cache


def test_a_subclass_moves_to_other_backends_and_stays_a_subclass():
    cache = fed(Own("own", [PLAIN] * 2, growing))
    assert caches.convert(cache, "static", max_cache_len=8).total_tokens == 5
    assert [type(part) for part in cache.batch_split(2, 1)] == [Own, Own]
    assert type(caches.migrate(cache, "dynamic")) is caches.Cache


def test_copies_of_a_subclass_of_two_parts_are_of_that_class():
    class Both(caches.EncoderDecoder):
        pass

    parts = [Own("own", [PLAIN] * 2, growing) for _ in range(2)]
    assert type(Both(*parts).empty_like()) is Both


@pytest.mark.parametrize("preallocated", [False, True])
def test_only_buffers_that_move_keep_a_layout_from_being_compiled(preallocated):
    store = caches.FixedStore if preallocated else caches.GrowingStore
    cache = caches.Cache("own", [PLAIN], lambda slot: store(slot.timeline), preallocated=preallocated)
    assert (cache.why_not_compiled is None) == preallocated


def test_quantized_stores_are_not_compiled():
    class Quantized(caches.FixedStore):
        is_quantized = True

    cache = caches.Cache("own", [PLAIN], lambda slot: Quantized(slot.timeline), preallocated=True)
    assert "quantizes" in cache.why_not_compiled


@pytest.mark.parametrize("base", [caches.GrowingStore, caches.FixedStore])
def test_slots_are_open_to_others_unless_a_store_changes_what_it_is_given(base):
    class Halved(base):
        def append(self, new):
            return super().append(new / 2)

    for store in (base, Halved):
        cache = caches.Cache("own", [PLAIN], lambda slot, store=store: store(slot.timeline), max_tokens=9)
        for step, tokens in enumerate((1, 1, 2)):
            cache.begin(tokens)
            is_open = store is base and step > 0 and tokens == 1  # the first step allocates them
            assert (cache.open_slots([0]) is not None) == is_open
            cache.update(torch.ones(2, 2, tokens, 8), torch.ones(2, 2, tokens, 8), 0)
            cache.commit()
        assert cache.open_slots([0]) is None  # no step was begun


@pytest.mark.parametrize("replaced", ["by its class", "of this cache", "of this store"])
def test_slots_are_not_open_where_what_fills_them_was_replaced(replaced):
    class Own(caches.Cache):
        def update(self, *arguments):
            return super().update(*arguments)

    kind = Own if replaced == "by its class" else caches.Cache
    cache = kind("own", [PLAIN], lambda slot: caches.GrowingStore(slot.timeline))
    cache.begin(1)
    cache.update(torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8), 0)
    cache.commit()
    cache.begin(1)
    store = cache.layers[0].stores["values"]
    if replaced == "of this cache":
        assert cache.open_slots([0]) is not None
        cache.update = cache.update
    elif replaced == "of this store":
        assert cache.open_slots([0]) is not None
        store.append = store.append
    assert cache.open_slots([0]) is None


def test_slots_of_a_step_in_one_graph_are_not_open():
    cache = caches.Cache("own", [PLAIN], lambda slot: caches.FixedStore(slot.timeline), max_tokens=9, preallocated=True)
    for graph in (False, False, True):
        cache.begin(1, graph)
        assert (cache.open_slots([0]) is not None) == (cache.total_tokens > 0 and not graph)
        cache.update(torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8), 0)
        cache.commit()


def test_a_refused_graph_changes_nothing():
    cache = caches.build("dynamic", CONFIG)
    cache.update(torch.randn(2, 2, 4, 8), torch.randn(2, 2, 4, 8), 0)
    with pytest.raises(caches.StepError, match="compiled"):
        cache.begin(1, graph=True)
    assert cache.implicit.is_open


@pytest.mark.parametrize("cache", [caches.DynamicCache(), caches.SinkCache(window_length=6)])
def test_layers_that_were_not_found_yet_have_no_extra_slots_and_no_window(cache):
    assert cache.view.extra_slots(3, 2) == 0
    assert cache.view.imposed_window(3) is None


def test_a_cache_can_be_renamed():
    cache = caches.build("dynamic", CONFIG)
    cache.name = "own"
    assert cache.name == cache.empty_like().name == "own"


def test_a_layout_that_is_given_in_fields_needs_a_store_factory():
    with pytest.raises(TypeError, match="make_store"):
        caches.Cache("own", [PLAIN])


class Proxy:
    """An engine cache that hands everything on and consists of no layers of its own."""

    capabilities = Capabilities(can_split=True)

    def __init__(self, cache):
        self.cache = cache

    def __getattr__(self, name):
        return getattr(self.cache, name)


def test_rows_that_cannot_be_dealt_out_are_not_lost():
    with pytest.raises(caches.StepError, match="cannot be split"):
        halves(Proxy(fed(caches.build("dynamic", CONFIG))), torch.arange(2))
    assert len(halves(caches.NoCache(), torch.arange(2)).parts) == 2


def test_a_cache_that_may_be_lost_need_not_keep_the_past():
    model = tiny_model("llama")
    cache = Proxy(caches.build("dynamic", model.config))
    cache.capabilities = Capabilities(rollback="sometimes")
    cache.name, cache.log = "proxy", None
    result = engine.generate(model, [[3, 4, 5]], cache=cache, max_new_tokens=4, prompt_lookup_num_tokens=2)
    assert result.tokens == engine.generate(model, [[3, 4, 5]], max_new_tokens=4).tokens


@dataclass(frozen=True)
class OwnConfig(PlacedCacheConfig):
    name: ClassVar[str] = "own_of_a_test"


class Noted(caches.Cache):
    """With a constructor of its own."""

    def __init__(self, specs):
        super().__init__(OwnConfig.name, specs, growing)
        self.note = "kept"


@pytest.fixture
def own_backend(request):
    made = getattr(request, "param", caches.Cache)

    @caches.register(OwnConfig)
    def own(specs, options):
        """A recipe that says nothing of its options."""
        return made(specs) if made is Noted else made(options.name, specs, growing)

    yield OwnConfig.name
    registry._recipes.pop(OwnConfig.name)


@pytest.mark.parametrize("own_backend", [Noted], indirect=True)
def test_a_recipe_may_make_a_class_with_a_constructor_of_its_own(own_backend):
    model, ids = tiny_model("llama"), torch.arange(3, 43)[None]
    out = engine.generate(model, ids, cache=own_backend, max_new_tokens=4)
    assert out.cache.note == "kept"
    assert out.cache.stack.layout.config == OwnConfig()


def test_a_recipe_need_not_pass_its_options_on(own_backend, tmp_path):
    model, ids = tiny_model("llama"), torch.arange(3, 43)[None]
    out = engine.generate(model, ids, cache=own_backend, max_new_tokens=4)
    out.cache.save(tmp_path / "own.safetensors", model)
    assert caches.load(tmp_path / "own.safetensors", model).total_tokens == out.cache.total_tokens
    for options, why in (({"max_batch_size": 1}, "has room for 1"), ({"dtype": "float16"}, "was built for float16")):
        with pytest.raises(caches.CacheError, match=why):
            engine.generate(model, ids.expand(2, -1), cache=own_backend, cache_config=options, max_new_tokens=4)
    generator = engine.Generator(model, config=engine.EngineConfig(prefix_store_bytes=10**7))
    read = [generator.generate(ids, cache=own_backend, max_new_tokens=4).stats.cached_tokens for _ in range(2)]
    assert read == [0, 39]
