"""What Python does with results: they are compared, kept in sets, and streams are closed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from architectures import prompt, tiny_model

import engine


def test_results_and_plans_equal_only_themselves():
    generator = engine.Generator(tiny_model("llama"))
    out, other = (generator.generate(prompt(), max_new_tokens=3, output_scores=True) for _ in range(2))
    plan, again = (engine.plan(generator.model, prompt_tokens=8, max_new_tokens=4, cache="dynamic") for _ in range(2))
    for one, two in ((out, other), (plan, again), (plan["dynamic"], again["dynamic"])):
        assert one == one
        assert one != two
        assert two != replace(two)
        assert len({one, two, one}) == 2
    assert plan.to_dict()["backends"] == again.to_dict()["backends"]


@pytest.mark.parametrize("leave", ["close", "with", "with an error"])
def test_a_stream_is_closed(leave):
    generator = engine.Generator(tiny_model("llama"))
    ids = torch.tensor([[5, 6, 7]])
    pieces = generator.stream(ids, max_new_tokens=9)
    assert len(next(pieces).tokens) == 1
    if leave == "close":
        pieces.close()
    elif leave == "with":
        with pieces as entered:
            assert entered is pieces
    else:
        with pytest.raises(ZeroDivisionError), pieces:
            raise ZeroDivisionError
    assert list(pieces) == []
    out = pieces.result()
    assert out.stats.new_tokens == 1
    assert out.cache.get_seq_length() == ids.shape[1]
    pieces.close()
