"""The kernel for many rows gives what torch gives for each row's keys and values alone."""

import pytest
import torch
from architectures import prompt, tiny_model
from forks import PROMPTS, ROWS, SIBLINGS, Loop
from helpers import assert_rounded_once, needs_kernels, threads_of_torch, wide
from torch.nn.functional import scaled_dot_product_attention

import caches
import engine
from caches.attention import dispatch, kernels
from caches.attention.kernels import attention, close_layers, open_layers
from caches.attention.kv_view import KeyValueView, plain, rows_of
from caches.attention.segments import CacheRows, OpenRows
from caches.platform.native import DTYPES


def no_copy():
    pytest.fail("the keys or values were copied into one tensor")


def view(prefixes, own, rows_per_prefix):
    """Keys or values of rows that share `prefixes`, with what is their `own` behind."""
    tensors = (*prefixes, *own)
    prompts, heads, _, width = prefixes[0].shape
    shape = (prompts * rows_per_prefix, heads, sum(one.shape[2] for one in tensors), width)
    rows = CacheRows(shape, tensors, None, rows_per_prefix, on_materialize=no_copy)
    return KeyValueView([rows], prefixes[0])


def one_token_attention(query, keys, values, *options):
    """The kernel's, of the keys and values of each cache."""
    return attention(query, [rows_of(one) for one in keys], [rows_of(one) for one in values], *options)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, "seen", "added", "unseen prefix"])
@pytest.mark.parametrize("threads", [1, 3, 64])  # with many threads a prefix is read in several parts
@pytest.mark.parametrize(("prompts", "siblings", "heads", "repeats", "widths", "common", "own", "tokens"), [
    (1, 40, 4, 3, (64, 64), (1000,), (12,), 1), (1, 16, 4, 3, (64, 64), (100,), (1,), 1),
    (3, 5, 2, 7, (80, 16), (61,), (5,), 1), (1, 3, 1, 71, (64, 64), (130,), (50,), 1),
    (2, 2, 3, 1, (8, 24), (1,), (300,), 1), (1, 33, 1, 1, (16, 8), (1500, 7), (3, 100), 1),
    (2, 4, 2, 2, (32, 32), (200,), (), 1), (2, 3, 2, 2, (16, 16), (100,), (4,), 5),
])  # fmt: skip
def test_it_is_attention(prompts, siblings, heads, repeats, widths, common, own, tokens, threads, mask, dtype):
    torch.manual_seed(0)
    rows, slots = prompts * siblings, sum(common) + sum(own)
    keys, values = (
        view([wide(prompts, heads, some, width).to(dtype) for some in common],
             [wide(rows, heads, some, width).to(dtype) for some in own], siblings)
        for width in widths
    )  # fmt: skip
    queries = (3 * torch.randn(rows, heads * repeats, tokens, widths[0])).to(dtype)
    added = None
    if mask is not None:
        added = torch.where(torch.rand(rows, 1, tokens, slots) < 0.3, -torch.inf, 0.0)
        added[..., -1] = 0.0
    if mask == "added":
        added = added + torch.randn(rows, heads * repeats, tokens, slots)
    added = None if added is None else added.to(dtype)
    if mask == "unseen prefix":
        added[..., : sum(common)] = -torch.inf
        added[..., -1] = 0.0
    given = added == 0 if mask == "seen" else added
    with threads_of_torch(threads):
        found = scaled_dot_product_attention(queries, keys, values, attn_mask=given, enable_gqa=True)
    whole = (one.materialize().double() for one in (keys, values))
    double = None if added is None else added.double()
    expected = scaled_dot_product_attention(queries.double(), *whole, attn_mask=double, enable_gqa=True)
    assert_rounded_once(found, expected)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, "seen", "added"])
@pytest.mark.parametrize("threads", [1, 3, 64])
def test_rows_of_several_caches(threads, mask, dtype):
    """Alone, two to a cache, and rows that share a prefix; with one slot, and with many."""
    torch.manual_seed(0)
    heads, repeats, width = 2, 3, 16
    shapes = [(1, 1), (1, 300), (2, 40)]

    def parts():
        others = [wide(rows, heads, slots, width).to(dtype) for rows, slots in shapes]
        four = view([wide(1, heads, 500, width).to(dtype)], [wide(4, heads, 7, width).to(dtype)], 4)
        six = view([wide(2, heads, 130, width).to(dtype)], [wide(6, heads, 3, width).to(dtype)], 3)
        return [four, *others, six]

    all_keys, all_values = parts(), parts()
    rows, slots = sum(one.shape[0] for one in all_keys), max(one.shape[2] for one in all_keys)
    queries = (3 * torch.randn(rows, heads * repeats, 1, width)).to(dtype)
    is_seen = torch.ones(rows, 1, 1, slots).bool()
    if mask is not None:
        is_seen = torch.rand(rows, 1, 1, slots) < 0.7
        is_seen[..., -1] = True
    added = torch.zeros(is_seen.shape).masked_fill(~is_seen, -torch.inf)
    given = {None: None, "seen": is_seen, "added": added}[mask]
    with threads_of_torch(threads):
        found = one_token_attention(queries, all_keys, all_values, given, 0.2)
    first = 0
    for of_keys, of_values in zip(all_keys, all_values, strict=True):
        own = slice(first, first + of_keys.shape[0])
        expected = scaled_dot_product_attention(
            queries[own].double(), plain(of_keys).double(), plain(of_values).double(), scale=0.2, enable_gqa=True,
            attn_mask=is_seen[own, ..., slots - of_keys.shape[2] :],
        )  # fmt: skip
        assert_rounded_once(found[own], expected)
        first = own.stop
    assert first == rows


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, "seen", "added"])
@pytest.mark.parametrize("threads", [1, 5])  # with many threads the slots of a row are read in several parts
@pytest.mark.parametrize(("rows", "heads", "repeats", "width"), [
    (1, 1, 8, 64), (1, 4, 3, 128), (2, 3, 1, 24), (3, 2, 5, 72), (1, 2, 2, 8),
])  # fmt: skip
@pytest.mark.parametrize("slots", [1, 5, 102, 1501])
def test_rows_of_their_own(rows, heads, repeats, width, slots, threads, mask, dtype):
    torch.manual_seed(0)
    keys, values = (wide(rows, heads, slots, width).to(dtype) for _ in range(2))
    query = (3 * torch.randn(rows, heads * repeats, 1, width)).to(dtype)
    is_seen = torch.rand(rows, 1, 1, slots) < 0.7
    is_seen[0, ..., : slots // 2] = False  # padding
    is_seen[..., -1] = True
    added = torch.zeros(is_seen.shape).masked_fill(~is_seen, torch.finfo(torch.float32).min)
    given = {None: None, "seen": is_seen, "added": added}[mask]
    with threads_of_torch(threads):
        found = one_token_attention(query, [keys], [values], given, None)
    double = given.double() if mask == "added" else given
    expected = scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), attn_mask=double, enable_gqa=True
    )
    assert_rounded_once(found, expected)


@needs_kernels
@pytest.mark.parametrize("cache", ["dynamic", "static", "sliding_window"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_the_text_after_much_is_that_of_torchs_attention(name, cache, taken, monkeypatch):
    model = tiny_model(name)
    if cache == "sliding_window" and name != "mistral":
        pytest.skip("it has no window")
    made = lambda: engine.generate(model, prompt(), cache=cache, max_new_tokens=12).sequences  # noqa: E731
    expected = made()
    assert not taken
    monkeypatch.setattr(dispatch, "_MUCH", 0)
    assert made().equal(expected)
    assert len(taken) == 11 * model.config.num_hidden_layers


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, "seen", "added"])
@pytest.mark.parametrize(("heads", "repeats", "width"), [(4, 3, 64), (2, 1, 24)])
@pytest.mark.parametrize(("parts", "prompts"), [
    ([(1, 5)], 0), ([(3, 102)], 0), ([(2, 1)], 0), ([(6, 5)], 2), ([(2, 5), (1, 102), (3, 1)], 0),
    ([(2, 4), (4, 9)], 1),
])  # fmt: skip
def test_a_token_is_appended_first(parts, prompts, heads, repeats, width, mask, dtype):
    """parts: the rows and own slots of each cache. prompts: how many each shares, of 30 slots."""
    torch.manual_seed(0)
    rows, buffers, slots, full = sum(rows for rows, _ in parts), [], [], []
    query = torch.randn(rows, 1, heads * repeats, width).to(dtype).transpose(1, 2)
    new = [torch.randn(rows, 1, heads, width).to(dtype).transpose(1, 2) for _ in range(2)]
    first = 0
    for own, count in parts:
        shared, owned = [], []
        for one in new:
            if prompts:
                shared.append(torch.randn(prompts, heads, 30, width).to(dtype))
            buffer = wide(own + 1, heads, count + 7, width).to(dtype)
            after = buffer.clone()
            after[:own, :, 2 + count] = one[first : first + own, :, 0]
            owned.append(buffer[:own])
            buffers.append((buffer, after))
            both = [shared[-1].repeat_interleave(own // prompts, 0)] if prompts else []
            full.append(torch.cat([*both, after[:own, :, 3 : 3 + count]], 2).double())
        segments = [(*shared, 0, 30)] if prompts else []
        slots.append(OpenRows([*segments, (*owned, 3, 3 + count)]))
        first += own
    is_seen = torch.rand(1 if mask == "added" else rows, 1, 1, max(rows.slots for rows in slots)) < 0.7
    is_seen[..., -1] = True
    added = torch.zeros(is_seen.shape).masked_fill(~is_seen, torch.finfo(torch.float32).min)
    given = {None: None, "seen": is_seen, "added": added}[mask]
    other = [
        OpenRows([(keys.clone(), values.clone(), *span) for keys, values, *span in rows.segments]) for rows in slots
    ]
    attend = kernels.KERNELS.or_error().layer_attention
    assert open_layers([other, slots], given, [None, 0.3])
    attend(query, *new)
    assert not any(torch.equal(buffer, after) for buffer, after in buffers)
    found = attend(query, *new)
    assert all(torch.equal(buffer, after) for buffer, after in buffers)
    for one, another in zip(other, slots, strict=True):
        for (*tensors, begin, end), (*expected, _, _) in zip(one.segments, another.segments, strict=True):
            for tensor, same in zip(tensors, expected, strict=True):
                assert torch.equal(tensor[:, :, begin:end], same[:, :, begin:end])
    with pytest.raises(RuntimeError, match="all of 2 open layers are computed already"):
        attend(query, *new)
    close_layers()
    first = 0
    for (own, _), keys, values in zip(parts, full[::2], full[1::2], strict=True):
        seen = None if mask is None else is_seen.expand(rows, -1, -1, -1)[first : first + own, ..., -keys.shape[2] :]
        expected = scaled_dot_product_attention(
            query[first : first + own].double(), keys, values, attn_mask=seen, enable_gqa=True, scale=0.3
        )
        assert_rounded_once(found[first : first + own], expected.transpose(1, 2))
        first += own
    assert first == len(found)


def slots_of(*rows, slots=5):
    return [torch.ones(one, 2, slots, 8) for one in rows]


@needs_kernels
@pytest.mark.parametrize(("changes", "why"), [
    ({"key": torch.zeros(1, 2, 1, 8)}, "of 1 rows, 2 heads of size 8 in caches of 3 rows, 2 heads of size 8"),
    ({"key": torch.zeros(3, 2, 2, 8)}, "new keys or values"), ({"key": torch.zeros(5, 2, 1, 8)}, "of 5 rows"),
    ({"value": torch.zeros(3, 2, 1, 16)}, "of size 16 in"), ({"value": torch.zeros(3, 1, 1, 8)}, "1 heads of size 8"),
    ({"value": torch.zeros(3, 2, 1, 8).half()}, "another data type"),
    ({"query": torch.zeros(4, 4, 1, 8)}, "queries of 4"),
    ({"query": torch.zeros(3, 4, 1, 8).half()}, "other data types"), ({"values": []}, "segments"),
    ({"parts": [2, 1, 1]}, "segments"), ({"parts": [3, 0]}, "segments"), ({"parts": [2, 1, 2, 1]}, "for caches of 4"),
    ({"values": slots_of(2)}, "of 1 layers"),
    ({"mask": torch.zeros(3, 1, 1, 5).double()}, "data type"),
    ({"keys": slots_of(2, 1, slots=0), "values": slots_of(2, 1, slots=0)}, "of 2 rows without a slot"),
    ({"keys": slots_of(3, 1), "values": slots_of(3, 1), "parts": [3, 2]}, "fit its cache of 3"),
    ({"keys": slots_of(1, 3)[::-1], "values": slots_of(1, 3)[::-1], "parts": [3, 2]}, "fit its cache of 3"),
])  # fmt: skip
def test_what_does_not_fit_is_not_appended(changes, why):
    given = {"query": torch.zeros(3, 4, 1, 8), "key": torch.zeros(3, 2, 1, 8), "value": torch.zeros(3, 2, 1, 8),
             "keys": slots_of(2, 1), "values": slots_of(2, 1), "parts": [2, 1, 1, 1], "mask": None,
             "scale": 1.0}  # fmt: skip
    operators = kernels.KERNELS.or_error()

    def append(query, key, value, keys, values, parts, mask, scale):
        spans = [place for one in keys for place in (0, one.shape[2])]
        operators.open_layers(keys, values, spans, parts, mask, [scale])
        operators.layer_attention(query, key, value)

    append(**given)
    assert not given["keys"][0][:, :, 4].any()
    given |= {"keys": slots_of(2, 1), "values": slots_of(2, 1)} | changes
    with pytest.raises(RuntimeError, match=why):
        append(**given)
    close_layers()
    assert all(one.all() for one in (*given["keys"], *given["values"]))


@needs_kernels
def test_what_no_token_is_appended_to():
    slots = torch.zeros(2, 2, 5, 8)
    rows_of = lambda one: OpenRows([(one, one, 0, one.shape[2])])  # noqa: E731
    opened = lambda one, mask=None: open_layers([[rows_of(one)]], mask, [None])  # noqa: E731
    for keys, mask in (
        (slots.double(), None), (torch.zeros(2, 2, 5, 12), None), (slots, torch.ones(2, 1, 1, 6)),
        (slots, torch.ones(2, 2, 1, 5)), (slots, torch.ones(2, 5)), (slots, torch.ones(2, 1, 2, 5)),
        (torch.zeros(2, 2, 8, 5).mT, None), (slots.to("meta"), None),
    ):  # fmt: skip
        assert not opened(keys, mask)
    slots.requires_grad_()
    assert not opened(slots)
    with torch.no_grad():
        assert opened(slots)
    with torch.autocast("cpu"), torch.no_grad():
        assert not opened(slots)
    other = [OpenRows([(slots[:1], slots[:1], 0, 5), (slots, slots, 0, 5)])]
    with torch.no_grad():
        assert not open_layers([[rows_of(slots)] * 2, other], None, [None] * 2)
    close_layers()


@needs_kernels
def test_prompts_of_a_batch_are_computed_at_once(taken):
    generator = engine.Generator(tiny_model("llama"))
    ids = [torch.randint(3, 95, (1, length), generator=torch.Generator().manual_seed(0)) for length in (3, 9, 30)]
    requests = [request.result() for request in generator.generate_many(ids, max_new_tokens=6)]
    assert {len(parts) for _, parts in taken} >= {6}  # the rows and segments of three caches
    alone = [generator.generate(one, max_new_tokens=6).sequences.tolist() for one in ids]
    assert sorted(alone) == sorted(request.sequences.tolist() for request in requests)


@needs_kernels
def test_a_row_that_sees_nothing():
    keys, mask = torch.randn(2, 2, 500, 8), torch.zeros(2, 1, 1, 500, dtype=torch.bool)
    mask[1] = True
    for threads in (1, 5):
        with threads_of_torch(threads):
            found = one_token_attention(torch.randn(2, 4, 1, 8), [keys], [keys], mask, None)
        assert not found[0].any()
        assert found[1].all()


@needs_kernels
def test_keys_in_one_tensor_and_values_in_segments():
    values = view([torch.randn(1, 2, 9, 8)], [torch.randn(3, 2, 4, 8)], 3)
    assert one_token_attention(torch.randn(3, 4, 1, 8), [torch.randn(3, 2, 13, 8)], [values], None, None) is None


@needs_kernels
@pytest.mark.parametrize("part", [torch.zeros(1, 2, 3, 16).double(), torch.zeros(1, 2, 3, 12)])
def test_caches_that_it_cannot_read(part):
    other = torch.zeros(1, 2, 3, part.shape[-1])
    assert one_token_attention(torch.zeros(2, 2, 1, part.shape[-1]), [other, part], [other, part], None, None) is None


@pytest.fixture
def taken(monkeypatch):
    """What the kernel was called with."""
    operators, calls = kernels.KERNELS.or_none(), []

    class Counting:
        def dense_attention(self, queries, keys, values, parts, *others):
            calls.append([[len(one) for one in keys], parts])
            return operators.dense_attention(queries, keys, values, parts, *others)

        def __getattr__(self, name):
            return getattr(operators, name)

    monkeypatch.setattr(kernels.KERNELS, "or_error", Counting)
    return calls


OPTIONS = {
    "beams": {"num_beams": 4},
    "samples": {"do_sample": True, "num_return_sequences": 3, "seed": 1},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
}


@needs_kernels
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("strategy", OPTIONS)
def test_the_text_is_that_of_torchs_attention(strategy, name, cache, taken, monkeypatch):
    model = tiny_model(name)
    made = lambda: engine.generate(model, prompt(), cache=cache, max_new_tokens=12, **OPTIONS[strategy])  # noqa: E731
    found = made()
    used = len(taken)
    monkeypatch.setattr(kernels, "attention", lambda *arguments: None)
    assert made().sequences.equal(found.sequences)
    assert 0 < used == len(taken)


@needs_kernels
def test_rows_of_a_branch_share_what_it_shares(taken, monkeypatch):
    """The cache that it was branched from. What it has read since is a part of each row."""

    def logits():
        loop = Loop(tiny_model("llama"))
        first = caches.branch(loop.cache)  # which takes the free slots
        loop.cache = caches.branch(loop.cache)
        loop.step(2)
        loop.fork(SIBLINGS)
        assert first.total_tokens < loop.cache.total_tokens
        return loop.beams()

    found = logits()
    assert taken
    assert all(call == [[PROMPTS, ROWS], [ROWS, 2]] for call in taken)
    monkeypatch.setattr(kernels, "attention", lambda *arguments: None)
    torch.testing.assert_close(found, logits(), atol=1e-4, rtol=1e-4)


@needs_kernels
@pytest.mark.parametrize("strategy", ["beams", "samples"])
def test_rows_in_a_batch_share_their_prompt_until_the_end(strategy, taken):
    generator = engine.Generator(tiny_model("llama"))
    ids = [torch.randint(3, 95, (1, length), generator=torch.Generator().manual_seed(0)) for length in (9, 30)]
    for request in generator.generate_many(ids, max_new_tokens=8, **OPTIONS[strategy]):
        request.result()
    together = [sizes for sizes, parts in taken if len(parts) == 4 and 2 in parts[1::2]]
    assert len(together) == 7 * generator.model.config.num_hidden_layers
    assert all(sizes[0] == 1 < sizes[-1] for sizes in together)


@needs_kernels
def test_derivatives_are_those_of_torch(taken):
    keys, values = (view([torch.randn(1, 2, 9, 8)], [torch.randn(3, 2, 4, 8)], 3) for _ in range(2))
    queries = torch.randn(3, 4, 1, 8, requires_grad=True)
    scaled_dot_product_attention(queries, keys, values, enable_gqa=True).square().sum().backward()
    found, queries.grad = queries.grad, None
    whole = (one.materialize() for one in (keys, values))
    scaled_dot_product_attention(queries, *whole, enable_gqa=True).square().sum().backward()
    torch.testing.assert_close(found, queries.grad)
    mask = torch.zeros(3, 1, 1, 13, requires_grad=True)
    scaled_dot_product_attention(queries.detach(), keys, values, attn_mask=mask, enable_gqa=True).sum().backward()
    assert mask.grad.any()
    assert not taken


@needs_kernels
def test_autocast_computes_in_its_own_type(taken):
    keys, values = (view([torch.randn(1, 2, 9, 8)], [torch.randn(3, 2, 4, 8)], 3) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        scaled_dot_product_attention(torch.randn(3, 4, 1, 8), keys, values, enable_gqa=True)
    assert not taken


@pytest.mark.parametrize("keys", [
    torch.zeros(1, 2, 3, 8).double(), torch.zeros(1, 2, 3, 8).bfloat16(), torch.zeros(1, 2, 3, 12),
    torch.zeros(1, 2, 8, 3).mT,
])  # fmt: skip
def test_what_it_cannot_read(keys):
    query, others = torch.zeros(1, 2, 1, keys.shape[3]), torch.zeros(keys.shape)
    assert one_token_attention(query, [keys], [keys], None, None) is None
    assert one_token_attention(query, [others], [keys], None, None) is None


@needs_kernels
@pytest.mark.parametrize(("keys", "parts", "mask", "why"), [
    ([(2, 2, 5, 8), (4, 2, 1, 8)], [3, 2], None, "fit its cache of 3 rows"),
    ([(4, 2, 5, 8)], [4, 1], (4, 2, 3, 4), "a mask of 4"), ([(4, 2, 5, 8)], [4, 1], (2, 2, 3, 5), "a mask that"),
    ([(4, 2, 5, 16)], [4, 1], None, "keys"), ([(4, 2, 5, 8), (4, 1, 5, 8)], [4, 2], None, "keys"),
    ([(4, 4, 5, 8)], [4, 1], None, "6 queries of a row for 4 heads"), ([(3, 2, 5, 8)], [3, 1], None, "queries of 4"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(keys, parts, mask, why):
    given = [torch.zeros(shape) for shape in keys]
    of_queries = None if mask is None else torch.zeros(mask)
    with pytest.raises(RuntimeError, match=why):
        kernels.KERNELS.or_error().dense_attention(torch.zeros(4, 2, 3, 8), given, given, parts, of_queries, 1.0)


def test_without_kernels_torch_computes(request):
    model = tiny_model("llama")
    assert kernels.KERNELS.or_none() is not None
    expected = engine.generate(model, prompt(), num_beams=3, max_new_tokens=8)
    request.getfixturevalue("no_kernels")
    assert kernels.KERNELS.or_none() is None
    assert engine.generate(model, prompt(), num_beams=3, max_new_tokens=8).sequences.equal(expected.sequences)
