"""The twin of a model whose weights lie on a grid: other weights, the same outputs."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from places import ROOT
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def twin_of(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from lossy.twin import twin_of

    yield twin_of
    for name in [name for name in sys.modules if name.split(".")[0] == "lossy"]:
        del sys.modules[name]


@pytest.fixture
def model():
    """Several query heads share a key-value head, and all linear layers have biases."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(weight)
    return model


@torch.no_grad()
def test_a_twin_has_the_same_outputs(twin_of, model):
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    before = copy.deepcopy(model.state_dict())
    twin = twin_of(model)
    torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_no_linear_layer_of_a_twin_is_that_of_the_model(twin_of, model):
    weights = dict(model.named_parameters())
    for name, weight in twin_of(model).named_parameters():
        if "_proj.weight" in name:
            ratio = weight / weights[name]
            assert ratio.unique().numel() > 16, name
            assert 0.25 <= ratio.min() < 0.9 < 1.1 < ratio.max() <= 4, name
        elif "embed" in name or name.startswith("model.norm"):
            assert torch.equal(weight, weights[name])
