"""Memory is out in the middle of choosing rows or of a step, at every moment there is: nothing is lost by it."""

from __future__ import annotations

import copy

import pytest
import torch
from failing_memory import each_cell_with, memory, moments
from forks import Loop, model_with
from transformers import DynamicCache, EncoderDecoderCache
from trial import Trial, with_room
from unfinished import CHOICES, OUT, asked, chosen, forked, goes_on, prepared

import caches
from caches.attention.kv_view import plain

pytestmark = pytest.mark.covering("values", "pairs")


@each_cell_with(CHOICES)
def test_choosing_rows_goes_on_where_it_failed(backend, kind, choices, most):
    for before, choose in (CHOICES[choice] for choice in choices):
        trial = before(prepared(backend, kind))
        must = chosen(trial, choose)
        for number, moment in enumerate(moments(asked(trial, choose), most)):
            other = copy.deepcopy(trial)
            with memory(moment), pytest.raises(OUT):
                choose(other)
            _is_unfinished(other.cache)
            if number % 2:
                other = copy.deepcopy(other)
            with memory(1 + number % 3) as again:
                try:
                    other.cache.finish()
                except OUT:
                    assert other.cache.unfinished
            assert other.cache.unfinished == (again.count in again.fails_at)
            other.cache.finish()
            other.cache.finish()
            goes_on(must.holding(other.cache))


def test_the_log_turns_once():
    trial = forked(prepared("offloaded", "full"))  # where putting trunks and tails together takes memory too
    trial.cache.log = caches.TokenLog(torch.arange(6)[:, None].repeat(1, 16), torch.ones(6, 16))
    choose = CHOICES["one of each"][1]
    for moment in range(1, asked(trial, choose) + 1):
        other = copy.deepcopy(trial)
        with memory(moment), pytest.raises(OUT):
            choose(other)
        other.cache.finish()
        assert other.cache.log.ids[:, 0].tolist() == [5, 1]


def _is_unfinished(cache) -> None:
    assert cache.unfinished
    for refused in (
        lambda: cache.begin(1),
        lambda: cache.select_rows(torch.tensor([0])),
        lambda: cache.fork(2),
        lambda: cache.unshare(),
        lambda: cache.crop(1),
        lambda: cache.reserve(50),
        lambda: cache[0],
        lambda: cache.check_finite(),
        lambda: caches.convert(cache, "dynamic"),
        lambda: caches.select_rows(cache, torch.tensor([0])),
    ):
        with pytest.raises(caches.StepError, match=r"failed half-way.*finish\(\) goes on"):
            refused()
    assert cache.unfinished


# Steps.


def step(trial: Trial, count: int, rejected: int = 0, fails_at: int = 0, begins: bool = True) -> None:
    """A step that may fail: then it is done again, and where only settling failed, only that."""
    tokens, done = trial.fresh(count), []
    try:
        with memory(fails_at):
            if begins:
                trial.cache.begin(count)
            trial.forward(tokens)
            done.append("forward")
            if begins:
                trial.cache.commit(rejected)
    except OUT:
        assert not trial.cache.unfinished
        if done:
            trial.cache.commit(rejected)
            trial.commit(tokens, rejected)
            return
        if begins:
            trial.cache.abort()
        elif (
            trial.cache.total_tokens > trial.total_tokens
        ):  # every layer had its tokens: it is not told that reading them failed
            trial.commit(tokens)
            return
        trial.cache.crop(0)
        trial.check()
        step(trial, count, rejected, begins=begins)
    else:
        trial.commit(tokens, rejected)


def looked_at_whole(trial: Trial, **options) -> None:
    trial.look = torch.clone
    step(trial, 1, **options)
    trial.look = plain


def empty(backend: str, kind: str) -> Trial:
    return with_room(backend, kind, 8)


def on_disk(backend: str, kind: str) -> Trial:
    """Where the backend can be there."""
    has_residency = "residency" in caches.recipe(backend).options.option_names()
    return Trial(backend, kind, 2, **({"residency": "disk"} if has_residency else {}))


STEPS = {
    "one token": (prepared, lambda trial, **options: step(trial, 1, **options)),
    "in part": (
        prepared,
        lambda trial, **options: step(trial, 5, rejected=2 if trial.can_reject(2, 5) else 0, **options),
    ),
    "all of it": (prepared, lambda trial, **options: step(trial, 5, rejected=5, **options)),
    "past windows": (prepared, lambda trial, **options: step(trial, 70, **options)),
    "fed by others": (prepared, lambda trial, **options: step(trial, 1, begins=False, **options)),
    "the first": (empty, lambda trial, **options: step(trial, 9, **options)),
    "the first on disk": (on_disk, lambda trial, **options: step(trial, 9, **options)),
    "of forked rows": (lambda *cell: forked(prepared(*cell)), lambda trial, **options: step(trial, 17, **options)),
    "looked at whole": (lambda *cell: forked(prepared(*cell)), looked_at_whole),
}


@each_cell_with(STEPS)
def test_a_step_that_failed_can_be_done_again(backend, kind, choices, most):
    for prepare, operation in (STEPS[choice] for choice in choices):
        trial = prepare(backend, kind)
        for moment in moments(asked(trial, operation), most):
            other = copy.deepcopy(trial)
            operation(other, fails_at=moment)
            goes_on(other)


def fed_theirs(name: str) -> Loop:
    """A loop that has fed a cache of transformers' own."""
    loop = Loop(model_with(name))
    config = loop.model.config.get_text_config(decoder=True)
    new = DynamicCache(config=config)
    loop.cache = caches.driven(EncoderDecoderCache(new, DynamicCache()) if loop.is_encoder_decoder else new)
    loop.mask = loop.mask[:, :0]
    loop.step(9)
    return loop


@pytest.mark.parametrize("name", ["llama", "gemma2", "jamba", "lfm2", "bart"])
def test_transformers_own_caches_go_on_too(name):
    index, must = torch.tensor([1, 0, 0]), fed_theirs(name)
    with memory() as counted:
        must.cache.select_rows(index)
    must._others(index)
    logits = must.step()
    for moment in range(1, counted.count + 1):
        other = fed_theirs(name)
        with memory(moment), pytest.raises(OUT):
            other.cache.select_rows(index)
        assert other.cache.unfinished
        for refused in (
            lambda: other.cache.begin(1),  # noqa: B023
            lambda: other.cache.select_rows(index),  # noqa: B023
            lambda: other.cache.crop(1),  # noqa: B023
        ):
            with pytest.raises(caches.StepError, match=r"failed half-way.*finish\(\) goes on"):
                refused()
        other.cache.finish()
        other._others(index)
        assert torch.equal(other.step(), logits)
    assert counted.count >= 3
    with memory(1), pytest.raises(OUT):
        other.cache.select_rows(index)
    other.cache.reset()
    assert not other.cache.unfinished
