"""One step is a transaction, on every backend and kind of reach: driven by hand, with tensors that can be read."""

import copy

import pytest
import torch

import caches
from caches.spec import INDEX, KV, LayerSpec, Reach

ROWS, HEADS, DIM, WINDOW = 3, 2, 4, 6
SPECS = [
    LayerSpec("full_attention", frozenset({KV})),
    LayerSpec("sliding_attention", frozenset({KV}), Reach("window", WINDOW)),
    LayerSpec("full_attention", frozenset()),  # reads another layer's keys
    LayerSpec("chunked_attention", frozenset({KV}), Reach("chunk", WINDOW + 3)),
]
LAYERS = [0, 1, 3]
BACKENDS = [name for name in caches.names() if name != "none"]


def build(name):
    recipe = caches.recipe(name)
    options = {"max_cache_len": 600} if recipe.has_a_size else {}
    return recipe.build(SPECS, recipe.options.from_dict(options))


@pytest.fixture(params=BACKENDS)
def cache(request):
    return build(request.param)


def column(position, layer, row):
    """What is stored for one token: every number says where it belongs."""
    return 10_000 * layer + 1_000 * row + position


def tokens(begin, count, layer):
    grid = torch.tensor([[column(p, layer, r) for p in range(begin, begin + count)] for r in range(ROWS)])
    return grid[:, None, :, None].expand(ROWS, HEADS, count, DIM).float()


def forward(cache, count, layers=LAYERS):
    """What a model does in one step: append on every layer; returns what attention would read."""
    begin = cache.get_seq_length()
    return {layer: cache.update(tokens(begin, count, layer), -tokens(begin, count, layer), layer) for layer in layers}


def step(cache, count, drop=0):
    cache.begin(count)
    read = forward(cache, count)
    cache.settle(drop)
    return read


def check_held(cache, seen, order=range(ROWS)):
    """Every layer holds exactly the most recent columns its reach needs, of the right rows, keys and values alike."""
    assert cache.get_seq_length() == cache.seen == seen
    for layer in LAYERS:
        bound = SPECS[layer].reach.columns
        held = seen if bound is None else min(seen, bound)
        expected = torch.tensor([[column(p, layer, row) for p in range(seen - held, seen)] for row in order]).float()
        assert torch.equal(cache.layers[layer].keys[:, 0, :, 0], expected)
        assert torch.equal(cache.layers[layer].values[:, -1, :, -1], -expected)


STEPS = [7, 1, 1, 1, 5, 1, 30, 1, 1] + [1] * 40


def test_what_attention_reads_and_what_is_kept(cache):
    seen = 0
    for count in STEPS:
        cache.begin(count)
        sizes = {layer: cache.get_mask_sizes(count, layer) for layer in LAYERS}
        read = forward(cache, count)
        for layer, (keys, values) in read.items():
            length, offset = sizes[layer]
            assert keys.shape == values.shape == (ROWS, HEADS, length, DIM)
            assert offset + length == seen + count
            expected = [column(position, layer, 1) for position in range(offset, seen + count)]
            assert keys[1, 0, :, 0].tolist() == expected
        cache.settle()
        seen += count
        check_held(cache, seen)


@pytest.mark.parametrize("count", [1, 4, 30])
def test_an_aborted_step_leaves_no_trace(cache, count):
    seen = 0
    for size in STEPS[:12]:
        for reached in ([], LAYERS[:1], LAYERS[:2], LAYERS):
            cache.begin(count)
            forward(cache, count, reached)
            cache.abort()
            if seen:
                check_held(cache, seen)
        step(cache, size)
        seen += size
        check_held(cache, seen)


@pytest.mark.parametrize(("count", "drop"), [(1, 1), (5, 2), (5, 5), (30, 1), (30, 12)])
def test_rejected_tokens_are_forgotten_also_across_the_edge_of_a_window(cache, count, drop):
    seen = 0
    for size in STEPS[:12]:
        step(cache, size)
        seen += size
        step(cache, count, drop)
        seen += count - drop
        check_held(cache, seen)


def test_rows_follow_an_index(cache):
    step(cache, 9)
    cache.rows(torch.tensor([2, 0, 0]))
    check_held(cache, 9, order=[2, 0, 0])


def test_crop_before_the_window_is_full_and_just_after(cache):
    step(cache, 4)
    cache.crop(3)
    check_held(cache, 3)
    step(cache, 2)
    cache.crop(-1)
    check_held(cache, 4)
    cache.crop(0)
    check_held(cache, 4)
    for _ in range(8):
        step(cache, 1)
    cache.crop(-2)  # evicted columns are still in the buffer and come back
    check_held(cache, 10)


def test_crop_of_what_a_window_has_lost_is_refused(cache):
    step(cache, 60)
    with pytest.raises(caches.StepError, match="sliding_attention layer keeps 5 of them"):
        cache.crop(20)
    with pytest.raises(caches.StepError, match="61 cannot be removed"):
        cache.crop(-61)
    check_held(cache, 60)


def test_steps_out_of_order(cache):
    with pytest.raises(caches.StepError, match="without begin"):
        cache.settle()
    cache.begin(2)
    with pytest.raises(caches.StepError, match="open"):
        cache.begin(2)
    forward(cache, 2)
    with pytest.raises(caches.StepError, match="drop=3"):
        cache.settle(3)
    cache.settle()
    cache.abort()  # nothing is open: nothing happens
    check_held(cache, 2)


def test_reset_and_copies(cache):
    step(cache, 20)
    twin = copy.deepcopy(cache)
    step(cache, 1)
    check_held(twin, 20)
    step(twin, 3)
    check_held(twin, 23)
    check_held(cache, 21)
    cache.reset()
    assert cache.seen == 0
    step(cache, 5)
    check_held(cache, 5)


def test_nobody_has_to_begin_or_settle(cache):
    """A foreign loop only updates; steps are told apart by a layer coming round again."""
    seen = 0
    for count in STEPS:
        forward(cache, count)
        seen += count
        assert cache.get_seq_length() == seen
        length, offset = cache.get_mask_sizes(1, 1)
        assert (length, offset) == (min(seen, WINDOW - 1) + 1, seen - min(seen, WINDOW - 1))
    forward(cache, 1, LAYERS[:2])  # this forward dies half-way ...
    assert cache.get_seq_length() == seen
    forward(cache, 1)  # ... and the next one is not confused
    cache.crop(0)
    check_held(cache, seen + 1)


def test_static_tensors_never_move():
    cache = build("static")
    step(cache, 3)
    addresses = [tensor.data_ptr() for layer in LAYERS for tensor in cache.layers[layer].tensors()]
    assert len(addresses) == 2 * len(LAYERS)
    for count in STEPS:
        step(cache, count)
    cache.rows(torch.tensor([1, 0, 2]))
    cache.crop(-1)
    cache.reset()
    assert addresses == [tensor.data_ptr() for layer in LAYERS for tensor in cache.layers[layer].tensors()]


def test_static_is_full():
    recipe = caches.recipe("static")
    cache = recipe.build(SPECS, recipe.options.from_dict({"max_cache_len": 10}))
    step(cache, 8)
    with pytest.raises(caches.CapacityError, match="holds 8 of at most 10 tokens and cannot take 3 more"):
        cache.begin(3)
    check_held(cache, 8)
    step(cache, 2)


def test_dynamic_makes_room_geometrically_and_windows_stay_small():
    cache = build("dynamic")
    moves, bytes_of_all, address = 0, [], None
    for _ in range(1000):
        step(cache, 1)
        buffer = cache.layers[0].stores["keys"].buffer
        moves += buffer.data_ptr() != address
        address = buffer.data_ptr()
        bytes_of_all.append(buffer.shape[2])
    assert moves <= 8  # not 1000
    assert cache.layers[1].stores["keys"].buffer.shape[2] <= (WINDOW - 1) + 16
    assert max(bytes_of_all) <= 1.5 * 1000 + 64


def test_reserving_makes_room_once():
    cache = build("dynamic")
    cache.reserve(500)
    step(cache, 1)
    address = cache.layers[0].stores["keys"].buffer.data_ptr()
    for _ in range(499):
        step(cache, 1)
    assert cache.layers[0].stores["keys"].buffer.data_ptr() == address
    assert cache.layers[0].stores["keys"].buffer.shape[2] == 512


def test_reserving_on_a_cache_that_is_not_empty():
    cache = build("dynamic")
    step(cache, 5)
    cache.reserve(300)
    check_held(cache, 5)
    address = cache.layers[0].stores["keys"].buffer.data_ptr()
    for _ in range(295):
        step(cache, 1)
    check_held(cache, 300)
    assert cache.layers[0].stores["keys"].buffer.data_ptr() == address


@pytest.mark.parametrize("max_cache_len", [3, WINDOW - 1])
def test_a_fixed_cache_smaller_than_the_window(max_cache_len):
    recipe = caches.recipe("static")
    cache = recipe.build(SPECS[1:2], recipe.options.from_dict({"max_cache_len": max_cache_len}))
    assert cache.max_tokens == max_cache_len
    cache.begin(max_cache_len)
    cache.update(tokens(0, max_cache_len, 1), -tokens(0, max_cache_len, 1), 0)
    cache.settle()
    with pytest.raises(caches.CapacityError):
        cache.begin(1)


def test_a_fixed_cache_of_windows_only_is_never_full():
    recipe = caches.recipe("static")
    cache = recipe.build(SPECS[1:2], recipe.options.from_dict({"max_cache_len": 20}))
    assert cache.fixed
    assert cache.max_tokens is None
    for position in range(60):
        cache.begin(1)
        cache.update(tokens(position, 1, 1), tokens(position, 1, 1), 0)
        cache.settle()
    assert cache.layers[0].keys[0, 0, :, 0].tolist() == [column(p, 1, 0) for p in range(60 - WINDOW + 1, 60)]


def test_another_number_of_rows():
    cache = build("dynamic")
    step(cache, 9)
    assert cache.batch_size == ROWS
    cache.batch_repeat_interleave(2)
    check_held(cache, 9, order=[0, 0, 1, 1, 2, 2])
    cache.batch_select_indices(torch.tensor([4, 0]))
    check_held(cache, 9, order=[2, 0])
    assert cache.batch_size == 2
    fixed = build("static")
    step(fixed, 9)
    with pytest.raises(caches.StepError, match="room for 3 rows cannot hold 6"):
        fixed.batch_repeat_interleave(2)


def test_the_log_follows():
    cache = build("dynamic")
    step(cache, 9)
    cache.log = caches.Log(torch.arange(27).view(3, 9), torch.ones(3, 9))
    cache.rows(torch.tensor([2, 1, 0]))
    cache.crop(-2)
    assert cache.log.ids.tolist() == [list(range(begin, begin + 7)) for begin in (18, 9, 0)]
    assert cache.log.mask.shape == (3, 7)
    assert torch.equal(copy.deepcopy(cache).log.ids, cache.log.ids)
    forward(cache, 1)  # somebody else feeds it
    assert cache.log is None


def test_steps_of_another_number_of_rows(cache):
    step(cache, 3)
    cache.begin(1)
    with pytest.raises(caches.StepError, match="holds 3 rows, but the step has 2"):
        cache.update(torch.zeros(2, HEADS, 1, DIM), torch.zeros(2, HEADS, 1, DIM), 0)
    cache.abort()
    check_held(cache, 3)


def test_a_cache_made_in_inference_mode_goes_on_outside(cache):
    with torch.inference_mode():
        step(cache, 3)
    step(cache, 2)
    check_held(cache, 5)


def test_an_index_follows_its_layer(cache):
    """Sparse attention keeps one more stream, [rows, tokens, index_dim], written before the keys in the same step."""
    recipe = caches.recipe(cache.name)
    spec = LayerSpec("indexed_attention", frozenset({KV, INDEX}))
    indexed = recipe.build([spec], recipe.options.from_dict({"max_cache_len": 99} if recipe.has_a_size else {}))
    seen = 0
    for count in (5, 1, 1, 3):
        index = torch.arange(seen, seen + count).float().expand(ROWS, 2, count).transpose(1, 2)
        read = indexed.update_indexer(index, 0)
        indexed.update(tokens(seen, count, 0), tokens(seen, count, 0), 0)
        seen += count
        assert read[1, :, 0].tolist() == list(range(seen))
        assert indexed.get_seq_length() == seen
    indexed.crop(-2)
    indexed.rows(torch.tensor([1, 0, 2]))
    assert indexed.layers[0].stores["index"].committed().shape == (ROWS, 1, 8, 2)


def test_out_of_memory_while_making_room_changes_nothing(monkeypatch):
    cache = build("dynamic")
    step(cache, 64)
    last = cache.layers[3].stores["values"]  # the group of the first layer is enlarged before this one is reached
    monkeypatch.setattr(cache.layers[0].stores["values"], "_allocate", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        cache.begin(64)
    check_held(cache, 64)
    monkeypatch.undo()
    step(cache, 64)
    check_held(cache, 128)
    assert last.buffer is not None
