"""Branches of branches, which write, crop and select rows at random: each holds its own tokens, and copies are few."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError

import pytest
import torch
from architectures import tiny_model
from kept import options_of

import caches

HEADS, WIDTH, LAYERS = 2, 16, 2


class Held:
    """A cache, and what it should hold: keys of layer 0, [rows, heads, tokens, width]."""

    def __init__(self, cache, keys):
        self.cache, self.keys = cache, keys

    def write(self, tokens):
        new = torch.randn(self.keys.shape[0], HEADS, tokens, WIDTH)
        self.cache.begin(tokens)
        for layer in range(LAYERS):
            self.cache.update(new, -new, layer)
        self.cache.commit()
        self.keys = torch.cat([self.keys, new], 2)

    def check(self):
        cache, tokens = self.cache, self.keys.shape[2]
        assert cache.total_tokens == tokens
        if tokens:
            for layer in cache.layers:
                content = layer.dense_state()
                assert torch.equal(_plain(content["keys"]), self.keys)
                assert torch.equal(_plain(content["values"]), -self.keys)


def _plain(tensor):
    return tensor.materialize() if hasattr(tensor, "materialize") else tensor


def new_cache(backend):
    config = tiny_model("llama").config
    config = type(config)(**config.to_dict() | {"num_hidden_layers": LAYERS, "head_dim": WIDTH})
    options = options_of(backend, "host") | ({"max_cache_len": 400} if caches.recipe(backend).has_a_size else {})
    return caches.build(backend, config, **options)


@pytest.mark.parametrize("backend", ["dynamic", "offloaded", "static"])
@pytest.mark.parametrize("seed", range(30))
def test_each_branch_holds_its_own_tokens(backend, seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    held = [Held(new_cache(backend), torch.zeros(1, HEADS, 0, WIDTH))]
    held[0].write(draw.randint(1, 40))
    for _ in range(40):
        one = draw.choice(held)
        tokens, rows = one.keys.shape[2], one.keys.shape[0]
        action = draw.choice(["branch", "branch", "part", "write", "write", "crop", "rows", "reserve", "drop"])
        if action == "branch":
            held.append(Held(caches.branch(one.cache), one.keys))
        elif action == "part" and tokens > 1:
            part = draw.randint(1, tokens - 1)
            held.append(Held(caches.branch(one.cache, part), one.keys[:, :, :part]))
        elif action == "write" and tokens < 300:
            one.write(draw.choice([1, 1, 3, 30]))
        elif action == "crop" and tokens > 1:
            left = draw.randint(1, tokens - 1)
            one.cache.crop(left)
            one.keys = one.keys[:, :, :left]
        elif action == "rows":
            index = torch.tensor([draw.randrange(rows) for _ in range(draw.choice([1, 1, 2]))])
            if backend == "static":
                index = index[:1]
            one.cache.select_rows(index)
            one.keys = one.keys[index]
        elif action == "reserve":
            one.cache.reserve(tokens + draw.randint(1, 30))
        elif action == "drop" and len(held) > 1:
            held.remove(one)
        for other in held:
            other.check()


def places(cache):
    return {tensor.untyped_storage().data_ptr() for layer in cache.layers for tensor in layer.tensors()}


def test_the_first_that_goes_on_copies_nothing_and_others_only_what_came_since():
    one = Held(new_cache("dynamic"), torch.zeros(1, HEADS, 0, WIDTH))
    one.write(40)
    one.cache.reserve(100)
    first, second = (Held(caches.branch(one.cache), one.keys) for _ in range(2))
    before = places(one.cache)
    first.write(20)
    assert places(first.cache) == before
    second.write(20)
    assert places(second.cache) > before
    third = Held(caches.branch(second.cache), second.keys)
    third.write(1)
    assert places(third.cache) == places(second.cache)
    fourth = Held(caches.branch(second.cache, 50), second.keys[:, :, :50])
    assert places(fourth.cache) >= before
    one.write(5)  # the room was taken by the first
    assert not places(one.cache) & before
    for held in (one, first, second, third, fourth):
        held.check()


def test_what_is_taken_back_and_written_again_is_a_copy():
    one = Held(new_cache("dynamic"), torch.zeros(1, HEADS, 0, WIDTH))
    one.write(40)
    one.cache.reserve(100)
    other = Held(caches.branch(one.cache), one.keys)
    other.cache.crop(30)
    other.keys = other.keys[:, :, :30]
    other.write(4)
    one.check()
    other.check()
    assert not places(one.cache) & places(other.cache)


@pytest.mark.parametrize("backend", ["dynamic", "offloaded", "static"])
def test_a_step_that_is_open_is_no_part_of_a_branch(backend):
    one = Held(new_cache(backend), torch.zeros(1, HEADS, 0, WIDTH))
    one.write(5)
    one.cache.begin(1)
    with pytest.raises(caches.StepError, match=r"a step is open: commit\(\) or abort\(\)"):
        caches.branch(one.cache)
    one.cache.abort()
    new = torch.randn(1, HEADS, 2, WIDTH)
    for layer in range(LAYERS):  # a plain forward: without `begin` and `commit`
        one.cache.update(new, -new, layer)
    one.keys = torch.cat([one.keys, new], 2)
    other = Held(caches.branch(one.cache), one.keys)
    for held in (other, one):
        held.write(3)
    for held in (other, one):
        held.check()


@pytest.mark.parametrize("backend", ["dynamic", "offloaded", "static"])
def test_a_branch_of_more_tokens_than_there_are_is_refused_and_one_of_none_is_empty(backend):
    one = Held(new_cache(backend), torch.zeros(1, HEADS, 0, WIDTH))
    one.write(5)
    for tokens in (-1, 6):
        with pytest.raises(caches.StepError, match=rf"branch\(cache, {tokens}\): the cache holds 5 tokens"):
            caches.branch(one.cache, tokens)
    empty = Held(caches.branch(one.cache, 0), one.keys[:, :, :0])
    assert (empty.cache.total_tokens, empty.cache.batch_size) == (0, -1)
    for held in (empty, one, Held(caches.branch(empty.cache, 0), empty.keys)):
        held.write(2)
    for held in (empty, one):
        held.check()


def test_one_of_two_threads_writes_behind_the_tokens():
    one = Held(new_cache("dynamic"), torch.zeros(1, HEADS, 0, WIDTH))
    one.write(40)
    both, hook = Barrier(2), one.cache.stack.hook
    state_dict = hook.state_dict

    def wait_for_the_other(rows):
        with suppress(BrokenBarrierError):
            both.wait(timeout=0.3)
        return state_dict(rows)

    hook.state_dict = wait_for_the_other
    with ThreadPoolExecutor() as threads:
        branches = list(threads.map(lambda _: Held(caches.branch(one.cache), one.keys), range(2)))
    for held in branches:
        held.write(3)
    for held in branches:
        held.check()
