"""Rows of the nested outputs of a model."""

import torch
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from engine.rows import index_rows, join_rows


def test_rows_of_outputs_are_indexed():
    states, kept = torch.arange(6).reshape(3, 2), (torch.arange(3),)
    output = BaseModelOutput(last_hidden_state=states, hidden_states=kept)
    other = index_rows(output, torch.tensor([2, 0]), 3)
    assert isinstance(other, BaseModelOutput)
    assert other.last_hidden_state.tolist() == [[4, 5], [0, 1]]
    assert other.hidden_states is kept
    assert index_rows(states, slice(1, 2), 3).tolist() == [[2, 3]]
    assert index_rows(states, torch.tensor([0]), 2) is states  # of other rows
    assert index_rows("text", torch.tensor([0]), 3) == "text"


def test_outputs_of_rows_are_joined():
    def part(row):
        tensor = torch.full((1, 2), row)
        attentions = ((tensor, None),)
        return CausalLMOutputWithPast(torch.tensor(1.0), tensor, past_key_values=row, attentions=attentions)

    first = part(0)
    assert join_rows([first]) is first
    whole = join_rows([first, part(1), part(2)])
    assert isinstance(whole, CausalLMOutputWithPast)
    assert whole.logits[:, 0].tolist() == [0, 1, 2]
    assert whole.attentions[0][0][:, 1].tolist() == [0, 1, 2]
    assert whole.attentions[0][1] is None
    assert whole.loss.item() == 1
    assert whole.past_key_values is None
