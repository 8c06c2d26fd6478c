"""What every backend owes of its content: bytes, copies, rows split and joined, conversions, fixed addresses."""

import copy

import pytest
import torch
from architectures import prompt, tiny_model
from contract import CELLS, EDGES, KINDS, STEPS, each_cell, options_of
from transformers import DynamicCache
from trial import Trial, refused, storage, with_room

import caches
from caches.stores.offloaded import OffloadedStore
from engine.memory.peak_memory import PeakMemory

pytestmark = pytest.mark.covering("values", "pairs")


@each_cell
def test_bytes(trial):
    assert trial.cache.bytes == 0
    sizes = []
    for count in [*STEPS, *[1] * 40]:
        trial.step(count)
        assert trial.cache.bytes == sum(storage(trial.cache).values())
        sizes.append(trial.cache.bytes)
    held = [held for found, _ in trial.expected() for held in found.values()]
    assert sizes[-1] >= sum(tensor.nbytes for tensor in held)
    if trial.cache.fixed or None not in trial.kind.bounds:  # the tensors of the first steps are all there ever are
        assert len(set(sizes[len(STEPS) :])) == 1
    if not trial.cache.fixed:
        # Columns: half as many again and a round number of them. States: also as they were, and what was read last.
        most = [1.5 * one.nbytes + 64 * one[:, :, :1].nbytes if one.ndim == 4 else 4 * one.nbytes for one in held]
        # A codec's scales are as many bytes as the two numbers they are for here.
        most = [size * (1.25 if trial.own.is_quantized else 1) for size in most]
        assert sizes[-1] - trial.cache.bytes_by_place.get("staging", 0) <= sum(most)
    if trial.kind.takes_back_in_part and trial.last_step:
        trial.step(5, rejected=2)
        assert trial.cache.bytes == sum(storage(trial.cache).values())
    trial.cache.reset()
    assert trial.cache.bytes == sum(storage(trial.cache).values())


@each_cell
def test_copies_are_independent(trial):
    for count in EDGES:
        trial.step(count)
        twin = copy.deepcopy(trial)
        twin.step(2)
        twin.crop(-2)
        twin.step(7)
        trial.check()
        twin.check()
        assert not storage(trial.cache).keys() & storage(twin.cache).keys()
    trial.feed(1)
    copy.deepcopy(trial).check()


def test_joining_leaves_the_parts_as_they_are():
    """Also what takes back their last steps, where those differ."""
    model, parts = tiny_model("mamba2"), []
    for lengths in ((4, 2), (5, 1)):
        parts.append(caches.build("mamba", model.config))
        for tokens in lengths:
            parts[-1].begin(tokens)
            with torch.no_grad():
                model(torch.arange(3, 3 + tokens)[None], cache_params=parts[-1])
            parts[-1].commit()
    caches.join_rows(parts)
    parts[0].crop(-2)
    parts[1].crop(-1)
    assert [part.total_tokens for part in parts] == [4, 5]


@pytest.mark.parametrize("fork", [False, True], ids=["of rows", "behind a shared prefix"])
def test_growth_is_what_the_next_tokens_take(fork):
    model = tiny_model("llama")
    cache = caches.build("dynamic", model.config)
    with torch.no_grad():
        model(prompt(1, tokens=150, pads=0)["input_ids"], past_key_values=cache)
        if fork:
            cache.fork(3)
            model(torch.full((3, 1), 5), past_key_values=cache)
        grown = 0
        for _ in range(90):
            cache.crop(0)  # commits
            before, more = cache.device_bytes, cache.growth(1)
            model(torch.full((cache.batch_size, 1), 5), past_key_values=cache)
            assert cache.device_bytes == before + more
            grown += more > 0
    assert grown


@each_cell
def test_rows_can_be_split_and_joined(trial, rows):
    assert caches.select_rows(trial.cache, torch.tensor([0])).batch_size == -1
    for feed in (trial.step, trial.step, trial.feed):
        feed(9 if feed == trial.step else 1)
        parts = [
            trial.holding(caches.select_rows(trial.cache, torch.tensor(index)), index) for index in ([rows - 1], [0, 0])
        ]
        trial.check()
        whole = caches.join_rows([part.cache for part in parts])
        assert whole.name == trial.cache.name
        joined = trial.holding(whole, [rows - 1, 0, 0])
        for other in (*parts, joined):
            other.check()
            for count in (1, 5, 14):
                other.step(count)
            other.check()
        trial.check()
    with pytest.raises(caches.StepError, match="cannot be joined"):
        caches.join_rows([trial.cache, joined.cache])
    with pytest.raises(caches.StepError, match="nothing to join"):
        caches.join_rows([])


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ([5], r"select_rows\(\[5\]\), but the cache holds rows 0 to 1"),
        ([-1], "holds rows 0 to 1"),
        ([], "not by torch.float32"),
        (torch.tensor([], dtype=torch.long), "holds rows 0 to 1"),
        (torch.tensor([True]), "or a bool mask of all 2 rows"),
        (torch.tensor(1), "by a tensor of integers"),
    ],
    ids=str,
)
def test_rows_to_copy_are_checked_as_those_to_select(index, match):
    trial = Trial("dynamic", "full", 2)
    trial.step(4)
    for select in (lambda: caches.select_rows(trial.cache, index), lambda: trial.cache.select_rows(index)):
        refused(trial, select, match=match)
    for rows in ([1], torch.tensor([False, True])):
        trial.holding(caches.select_rows(trial.cache, rows), [1]).check()


def test_a_cache_of_others_is_refused_by_its_kind():
    for other in (DynamicCache(), caches.NoCache()):
        for operation in (
            lambda cache: caches.branch(cache),
            lambda cache: caches.select_rows(cache, [0]),
            lambda cache: caches.join_rows([cache]),
            lambda cache: caches.apply_window(cache, 8),
            lambda cache: caches.convert(cache, "dynamic"),
            lambda cache: caches.migrate(cache, "dynamic"),
        ):
            with pytest.raises(caches.UnsupportedLayerError, match=f"a {type(other).__name__} is in no layers of ours"):
                operation(other)


def test_rows_are_copied_layer_by_layer(monkeypatch):
    """They may come from a place with more room than where they are put together."""
    events = []

    def telling(name, does):
        return lambda store, *given: events.append(name) or does(store, *given)

    trial = with_room("offloaded", "full", 8)
    trial.step(20)
    for name in ("state_dict", "load_state_dict"):
        monkeypatch.setattr(OffloadedStore, name, telling(name, getattr(OffloadedStore, name)))
    caches.join_rows([caches.select_rows(trial.cache, torch.tensor([row])) for row in (1, 0)])
    stores = 2 * len(trial.cache.layers)
    assert events == 2 * stores * ["state_dict", "load_state_dict"] + stores * [
        "state_dict",
        "state_dict",
        "load_state_dict",
    ]


@each_cell
def test_tuples(trial):
    """As transformers had caches before they were objects, where tuples can say everything."""
    specs = trial.kind.specs
    for count in (4, 20):
        trial.step(count)
        says_all = all(
            spec.components == {"kv"} and trial.held(index) == trial.total_tokens for index, spec in enumerate(specs)
        )
        if not says_all:
            refused(
                trial,
                trial.cache.to_legacy_cache,
                error=caches.UnsupportedLayerError,
                match=r"layer \d \(\w+\).*Keep the",
            )
            continue
        tuples = trial.cache.to_legacy_cache()
        must = [[held for held in layer.values() if held.ndim == 4] for _, layer in trial.expected()]
        if trial.kind.cross:
            must = [own + cross for own, cross in zip(must[: len(specs)], must[len(specs) :], strict=True)]
        assert [len(layer) for layer in tuples] == [len(layer) for layer in must]
        assert all(torch.equal(a, b) for x, y in zip(tuples, must, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("target", caches.names())
@each_cell
def test_conversion_loses_nothing_or_is_refused(backend, kind, target):
    """Going on afterwards is as if nothing had happened."""
    trial, options = Trial(backend, kind, 3), options_of(target, KINDS[kind])
    if (target, kind) not in CELLS:
        options = {name: value for name, value in options.items() if name == "max_cache_len"}
        trial.step(20)
        refused(trial, lambda: caches.convert(trial.cache, target, **options), error=caches.CacheError)
        return
    for count in (4, 30):
        trial.step(count)
        other = trial.holding(caches.convert(trial.cache, target, **options))
        other.check()
        back = trial.holding(caches.convert(other.cache, backend, **options_of(backend, KINDS[kind])))
        back.check()
        for size in (1, 5, 14, 1):
            other.step(size)
            other.check()
        trial.check()


@pytest.mark.parametrize("backend", ["quantized", "offloaded"])
def test_conversion_has_one_layer_at_a_time_as_tensors(backend):
    trial = with_room(backend, "full", 2)
    with PeakMemory(torch.nn.Module()) as live:
        trial.step(400)
        live.most = start = live._now
        made = caches.convert(trial.cache, "quantized" if backend == "offloaded" else "dynamic")
        peak, layers = live.most - start - made.bytes, len(trial.cache.layers)
    dense = sum(tensor.nbytes for held, _ in trial.expected() for tensor in held.values())
    assert peak <= 2.5 * dense / layers


@each_cell
def test_fixed_tensors_never_move(trial):
    if not trial.cache.fixed:
        assert not trial.cache.is_compileable
        return
    graph = trial.cache.why_not_compiled is None
    trial.step(5)
    trial.step(1)

    def addresses():
        stores = [tensor for layer in trial.all_layers for s in layer.stores.values() for tensor in s.tensors()]
        states = [layer.state._states for layer in trial.all_layers if layer.state is not None]
        return [tensor.data_ptr() for tensor in (*stores, *(held for state in states for held in state.values()))]

    before = addresses()
    assert before
    for count in STEPS:
        trial.step(count)
        trial.select_rows([2, 0, 1])
        trial.cache.begin(4)
        trial.forward(trial.fresh(4))
        trial.cache.abort()
        trial.step(3, rejected=3)
    trial.crop(-trial.last_step)
    trial.cache.reserve(250)
    trial.step(2)
    trial.step(1, graph=graph)
    trial.check()
    assert addresses() == before
    trial.cache.reset()
    trial.forget(2)
    trial.step(3)
    assert addresses() == before


@each_cell
def test_compiled_steps_are_handed_the_whole_room(trial):
    if trial.cache.why_not_compiled is not None:
        match = "cannot be in a compiled step: .* graph"
        refused(trial, lambda: trial.step(1, graph=True), match=match)
        return
    for count in EDGES:
        trial.step(count)
        trial.cache.begin(3)
        for layer, spec in enumerate(trial.kind.specs):
            if spec.keeps_kv:  # masked, but a masked NaN would still be a NaN
                trial.own.update(*[torch.full((3, 2, 3, 2), float("nan"), dtype=torch.float64)] * 2, layer)
        trial.cache.abort()
        trial.step(1, graph=True)
        trial.step(1, rejected=1, graph=True)
        trial.check()
    for _ in range(30):
        trial.step(1, graph=True)
    trial.check()
