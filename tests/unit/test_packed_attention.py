"""Attention with packed query heads: the same numbers up to rounding, in the engine's steps alone."""

import copy
import gc
import threading

import pytest
import torch
from architectures import prompt, tiny_model
from helpers import needs_kernels
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import engine
from caches.attention import dispatch, kernels
from engine.compiling import layer_attention
from engine.kernels import attention_hook

HEADS, GROUPS, WIDTH, COLUMNS = 6, 3, 16, 40


@pytest.fixture
def queries(monkeypatch):
    """The shapes of the queries that torch's kernel gets."""
    found = []

    def noting(query, *args, **kwargs):
        found.append(tuple(query.shape))
        return scaled_dot_product_attention(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    monkeypatch.setattr(dispatch, "scaled_dot_product_attention", noting)
    return found


@pytest.fixture
def installed():
    attention_hook.install(user := torch.nn.Module())
    yield
    del user


@pytest.fixture
def in_a_step(installed, monkeypatch):
    monkeypatch.setattr(attention_hook.active, "dtypes", dispatch.FULL_PRECISION)


def attention(mask=None, tokens=1, heads=HEADS, of_module=None, **options):
    """The result, and what transformers' own function computes. of_module: attributes of the layer."""
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = heads // (HEADS // GROUPS)
    vars(module).update(of_module or {})
    query = torch.randn(2, heads, tokens, WIDTH)
    key, value = (torch.randn(2, HEADS // GROUPS, COLUMNS, WIDTH) for _ in range(2))
    ours = ALL_ATTENTION_FUNCTIONS["sdpa"]
    arguments = (module, query, key, value, mask)
    return ours(*arguments, **options)[0], ours._original(*arguments, **options)[0]


@pytest.mark.parametrize("heads", [HEADS, HEADS // GROUPS])
@pytest.mark.parametrize("scaling", [None, 0.5])
@pytest.mark.parametrize("dtype", [None, torch.bool, torch.float32])
def test_equal_to_rounding(in_a_step, queries, dtype, scaling, heads):
    mask = None
    if dtype is not None:
        mask = torch.rand(2, 1, 1, COLUMNS) < 0.7
        mask = mask if dtype is torch.bool else torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(dtype).min)
    found, expected = attention(mask, heads=heads, scaling=scaling)
    torch.testing.assert_close(found, expected)
    assert queries[0] == (2, HEADS // GROUPS, heads // (HEADS // GROUPS), WIDTH)


@needs_kernels
def test_the_kernel_reads_much(in_a_step, queries, monkeypatch):
    found = []
    for much in (2 * (HEADS // GROUPS) * COLUMNS * WIDTH + 1, 2 * (HEADS // GROUPS) * COLUMNS * WIDTH):
        monkeypatch.setattr(dispatch, "_MUCH", much)
        found.append(attention())
    torch.testing.assert_close(found[0][0], found[1][0])
    assert len(queries) == 3, "of which two are transformers' own"


PROMPTS = {
    "as models call it": {}, "scale": {"scaling": 0.5}, "the layer": {"of_module": {"is_causal": True}},
    "the call wins": {"is_causal": True, "of_module": {"is_causal": False}}, "as many as slots": {"tokens": COLUMNS},
    "mask": {"mask": torch.rand(2, 1, 9, COLUMNS) < 0.7},
    "mask of all rows": {"mask": torch.rand(1, 1, 9, COLUMNS) < 0.7},
    "a mask wins": {"mask": torch.rand(2, 1, 9, COLUMNS) < 0.7, "is_causal": False},
    "no dropout": {"dropout": 0.0, "output_attentions": False},
}  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("name", PROMPTS)
def test_several_tokens_have_a_kernel(in_a_step, queries, monkeypatch, name):
    monkeypatch.setattr(dispatch, "_MUCH", 0)
    monkeypatch.setattr(kernels, "_IS_FASTER", True)
    found, expected = attention(**{"tokens": 9} | PROMPTS[name])
    torch.testing.assert_close(found, expected)
    assert len(queries) == 1, "of transformers' own"


@needs_kernels
@pytest.mark.parametrize("options", [
    {"position_bias": torch.randn(2, HEADS, 9, COLUMNS)}, {"output_attentions": True},
    {"mask": torch.ones(2, HEADS, 9, COLUMNS, dtype=torch.bool)}, {"mask": torch.zeros(2, 1, 9, COLUMNS)},
    {"mask": torch.ones(9, COLUMNS, dtype=torch.bool)}, {"mask": torch.ones(2, 1, 1, COLUMNS, dtype=torch.bool)},
    {"is_causal": False}, {"of_module": {"is_causal": False}}, {"is_causal": False, "of_module": {"is_causal": True}},
])  # fmt: skip
def test_other_attention_of_several_tokens_is_transformers_own(in_a_step, queries, monkeypatch, options):
    monkeypatch.setattr(dispatch, "_MUCH", 0)
    monkeypatch.setattr(kernels, "_IS_FASTER", True)
    found, expected = attention(tokens=9, **options)
    assert torch.equal(found, expected)
    assert len(queries) == 2


@needs_kernels
def test_dropout_is_transformers_own(in_a_step, queries, monkeypatch):
    monkeypatch.setattr(dispatch, "_MUCH", 0)
    attention(tokens=9, dropout=0.5)
    assert len(queries) == 2


def test_a_mask_that_does_not_fit_is_torchs_to_refuse(in_a_step, monkeypatch):
    monkeypatch.setattr(dispatch, "_MUCH", 0)
    with pytest.raises(RuntimeError, match=r"must match|expanded size"):
        attention(torch.ones(2, 1, 1, COLUMNS + 1, dtype=torch.bool))


@pytest.mark.parametrize("options", [
    {"tokens": 2}, {"mask": torch.ones(2, HEADS, 1, COLUMNS, dtype=torch.bool)},
    {"position_bias": torch.randn(2, HEADS, 1, COLUMNS)},
])  # fmt: skip
def test_other_attention_is_transformers_own(in_a_step, queries, options):
    found, expected = attention(**options)
    assert torch.equal(found, expected)
    assert queries[0] == queries[1]


def test_outside_of_a_step_transformers_computes(installed, queries):
    found, expected = attention()
    assert torch.equal(found, expected)
    assert queries[0] == queries[1]


def test_decode_steps_are_packed_and_the_model_is_as_it_was(queries):
    model = tiny_model("llama")
    config = model.config
    packed = (1, config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads)
    ids = prompt(1, 5, pads=0)["input_ids"]
    engine.generate(model, ids, max_new_tokens=4)
    assert [shape[:3] for shape in queries].count(packed) == 3 * config.num_hidden_layers
    queries.clear()
    model(ids[:, :1])
    assert packed not in [shape[:3] for shape in queries]


def test_transformers_has_its_own_function_again_when_the_last_generator_is_collected():
    gc.collect()  # those of other tests
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    model = tiny_model("llama")
    generators = [engine.Generator(model) for _ in range(2)]
    streams = [generators[0].stream(prompt(), max_new_tokens=3)]
    next(streams[0])
    for users in (generators, generators, streams):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward
        users.pop()
        gc.collect()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_a_function_that_is_registered_by_the_name_is_called(monkeypatch):
    def half(*arguments, **options):
        found, weights = sdpa_attention_forward(*arguments, **options)
        return found / 2, weights

    model = copy.deepcopy(tiny_model("llama"))
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        AttentionInterface.register("sdpa", half)
        expected = model.generate(**prompt(), max_new_tokens=9, do_sample=False)
        assert torch.equal(engine.generate(model, prompt(), max_new_tokens=9).sequences, expected)
    finally:
        AttentionInterface.register("sdpa", before)
    assert not torch.equal(engine.generate(model, prompt(), max_new_tokens=9).sequences, expected)


def test_models_find_attention_as_before_once_no_layer_is_watched():
    before, seen = dict(vars(ALL_ATTENTION_FUNCTIONS)), []
    watches = [layer_attention._attention_by(lambda function, *_, n=n: (seen.append(n), n)) for n in range(2)]
    watches[0].__enter__()
    other = threading.Thread(target=lambda: watches[1].__enter__())
    other.start()
    other.join()
    ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)(None)
    watches[0].__exit__(None, None, None)
    assert seen == [0]
    assert ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None) is ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert vars(ALL_ATTENTION_FUNCTIONS) != before  # the other thread's is open
    watches[1].__exit__(None, None, None)
    assert vars(ALL_ATTENTION_FUNCTIONS) == before
