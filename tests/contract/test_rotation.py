"""Rotation: codes per token hold where a few channels are far larger than the others, and nothing else changes."""

import copy

import pytest
import torch
from architectures import prompt, randomised
from outlier_twin import outlier_twin

import caches
from caches.attention.rotation import rotated, rotated_to_read

FACTOR = 16.0
SHAPE = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64,
         "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return randomised("LlamaConfig", SHAPE)


@pytest.mark.parametrize("width", [64, 80, 24, 7])
def test_it_is_its_own_inverse_and_changes_no_product(width):
    keys, queries = torch.randn(2, 3, 50, width, dtype=torch.float64), torch.randn(2, 3, 4, width, dtype=torch.float64)
    exactly = {"rtol": 0, "atol": 1e-13}
    torch.testing.assert_close(rotated(rotated(keys)), keys, **exactly)
    torch.testing.assert_close(rotated_to_read(keys), rotated(keys), **exactly)
    torch.testing.assert_close(rotated(queries) @ rotated(keys).mT, queries @ keys.mT, **exactly)
    assert torch.equal(rotated(keys[1:, :, 7:9]), rotated(keys)[1:, :, 7:9]), "a slot depends on no other"


def test_an_outlier_is_spread_over_the_largest_power_of_two():
    key = torch.zeros(80)
    key[3] = 8.0
    assert rotated(key).abs().tolist() == [2.0] * 16 + [0.0] * 64


def test_the_twin_says_the_same(model):
    model = copy.deepcopy(model).double()
    twin, ids = outlier_twin(model, FACTOR), prompt(tokens=30, pads=0)["input_ids"]
    held = {name: caches.build("dynamic", model.config) for name in ("model", "twin")}
    with torch.no_grad():
        logits = [read(ids, past_key_values=held[name]).logits for name, read in (("model", model), ("twin", twin))]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-11)
    largest = [held[name].layers[0].keys.abs().max() for name in ("model", "twin")]
    assert largest[1] > FACTOR / 4 * largest[0]


def divergence(model, ids: torch.Tensor, **options) -> float:
    """Nats from what the model says with everything in full, per token."""
    logs = []
    for name, chosen in (("dynamic", {}), ("quantized", {"residual_length": 4} | options)):
        cache = caches.build(name, model.config, **chosen)
        with torch.no_grad():
            logits = [model(part, past_key_values=cache).logits for part in ids.split(8, dim=1)]
        logs.append(torch.cat(logits, dim=1).log_softmax(-1))
    return torch.nn.functional.kl_div(logs[1], logs[0], log_target=True, reduction="sum").item() / ids.numel()


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_codes_hold_with_outliers(backend, model):
    twin, ids = outlier_twin(model, FACTOR), prompt(rows=4, tokens=64, pads=0)["input_ids"]
    plain, outliers, held = (
        divergence(of, ids, backend=backend, rotate=rotate)
        for of, rotate in ((model, False), (twin, False), (twin, True))
    )
    assert outliers > 3 * plain
    assert held < 0.6 * outliers
    assert divergence(twin, ids, backend=backend) == held, "the default rotates"
