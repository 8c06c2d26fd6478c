"""Rows are dealt out to several caches and gathered again, store by store: hardly anything is there twice."""

from __future__ import annotations

import copy

import pytest
import torch
from contract import CELLS
from encoder_decoders import tiny_encoder_decoder
from failing_memory import memory, moments
from trial import Trial, with_room
from unfinished import OUT, asked

import caches
from caches.core.row_transfer import deal_rows, gather_rows
from caches.core.transfer import Share
from engine.memory.peak_memory import PeakMemory

INDEXES = [[0, 1], [2, 3]]


def four_rows(backend: str, kind: str, forks: bool) -> Trial:
    """Two prompts that became two rows each: forked rows go on sharing what they have in common."""
    trial = with_room(backend, kind, 4)
    trial.step(9)
    trial.fork(2) if forks else trial.select_rows([0, 0, 1, 1])
    trial.step(3)
    trial.step(1)
    return trial


def dealt(trial: Trial) -> list[Trial]:
    rooms = [trial.cache.max_rows and 2] * 2
    parts = deal_rows(trial.cache, [2, 2], rooms)
    return [trial.holding(part, index) for part, index in zip(parts, INDEXES, strict=True)]


def gathered(trial: Trial, parts: list[Trial]) -> Trial:
    return trial.holding(gather_rows([part.cache for part in parts]))


def log_of(cache: caches.EngineCache, ids: torch.Tensor) -> None:
    cache.log = caches.TokenLog(ids, torch.ones_like(ids))


def cases() -> list:
    """Every cell once, forked in turns; two of three belong to the whole product."""
    found = []
    for number, cell in enumerate(CELLS):
        marks = [pytest.mark.product] * (number % 3 > 0)
        found.append(pytest.param(*cell, number % 2 == 0, marks=marks, id="-".join([*cell, str(number % 2 == 0)])))
    return found


@pytest.mark.parametrize(("backend", "kind", "forks"), cases())
def test_everything_is_there_afterwards(backend, kind, forks):
    trial = four_rows(backend, kind, forks)
    log_of(trial.cache, torch.arange(8).view(4, 2))
    shared = any(part.shares for part in trial.cache.parts)
    parts = dealt(trial)
    assert (trial.cache.total_tokens, trial.cache.batch_size, trial.cache.bytes) == (0, -1, 0)
    for part in parts:
        part.check()
        assert any(one.shares for one in part.cache.parts) == shared
    assert parts[1].cache.log.ids.tolist() == [[4, 5], [6, 7]]
    copies = [copy.deepcopy(part) for part in parts]
    for part in copies:
        part.step(4)
        part.check()
    whole = gathered(trial, parts)
    whole.check()
    assert all(part.cache.bytes == 0 for part in parts)
    assert whole.cache.log.ids.tolist() == torch.arange(8).view(4, 2).tolist()
    whole.step(4)
    whole.step(1)
    whole.check()


def test_rows_that_were_forked_and_have_no_columns_since():
    """Their tails have memory, of a step that was aborted."""
    trial = with_room("dynamic", "full", 4)
    trial.step(5)
    trial.fork(2)
    trial.cache.begin(1)
    trial.forward(trial.fresh(1))
    trial.cache.abort()
    parts = dealt(trial)
    for part in parts:
        part.step(2)
        part.check()


def test_an_empty_cache_is_dealt_out_too():
    parts = deal_rows(with_room("dynamic", "full", 4).cache, [2, 2], [None, None])
    assert [part.batch_size for part in parts] == [-1, -1]
    assert gather_rows(parts).batch_size == -1


@pytest.mark.parametrize(("backend", "kind"), CELLS[::9])
def test_what_fails_on_the_way_changes_nothing(backend, kind):
    trial = four_rows(backend, kind, forks=True)
    for moment in moments(asked(trial, dealt), 4):
        other = copy.deepcopy(trial)
        with memory(moment), pytest.raises(OUT):
            dealt(other)
        other.check()
        other.step(2)
        other.check()


@pytest.mark.parametrize("backend", ["dynamic", "static", "quantized", "offloaded"])
def test_hardly_more_than_a_layer_is_there_twice(backend):
    trial = with_room(backend, "full", 4)
    with PeakMemory(torch.nn.Module()) as live:
        trial.step(200)
        trial.select_rows([0, 0, 1, 1])
        before, layers = trial.cache.bytes, len(trial.cache.layers)
        live.most = start = live._now
        parts = dealt(trial)
        dealing, live.most = live.most - start, live._now
        gathered(trial, parts)
        gathering = live.most - start
    # Room for columns to come may be other than it was.
    assert dealing <= 1.5 * before / layers
    assert gathering <= 2.5 * before / layers


def test_rows_of_an_open_step_are_not_dealt_out():
    trial = four_rows("dynamic", "full", forks=False)
    trial.cache.begin(1)
    with pytest.raises(caches.StepError, match="open"):
        dealt(trial)
    trial.cache.abort()
    trial.check()


@pytest.mark.parametrize(("number", "why"), [(0, "same layers and tokens"), (1, "open")])
def test_parts_that_hold_other_tokens_or_are_in_a_step_are_refused_before_anything_changes(number, why):
    parts = dealt(four_rows("dynamic", "full", forks=False))
    parts[number].cache.begin(1) if why == "open" else parts[number].step(1)
    with pytest.raises(caches.StepError, match=why):
        gather_rows([part.cache for part in parts])
    parts[number].cache.abort()
    for part in parts:
        part.check()


# Parts that ran on by themselves before they come together.


def test_states_whose_last_steps_differ_are_gathered_and_joined():
    """They cannot be taken back any more: not all rows could."""
    for put_together in (gathered, lambda trial, parts: trial.holding(caches.join_rows([one.cache for one in parts]))):
        trial = four_rows("dynamic", "convolutions, windows", forks=False)
        parts = dealt(trial)
        for part, steps in zip(parts, ([2, 2], [4]), strict=True):
            for tokens in steps:
                part.step(tokens)
        trial.tokens = parts[0].tokens + parts[1].tokens
        whole = put_together(trial, parts)
        whole.check()
        whole.step(3)
        whole.cache.crop(-3)
        whole.tokens = [tokens[:-3] for tokens in whole.tokens]
        whole.check()


@pytest.mark.parametrize("first", [0, 1])
def test_an_aborted_step_of_one_part_leaves_no_trace(first):
    """Its suffixes have memory, the others' have none yet."""
    trial = with_room("offloaded", "full", 4)
    trial.step(5)
    trial.fork(2)
    parts = dealt(trial)
    parts[first].cache.begin(1)
    parts[first].forward(parts[first].fresh(1))
    parts[first].cache.abort()
    whole = gathered(trial, parts)
    whole.check()
    whole.step(2)
    whole.check()


def test_an_encoders_part_is_gathered_where_the_decoders_is_empty():
    model = tiny_encoder_decoder("bart")
    cache = caches.build("dynamic", model.config)
    encoder, decoder = cache.parts[1], cache.parts[0]
    columns = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 4, 6, 8)
    encoder.load_keys_and_values([(columns, columns)] * len(encoder.layers))
    assert decoder.batch_size == -1
    whole = gather_rows(deal_rows(cache, [1, 3], [None, None]))
    assert whole.parts[1].batch_size == 4
    assert torch.equal(whole.parts[1].layers[0].keys, columns)


def test_what_can_neither_be_gathered_nor_brought_back_is_empty_everywhere(monkeypatch):
    parts = dealt(four_rows("dynamic", "full", forks=False))
    apply, gone = Share.apply, iter(range(100))

    def fails_late(share):
        if next(gone) == 3:
            raise MemoryError
        apply(share)

    def fails(share):
        raise MemoryError

    monkeypatch.setattr(Share, "apply", fails_late)
    monkeypatch.setattr(Share, "undo", fails)
    with pytest.raises(caches.StepError, match="so did bringing back"):
        gather_rows([part.cache for part in parts])
    assert [(part.cache.total_tokens, part.cache.batch_size, part.cache.bytes) for part in parts] == [(0, -1, 0)] * 2
