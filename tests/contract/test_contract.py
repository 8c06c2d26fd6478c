"""What every backend owes on every kind of layers that it takes: a new one inherits these tests."""

import copy
import re

import pytest
import torch
from contract import CELLS, EDGES, KINDS, REFUSALS, STEPS, WINDOW, build, each_backend, each_cell, each_kind
from trial import Trial, refused, with_room

import caches

pytestmark = pytest.mark.covering("values", "pairs")


@each_kind
@each_backend
def test_a_kind_is_taken_or_refused_with_a_remedy_that_works(backend, kind):
    if (backend, kind) in CELLS:
        cache = build(backend, KINDS[kind])
        assert isinstance(cache, caches.EngineCache)
        assert (cache.total_tokens, cache.batch_size, cache.is_open if hasattr(cache, "is_open") else False) == (
            0,
            -1,
            False,
        )
        return
    try:
        cache = build(backend, KINDS[kind])
    except REFUSALS as refusal:
        message = str(refusal)
    else:  # it keeps nothing, whatever is done with it
        for operation, arguments in (
            ("begin", (5,)),
            ("commit", (2,)),
            ("abort", ()),
            ("reserve", (9,)),
            ("reset", ()),
        ):
            getattr(cache, operation)(*arguments)
            assert (cache.handle, cache.total_tokens, cache.bytes, cache.batch_size) == (None, 0, 0, -1)
        return
    assert backend in message or "window_length" in message
    remedies = set(re.findall(r"cache='(\w+)'", message)) - {backend}
    assert (
        remedies
        or "leave it out" in message
        or any(word in message for word in ("options", "known:", "choose", "did you mean"))
    )
    for remedy in remedies:
        assert (remedy, kind) in CELLS, message


@each_cell
def test_steps(trial, rows):
    for count in STEPS:
        trial.step(count)
        trial.check()
    assert trial.total_tokens > WINDOW + 3 + 40


@each_cell
def test_a_loop_that_neither_begins_nor_settles(trial):
    for count in STEPS:
        if trial.narrow is not None and trial.total_tokens + count > trial.narrow and count > 1:
            refused(trial, trial.feed, count, match="further back than the window")
            count = 1
        trial.feed(count)
        if count % 2:  # else it is not asked between two steps
            trial.check()
    for reached in (0, 1, trial.last_layer):
        trial.forward(trial.fresh(1), range(reached))  # dies there, and the next forward is not confused
        trial.feed(1)
        trial.check()
    trial.forward(trial.fresh(1), range(1))
    trial.step(1)
    trial.check()


@each_cell
def test_what_was_fed_shows_at_once_where_nobody_settles(trial):
    trial.feed(3)
    layer = next((index for index, spec in enumerate(trial.kind.specs) if spec.keeps_kv), None)
    if layer is None:
        assert trial.cache.conv_states[0].shape[0] == len(trial.tokens)
    else:
        assert trial.cache[layer][0].shape[2] == trial.cache.key_cache[layer].shape[2] == trial.held(layer) == 3
        assert trial.cache.value_cache[layer].shape[2] == 3
    trial.feed(1)
    for found, must in trial.expected():  # layers hold the tokens too
        assert found.keys() == must.keys()
        assert all(torch.equal(held, must[name]) for name, held in found.items())
    trial.feed(1)
    trial.check()


@each_cell
def test_an_aborted_step_leaves_no_trace(trial):
    layers = len(trial.kind.specs)
    for count in EDGES:
        for tried, reached in ((1, 0), (30, layers // 2), (1, layers), (4, layers), (30, layers)):
            trial.cache.begin(tried)
            trial.forward(trial.fresh(tried), range(reached))
            trial.cache.abort()
            trial.check()
        trial.step(count)
        trial.check()
        trial.cache.abort()  # nothing is open
        trial.check()


@each_cell
def test_dropped_tokens_are_forgotten_also_across_the_edge_of_a_window(trial):
    for size, last in zip(EDGES, [[], [], [], [], [], [], [(70, 7)]], strict=True):
        trial.step(size)
        for count, rejected in ((1, 1), (5, 2), (4, 4), (5, 0), (12, 7), *last):
            tokens = trial.fresh(count)
            trial.cache.begin(count)
            trial.forward(tokens)
            assert trial.cache.can_reject(rejected) == trial.can_reject(rejected, count)
            if trial.can_reject(rejected, count):
                trial.cache.commit(rejected)
                trial.commit(tokens, rejected)
                trial.check()
            else:
                refused(
                    trial, trial.cache.commit, rejected, match=f"takes back whole steps only, not {rejected} of {count}"
                )
    trial.step(30, rejected=30)
    trial.check()


@each_cell
def test_cropping(trial):
    trial.cache.crop(0)
    trial.check()
    for count in (*EDGES, 30, 1, 2):
        trial.step(count)
        trial.crop(0)
        trial.crop(trial.total_tokens + 5)
        trial.check()
        for argument in (trial.total_tokens - 1, -trial.last_step, -3, 4):
            removed = trial.total_tokens - argument if argument > 0 else -argument
            possible = trial.can_crop(removed)
            if possible is False:
                refused(trial, trial.crop, argument)
                continue
            copied = copy.deepcopy(trial)
            try:
                copied.crop(argument)
            except caches.StepError:
                assert possible is None
            copied.check()
            copied.step(2)
            copied.check()
    if None not in trial.kind.bounds and trial.kind.bounds:
        trial.step(60)  # nothing is left of so long ago
        trial.step(9)
        refused(trial, trial.crop, 20, match="Reset the cache and feed the tokens to keep again")
    trial.crop(-trial.total_tokens - 1)  # all, as transformers' caches
    trial.check()
    trial.step(3)
    trial.check()


@each_cell
def test_rows(trial, rows):
    for count in EDGES:
        trial.step(count)
        for index in (range(rows - 1, -1, -1), [rows - 1] * rows):
            trial.select_rows(list(index))
            trial.check()
        trial.step(1)
        trial.check()
    trial.cache.reorder_cache(torch.arange(rows))
    trial.check()
    refused(trial, trial.cache.select_rows, torch.tensor([rows]), match="holds rows 0 to")
    refused(trial, trial.cache.select_rows, torch.tensor([], dtype=torch.long), match="holds rows 0 to")
    if trial.cache.fixed:
        match = f"room for {rows} rows cannot hold {2 * rows}.*max_batch_size"
        refused(trial, trial.cache.batch_repeat_interleave, 2, match=match)
    else:
        trial.cache.batch_repeat_interleave(2)
        trial = trial.holding(trial.cache, [row for row in range(rows) for _ in range(2)])
        trial.check()
        trial.step(3)
    trial.cache.batch_select_indices(torch.tensor([rows - 1]))
    trial = trial.holding(trial.cache, [rows - 1])
    trial.check()
    for count in EDGES:
        trial.step(count)
        trial.check()


@each_cell
def test_rows_that_a_mask_selects(trial):
    trial.step(9)
    for wrong in (torch.tensor([True, False]), torch.tensor([0.0, 1.0]), torch.tensor([[0, 1]])):
        refused(trial, trial.cache.batch_select_indices, wrong, match="or a bool mask of all 3 rows, not by torch")
    trial.cache.batch_select_indices(torch.tensor([True, False, True]))
    trial = trial.holding(trial.cache, [0, 2])
    trial.check()
    trial.cache.batch_select_indices(torch.tensor([1], dtype=torch.int16))
    trial = trial.holding(trial.cache, [1])
    trial.step(1)
    trial.check()


@each_cell
def test_a_fork_is_rows_repeated(backend, kind):
    """Whatever is done with them then."""
    trial = with_room(backend, kind, 8)
    trial.cache.fork(3)
    trial.check()
    trial.step(9)
    trial.fork(1)
    for count in (4, 1, 14):
        for fork in (
            [trial.fork, 2],
            [trial.select_rows, [1, 0, 3, 3]],
            [trial.fork, 2],
            [trial.select_rows, [6, 7, 2, 2]],
        ):
            fork[0](fork[1])
            trial.check()
            trial.step(count, rejected=count if count % 2 else 0)
            trial.check()
            trial.cache.begin(2)
            trial.forward(trial.fresh(2), range(2))
            trial.cache.abort()
            trial.step(1)
        for step, index in ((trial.step, [1, 1, 6]), (trial.step_whole, [0, 2])):
            trial.fork(2)
            step(count)
            copy.deepcopy(trial).step(2)
            step(1)
            trial.check()
            trial.select_rows(index)
            trial.check()
        trial.feed(1)
        trial.check()
    refused(trial, trial.cache.fork, 0, match=r"fork\(0\): every row")
    if trial.cache.fixed:
        refused(trial, trial.cache.fork, 5, match="room for 8 rows cannot hold 10")
    trial.fork(3)
    trial.cache.reset()
    trial.forget(2)
    trial.step(3)
    trial.check()


@each_cell
def test_tokens_from_before_a_fork_can_be_taken_back(backend, kind):
    for removed in (1, 3, 6, 9, 15):
        trial = with_room(backend, kind, 6)
        trial.step(9)
        trial.fork(3)
        trial.step(4)
        trial.step(2)
        if trial.can_crop(removed) is not True:
            continue
        trial.crop(-removed)
        trial.check()
        trial.step(2)
        trial.select_rows([2, 1, 0, 3, 4, 5])
        trial.step(30)
        trial.check()


@each_cell
def test_rows_that_there_is_room_for_can_come_later(backend, kind):
    if "max_batch_size" not in caches.recipe(backend).options.option_names():
        with pytest.raises(REFUSALS, match="max_batch_size"):
            build(backend, KINDS[kind], max_batch_size=6)
        return
    trial = Trial(backend, kind, 2, max_batch_size=6)
    trial.step(9)
    for index in ([1], [0] * 6, [5, 3]):
        trial.select_rows(index)
        trial.check()
        trial.step(3)
        trial.check()
    trial.select_rows([1] * 5)
    trial.crop(-trial.last_step)
    trial.check()
    refused(trial, trial.select_rows, [0] * 7, match="room for 6 rows cannot hold 7")
    trial.cache.reset()
    trial.forget(7)
    with pytest.raises(caches.CapacityError, match="room for 6 rows, but the step has 7"):
        trial.step(1)
    trial.cache.abort()
    trial.forget(6)
    trial.step(2)
    trial.check()


@each_cell
def test_reset_and_use_again(trial, rows):
    for count in EDGES:
        trial.step(count)
    trial.cache.reset()
    trial.forget(rows)
    trial.check()
    trial.step(8)
    trial.check()
    trial.cache.reset()
    trial.forget(rows + 1)
    for count in EDGES:
        trial.step(count)
        trial.check()


@each_cell
def test_room_can_be_reserved(trial):
    for count, room in ((3, 20), (1, 30)):  # after plain forwards
        trial.feed(count)
        trial.cache.reserve(room)
        trial.check()
    trial.feed(1)
    trial.step(5)
    trial.cache.reserve(100)
    trial.check()
    for _ in range(30):
        trial.step(3)
    trial.check()
