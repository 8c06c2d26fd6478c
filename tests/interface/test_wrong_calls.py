"""What a call may say: random calls with one thing wrong are refused in words of ours, before the model is run."""

from itertools import product

import pytest
from wrong_calls import BACKENDS, CONTEXTS, LIVE, MODELS, check, fault_of, right_call

FEW = ("llama", "mamba", "bart")


def test_wrong_calls_are_refused_before_any_work():
    found = check(200)
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_many_wrong_calls():
    found = check(1000, seed=1)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "model", [*FEW, *(pytest.param(model, marks=pytest.mark.slow) for model in sorted({*MODELS} - {*FEW}))]
)
def test_with_nothing_wrong_they_are_accepted(model):
    for context, cache in product(CONTEXTS, (None, LIVE, *BACKENDS)):
        if cache == LIVE and "penalty_alpha" in context:
            continue
        call = right_call(model, "generate", context, cache)
        assert fault_of(call) == "it was accepted", call.script
