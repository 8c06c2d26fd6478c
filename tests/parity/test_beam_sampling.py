"""Beam sampling at its edges, with equal seeds beside transformers."""

import pytest
import torch
from architectures import prompt, tiny_model

import engine

PAD = 3


def both(**options):
    """The engine's result, and that of transformers."""
    model, inputs = tiny_model("llama"), prompt()
    options = {"do_sample": True, "pad_token_id": PAD} | options
    torch.manual_seed(5)
    out = engine.generate(model, inputs, **options)
    torch.manual_seed(5)
    return out, model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)


@pytest.mark.parametrize("eos", [[7, 7], [7, 29, 7, 29], [5, 5, 5]])
def test_end_ids_given_twice_count_twice_when_candidates_are_drawn(eos):
    out, expected = both(num_beams=3, num_return_sequences=3, eos_token_id=eos, max_new_tokens=8)
    once, _ = both(num_beams=3, num_return_sequences=3, eos_token_id=eos[:1], max_new_tokens=8)
    assert torch.equal(out.sequences, expected.sequences)
    assert not torch.equal(out.sequences, once.sequences)


@pytest.mark.parametrize("top_k", [1, 2])
def test_fewer_candidates_than_texts(top_k):
    """As in transformers: what was not found is empty. It has no reason to have ended, and a score of nothing."""
    out, expected = both(num_beams=5, num_return_sequences=5, top_k=top_k, max_new_tokens=1)
    theirs = expected.sequences.masked_fill(expected.sequences == -1, PAD)  # without an end id it fills up with -1
    assert torch.equal(out.sequences, theirs)
    assert torch.equal(out.beam_indices, expected.beam_indices.long())
    torch.testing.assert_close(out.sequences_scores, expected.sequences_scores)
    empty = [not tokens for tokens in out.tokens]
    assert any(empty)
    assert [reason is None for reason in out.finish_reasons] == empty
    assert not any(score > -1e8 for score, is_empty in zip(out.sequences_scores, empty, strict=True) if is_empty)


def test_fewer_candidates_than_texts_behind_embeddings_and_in_a_stream():
    model, ids = tiny_model("llama"), prompt(pads=0)["input_ids"]
    embeds = model.get_input_embeddings()(ids)
    options = {"do_sample": True, "top_k": 1, "num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 1}
    stream = engine.stream(model, inputs_embeds=embeds, **options)
    pieces = list(stream)
    out = stream.result()
    assert [piece.row for piece in pieces] == [row for row, tokens in enumerate(out.tokens) if tokens]
    assert set(out.finish_reasons) == {"length", None}
