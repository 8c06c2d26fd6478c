"""Rows that share their prompt compute what copies of them compute, and nothing is copied that need not be."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from architectures import tiny_model
from contract import FULL, KINDS, READS_OTHERS, each_cell, keys_of
from forks import ENCODED, PROMPTS, ROWS, SIBLINGS, Loop, feed_columns, model_with
from transformers.integrations.sdpa_attention import repeat_kv
from trial import storage, with_room

import caches
from caches.attention.kv_view import KeyValueView, plain
from caches.attention.segments import CacheRows, DenseSegment, PerRowSegment
from caches.memory.buffers import HostBuffer

pytestmark = pytest.mark.covering("values", "pairs")

REPEATED = torch.arange(PROMPTS).repeat_interleave(SIBLINGS)
# Whose attention takes columns in pieces; which need the whole, because they go on computing with the keys or multiply
# in a way of their own; and which have nothing to share: windows, states, an index.
IN_PIECES = ["gpt2", "llama", "gemma2", "gpt_oss", "qwen3", "llama4_text", "falcon", "jamba", "falcon_h1"]
IN_PIECES += ["gemma3n_text", "zamba2"]
WHOLE = ["deepseek_v3", "bloom"]
NOTHING_SHARED = ["mistral", "mamba2", "deepseek_v32"]
CLOSE = {"atol": 1e-3, "rtol": 1e-4}


@pytest.fixture
def wholes(monkeypatch):
    """Every view that was needed whole."""
    found, whole = [], KeyValueView.materialize_for_model
    monkeypatch.setattr(KeyValueView, "materialize_for_model", lambda view: found.append(view) or whole(view))
    return found


@pytest.fixture(params=["sdpa", "eager"])
def attention(request):
    return request.param


def both(model, cache="dynamic", tokens=1, **options) -> tuple[Loop, torch.Tensor, torch.Tensor]:
    """The loop that forked, its logits, and those of one that copied."""
    forked, copied = Loop(model, cache, **options), Loop(model, cache, **options)
    forked.fork(SIBLINGS)
    copied.select_rows(REPEATED)
    return forked, forked.beams(tokens), copied.beams(tokens)


# The same numbers.


@pytest.mark.parametrize("name", [*IN_PIECES, *WHOLE, *NOTHING_SHARED, *ENCODED])
def test_beams_compute_what_copies_do(name, attention, wholes):
    forked, found, must = both(model_with(name, attention))
    torch.testing.assert_close(found, must, **CLOSE)
    assert bool(forked.forks) == (name in IN_PIECES + ENCODED)
    layers = len(forked.cache.layers)
    assert len(wholes) == (2 * layers if name in WHOLE else 0)  # once for each, then it has copies


@pytest.mark.parametrize("tokens", [2, 70])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "deepseek_v3", "t5"])
def test_steps_of_several_tokens(name, tokens):
    if name == "t5" and tokens == 70:
        pytest.skip("says where tokens are by their number only")
    forked, found, must = both(model_with(name), tokens=tokens if tokens < 70 else 35)
    torch.testing.assert_close(found, must, **CLOSE)
    assert forked.forks  # the whole is no loss in a long step


def test_products_are_exact():
    model = copy.deepcopy(tiny_model("gpt2")).double()
    _, found, must = both(model)
    torch.testing.assert_close(found, must, atol=1e-11, rtol=0)
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("cache", ["static", "offloaded", "offloaded_static", "quantized", "offloaded_quantized"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3n_text", "jamba", "bart", "deepseek_v3"])
def test_any_backend(name, cache, as_they_are, wholes):
    options = {"max_cache_len": 40, "max_batch_size": ROWS} if "static" in cache else {}
    options |= {"residual_length": 2} if "quantized" in cache else {}
    if "quantized" in cache and name == "gemma2":
        options["residual_length"] = 3
    forked, found, must = both(model_with(name), cache, **options)
    torch.testing.assert_close(found, must, **CLOSE)
    if name == "deepseek_v3":
        assert not forked.forks
        return
    assert not wholes
    assert forked.forks
    if "quantized" in cache:
        assert any(not fork.suffix.is_in_full for fork in forked.forks)


# Nothing is copied.


@pytest.mark.parametrize("name", ["gpt2", "llama", "jamba", *ENCODED])
def test_a_prompt_stays_where_it_is(name):
    loop = Loop(model_with(name))
    before = loop.storage
    loop.fork(SIBLINGS)
    loop.beams()
    assert loop.storage == before
    loop.select_rows(torch.tensor([3, 5, 0, 1]))  # fewer of each, and the prompts in another order
    assert [(fork.prefix.rows, fork.rows_per_prefix) for fork in loop.forks] == [(2, 2)] * len(loop.forks)
    loop.step()


@each_cell
def test_only_a_step_of_one_token_that_needs_the_whole_ends_the_sharing(backend, kind):
    trial = with_room(backend, kind, 4)
    trial.step(9)
    trial.fork(2)
    shares = [2 for part in trial.cache.parts for _ in part.stack.shared_timelines]
    assert bool(shares) == (KINDS[kind].cross or (None in trial.kind.bounds and kind != "indexed"))

    def rows_per_prefix() -> list[int]:
        return [fork.rows_per_prefix for part in trial.cache.parts for fork in part.stack.shared_timelines]

    for layer in trial.all_layers:
        for columns in layer.dense_state().values():
            columns.clone()  # between steps, which says nothing about the model
    trial.step(1)
    assert rows_per_prefix() == shares
    trial.step_whole(3)
    assert rows_per_prefix() == shares
    trial.step_whole(1)
    assert set(rows_per_prefix()) <= {1}
    trial.check()


def test_bytes_are_those_of_the_prompts_and_the_tails():
    cache = caches.recipe("dynamic").make(KINDS["full"].specs, caches.recipe("dynamic").options())
    feed_columns(cache, 1024)
    prompts = cache.bytes
    cache.fork(16)
    assert cache.bytes == prompts
    feed_columns(cache, 1, 32)
    assert cache.bytes == prompts * (1 + 16 * 16 / 1024)
    cache.reserve(1024 + 100)  # in all
    assert cache.bytes == prompts * (1 + 112 * 16 / 1024)
    cache.unshare()
    assert cache.bytes >= prompts * 16


@each_cell
def test_all_bytes_are_counted(backend, kind):
    trial = with_room(backend, kind, 4)
    trial.step(9)
    trial.fork(2)
    for _ in range(6):
        trial.step(1)
        twin = copy.deepcopy(trial)
        twin.step(1)
        for one in (trial, twin):
            assert one.cache.bytes == sum(storage(one.cache).values())
    assert not storage(trial.cache).keys() & storage(twin.cache).keys()


@each_cell
def test_the_order_that_there_is_costs_nothing(trial):
    def held() -> list[int]:
        return [tensor.data_ptr() for layer in trial.all_layers for tensor in layer.tensors()]

    trial.step(9)
    stays = held()
    trial.select_rows([0, 1, 2])
    assert held() == stays
    trial.select_rows([2, 0, 1])
    assert trial.cache.fixed or held() != stays or "offloaded" in trial.backend


@pytest.mark.parametrize("backend", ["offloaded", "quantized", "offloaded_quantized"])
def test_what_a_layer_was_handed_lasts_where_later_layers_read_it(backend):
    """Although the others take turns in the same memory."""
    cache = caches.recipe(backend).make([*[FULL] * 5, READS_OTHERS], caches.recipe(backend).options())
    feed_columns(cache, 200, layers=5)
    cache.fork(SIBLINGS)
    for _ in range(4):
        cache.begin(1)
        handed = [cache.update(*[torch.randn(ROWS, 2, 1, 8)] * 2, layer)[0] for layer in range(5)]
        cache.commit()
        for layer, keys in enumerate(handed):
            assert torch.equal(plain(keys), plain(cache.layers[layer].keys))


@pytest.mark.parametrize("index", [[1, 3], [0, 5], [4, 0]])
def test_who_goes_on_alone_is_an_ordinary_row_again(index):
    """As contrastive search does in each step: of the candidates of a prompt one goes on."""
    forked, copied = Loop(model_with("llama")), Loop(model_with("llama"))
    index = torch.tensor(index)
    for _ in range(20):
        forked.fork(SIBLINGS)
        before = forked.storage
        forked.step()
        forked.select_rows(index)
        assert not forked.forks
        assert forked.cache.scratch.suffix is None
        if index[0] < index[1]:  # else prompts change places
            assert forked.storage == before  # the tail was added to what was there
    for _ in range(20):
        copied.select_rows(REPEATED)
        copied.step()
        copied.select_rows(index)
    torch.testing.assert_close(forked.step(), copied.step(), **CLOSE)
    assert forked.cache.bytes == copied.cache.bytes


@pytest.mark.parametrize("backend", ["offloaded", "offloaded_static"])
def test_a_prompt_is_fetched_once_for_all_its_rows(backend, monkeypatch):
    read, fetched = HostBuffer.read, []
    monkeypatch.setattr(HostBuffer, "read", lambda buffer, *args: fetched.append(found := read(buffer, *args)) or found)
    options = {"max_cache_len": 700, "max_batch_size": 32} if "static" in backend else {}
    cache = caches.build(backend, tiny_model("llama").config, **options)
    feed_columns(cache, 600)
    cache.fork(16)
    for _ in range(2):  # by then it knows the order of the layers
        feed_columns(cache, 1, 32)
    numbers = []
    for _ in range(3):
        fetched.clear()
        feed_columns(cache, 1, 32)
        numbers.append(sum(one.numel() for one in fetched))
    prompts, tails = 4 * 2 * PROMPTS * 2 * 600 * 8, 4 * 2 * 32 * 2 * 8
    assert all(prompts <= number <= prompts + 6 * tails for number in numbers)


def test_codes_are_shared():
    cache = caches.build("quantized", tiny_model("llama").config, residual_length=4)
    feed_columns(cache, 300)
    before = [plain(layer.keys) for layer in cache.layers]
    codes = [part.buffer._memory.data_ptr() for layer in cache.layers for part in layer.stores["keys"].parts.values()]
    cache.fork(SIBLINGS)
    for _ in range(70):
        feed_columns(cache, 1, ROWS)
    trunks = [layer.stores["keys"].prefix for layer in cache.layers]
    assert [part.buffer._memory.data_ptr() for trunk in trunks for part in trunk.parts.values()] == codes
    assert all(layer.timeline.suffix.encoded >= 60 for layer in cache.layers)
    for layer, held in zip(cache.layers, before, strict=True):
        assert torch.equal(plain(layer.keys)[:, :, :300], held[REPEATED])
    cache.select_rows(torch.tensor([5]))
    assert [fork.rows_per_prefix for fork in cache.stack.shared_timelines] == [
        1
    ]  # what was encoded since stays apart from the trunk's residual
    chosen = caches.join_rows([caches.select_rows(cache, torch.tensor([0, 0])), cache])
    assert torch.equal(plain(chosen.layers[0].keys), plain(cache.layers[0].keys)[[0, 0, 0]])


def test_rows_that_nobody_can_look_at_are_copied():
    """An index on an accelerator."""

    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

        def tolist(self):
            raise AssertionError("the device was waited for")

        def to(self, device):
            return self.as_subclass(torch.Tensor)

    loop, other = Loop(model_with("llama")), Loop(model_with("llama"))
    for one in (loop, other):
        one.fork(SIBLINGS)
        one.step()
    index = torch.tensor([1, 0, 2, 5, 5, 3])
    loop.cache.select_rows(index.as_subclass(Elsewhere))
    loop.mask, loop.cache.log = loop.mask[index], None
    other.select_rows(index)
    assert other.forks
    assert not loop.forks
    torch.testing.assert_close(loop.step(), other.step(), **CLOSE)


# What else there is.


def test_no_graph_and_room_to_the_end():
    cache = caches.build("static", tiny_model("llama").config, max_cache_len=90, max_batch_size=ROWS)
    feed_columns(cache, 20)
    assert cache.why_not_compiled is None
    cache.fork(SIBLINGS)
    assert "rows share the prefix of their prompt" in cache.why_not_compiled
    with pytest.raises(caches.StepError, match="rows share the prefix"):
        cache.begin(1, graph=True)
    feed_columns(cache, 30, ROWS)
    cache.crop(10)  # there is more room for tails now
    feed_columns(cache, 78, ROWS)
    with pytest.raises(caches.CapacityError, match="holds 88 of at most 90 tokens and cannot take 3 more: 1 too many"):
        cache.begin(3)
    feed_columns(cache, 2, ROWS)
    assert max(layer.stores["keys"].suffix.buffer.shape[2] for layer in cache.layers) <= 80
    cache.unshare()
    assert cache.why_not_compiled is None
    assert cache.total_tokens == 90


def test_a_step_of_another_model_is_refused():
    cache = caches.build("dynamic", tiny_model("llama").config)
    feed_columns(cache, 20)
    cache.fork(SIBLINGS)
    for shape, match in (((ROWS, 3, 1, 8), "belongs to one model"), ((2, 2, 1, 8), "the step has 2")):
        cache.begin(1)
        with pytest.raises(caches.StepError, match=match):
            cache.update(*[torch.randn(shape)] * 2, 0)
        cache.abort()
    feed_columns(cache, 1, ROWS)


def test_tuples_and_looking_for_numbers_that_are_not_finite(wholes):
    loop = Loop(model_with("gpt2"))
    loop.fork(SIBLINGS)
    for _ in range(2):
        loop.step()
    tuples = loop.cache.to_legacy_cache()
    assert all(type(tensor) is torch.Tensor for layer in tuples for tensor in layer)
    assert torch.equal(tuples[1][0], plain(loop.cache.layers[1].keys))
    other = caches.from_legacy_cache(tuples, loop.model.config)
    loop.cache.check_finite()
    loop.cache.layers[1].keys.materialize_for_model()  # between steps that says nothing about the model
    loop.step()
    assert loop.forks
    assert torch.equal(other.key_cache[2], loop.cache.key_cache[2][:, :, :-1])
    loop.cache.layers[2].stores["values"].prefix.buffer[1, 0, 0] = float("nan")
    with pytest.raises(caches.StepError, match="elements of values in row 3 are NaN"):
        loop.cache.check_finite()


def test_two_threads_on_one_model():
    model = model_with("llama")
    must = both(model)[1]
    found = [None, None]

    def run(number):
        found[number] = both(model)[1]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, must) for one in found)


def test_transformers_own_caches_copy():
    from transformers import DynamicCache

    cache = caches.driven(DynamicCache())
    cache.fork(2)
    cache.begin(3)
    cache.handle.update(*[keys_of([[1, 2, 3]], 0)] * 2, 0)
    cache.commit()
    cache.fork(2)
    before = cache.handle.layers[0].keys
    cache.select_rows(torch.tensor([0, 1]))
    assert cache.handle.layers[0].keys is before
    assert torch.equal(before, keys_of([[1, 2, 3]] * 2, 0))


# What is followed without the whole.

FOLLOWED = {
    "heads repeated": lambda keys: repeat_kv(keys, 3),
    "heads repeated by torch": lambda keys: torch.repeat_interleave(keys, 3, dim=1),
    "heads repeated twice": lambda keys: repeat_kv(keys, 2).repeat_interleave(2, 1).contiguous(),
    "transposed": lambda keys: keys.transpose(2, 3),
    "transposed from the end": lambda keys: torch.transpose(repeat_kv(keys, 2), -1, -2).transpose(3, 2).mT,
    "the same type": lambda keys: keys.to(torch.float64).to("cpu").to(dtype=torch.float64).to(keys.device),
}
TAKEN_WHOLE = {
    "another type": lambda keys: keys.to(torch.float32),
    "like another": lambda keys: keys.to(torch.zeros(1)),
    "a slice": lambda keys: keys[:, :, 2:],
    "an axis first": lambda keys: keys[None],
    "chosen": lambda keys: keys[:, :, torch.tensor([1, 0])],
    "rows repeated": lambda keys: keys.repeat_interleave(2, dim=0),
    "heads first": lambda keys: keys.transpose(0, 1),
    "flat": lambda keys: keys.reshape(4, -1),
    "spread otherwise": lambda keys: keys[:, :, None].expand(-1, -1, 2, -1, -1).reshape(4, 4, -1),
    "added": lambda keys: 1 + keys,
    "joined": lambda keys: torch.cat([keys, keys], dim=-1),
    "wrongly multiplied": lambda keys: keys @ torch.ones(6, 2, dtype=torch.float64),
    "few heads": lambda keys: torch.ones(1, 1, 3, 5, dtype=torch.float64) @ keys,
}


def columns_in_pieces() -> tuple[KeyValueView, torch.Tensor]:
    """[4 rows of 2 prompts, 2 heads, 5 columns, 6], and the same as one tensor."""
    trunk, tail = torch.randn(2, 2, 3, 6, dtype=torch.float64), torch.randn(4, 2, 2, 6, dtype=torch.float64)
    segments = lambda: iter([DenseSegment(trunk), PerRowSegment(DenseSegment(tail), 2)])  # noqa: E731
    view = KeyValueView([CacheRows((4, 2, 5, 6), (), segments, rows_per_prefix=2)], tail)
    return view, torch.cat([trunk.repeat_interleave(2, dim=0), tail], dim=2)


@pytest.mark.parametrize("name", FOLLOWED)
def test_followed(name, wholes):
    view, numbers = columns_in_pieces()
    found, must = FOLLOWED[name](view), FOLLOWED[name](numbers)
    assert isinstance(found, KeyValueView)
    assert (found.shape, found.dtype, found.ndim, found.size(1)) == (must.shape, must.dtype, 4, must.size(1))
    left = torch.randn(4, must.shape[1], 3, must.shape[2], dtype=torch.float64)
    for product in (left @ found, torch.matmul(left, found), left.matmul(found)):
        torch.testing.assert_close(product, left @ must, atol=1e-12, rtol=0)
    assert not wholes
    assert torch.equal(found + 0, must)
    assert wholes


@pytest.mark.parametrize("name", TAKEN_WHOLE)
def test_taken_whole(name, wholes):
    view, numbers = columns_in_pieces()
    found = TAKEN_WHOLE[name](view)
    assert type(found) is torch.Tensor
    assert torch.equal(found, TAKEN_WHOLE[name](numbers))
    assert wholes


@pytest.mark.parametrize("more", [{}, {"scale": 0.3}, {"enable_gqa": True}], ids=str)
@pytest.mark.parametrize("mask", [None, "bool", "float", "by head"])
@pytest.mark.parametrize("repeats", [1, 2])
def test_attention(mask, more, repeats, wholes):
    (keys, k), (values, v) = columns_in_pieces(), columns_in_pieces()
    queries = torch.randn(4, 8 if "enable_gqa" in more else 2 * repeats, 3, 6, dtype=torch.float64)
    allowed = torch.rand(4, 1 if mask != "by head" else queries.shape[1], 3, 5) > 0.4
    allowed[..., 0] = True
    given = {None: None, "bool": allowed, "float": torch.where(allowed, 0.3, -torch.inf).double(), "by head": allowed}
    attend = torch.nn.functional.scaled_dot_product_attention
    found = attend(queries, repeat_kv(keys, repeats), repeat_kv(values, repeats), given[mask], **more)
    must = attend(queries, repeat_kv(k, repeats), repeat_kv(v, repeats), given[mask], **more)
    torch.testing.assert_close(found, must, atol=1e-12, rtol=0)
    assert not wholes
    whole = attend(queries, repeat_kv(keys, repeats), repeat_kv(values, repeats), is_causal=True, **more)
    must = attend(queries, repeat_kv(k, repeats), repeat_kv(v, repeats), is_causal=True, **more)
    assert torch.equal(whole, must)
    assert wholes


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama", "gemma2", "jamba", "deepseek_v3"])
@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded", "quantized"])
def test_on_a_gpu(name, cache, as_they_are):
    options = {"max_cache_len": 40, "max_batch_size": ROWS} if cache == "static" else {}
    model = copy.deepcopy(model_with(name)).to("cuda", torch.float64)
    forked, found, must = both(model, cache, **options)
    torch.testing.assert_close(found, must, atol=1e-5, rtol=1e-5)
    forked.cache.select_rows(torch.tensor([1, 0, 5], device="cuda"))
    assert all(fork.rows_per_prefix == 1 for fork in forked.forks)
