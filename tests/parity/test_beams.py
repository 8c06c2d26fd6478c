"""Beam search equals transformers', and diverse beam search its slow reference.

On every backend: tests/contract/test_strategies.py, and the random calls.
"""

import dataclasses
import time
from functools import wraps
from itertools import product

import pytest
import torch
from architectures import prompt, tiny_model
from covering import pairwise
from references import CLOSE, conversation, diverse, exact, named, readers, tiny
from transformers import GenerationMixin, StoppingCriteria, StoppingCriteriaList

import caches
import engine
import strategies

pytestmark = pytest.mark.covering("values", "pairs")

NEW = 12
PAD = 3  # where it is 0, transformers fills up with the first eos id
MODELS = ["llama", "gpt2", "mistral", "gemma2", "t5", "bart", "whisper"]
EOS = {"no": None, "one": [29], "many": list(range(5, 101, 6))}
OPTIONS = {
    "num_beams": [2, 4, 8],
    "length_penalty": [-1.0, 0.0, 1.0, 2.0],
    "early_stopping": [True, False, "never"],
    "returned": ["one", "all"],
    "eos": list(EOS),
    "pads": [0, 4],
}
CASES = pairwise(**OPTIONS)
MIXED = dict(num_beams=4, num_return_sequences=2, eos_token_id=EOS["many"], pad_token_id=PAD, length_penalty=1.5)


def theirs(model, inputs, **options):
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    given = {"return_dict_in_generate": True, "output_scores": True} | options
    return GenerationMixin.generate(model, **inputs, **given)  # Whisper has a `generate` of its own


def same(out, expected):
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(out.sequences_scores, expected.sequences_scores, **CLOSE)
    assert torch.equal(out.beam_indices, expected.beam_indices.long())


@pytest.mark.parametrize("case", named(CASES))
@pytest.mark.parametrize("name", MODELS)
def test_every_two_options(name, case):
    model, inputs = tiny(name, case["pads"])
    options = {option: case[option] for option in ("num_beams", "length_penalty", "early_stopping")}
    options["num_return_sequences"] = 1 if case["returned"] == "one" else case["num_beams"]
    options |= {"eos_token_id": EOS[case["eos"]], "pad_token_id": PAD}
    same(engine.generate(model, inputs, max_new_tokens=NEW, **options), theirs(model, inputs, **options))


def test_the_cases_end_in_all_ways():
    """Texts that end, that do not, and prompts that are done before others: else the comparisons would say little."""
    reasons, fewer = set(), False
    for name, penalty in product(MODELS, OPTIONS["length_penalty"]):
        out = engine.generate(*tiny(name), max_new_tokens=NEW, **MIXED | {"length_penalty": penalty})
        reasons.add(frozenset(out.finish_reasons))
        fewer |= out.sequences.shape[1] < tiny(name)[1].get("input_ids", out.sequences).shape[1] + NEW
    assert {frozenset(["eos"]), frozenset(["eos", "length"])} <= reasons
    assert fewer


def test_an_object_means_what_the_options_mean():
    model, inputs = tiny("gpt2")
    greedy = {"prefix_allowed_tokens_fn": lambda prompt, ids: range(2 + prompt, 101, 2), "max_new_tokens": NEW}
    for strategy in (strategies.Beam(num_beams=4, do_sample=True), strategies.DiverseBeam(4, 2, 0.5)):
        fields = dataclasses.asdict(strategy)
        chosen = greedy | ({"top_p": 0.1} if strategy.samples else {})
        torch.manual_seed(0)
        expected = engine.generate(model, inputs, **chosen, **fields)
        torch.manual_seed(0)
        out = engine.generate(model, inputs, **chosen, strategy=strategy)
        assert torch.equal(out.sequences, expected.sequences)
        assert not (out.sequences[0, 13:] % 2).any()
        assert (out.sequences[1, 13:] % 2).all()


class EndsWith:
    """A stopping criterion of the caller's own: the text ends with one of these tokens, or gets this long."""

    def __init__(self, tokens, columns=10**9):
        self.tokens, self.columns = torch.tensor(tokens), columns

    def __call__(self, ids, scores, **_):
        return torch.isin(ids[:, -1], self.tokens) | (ids.shape[1] >= self.columns)


@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("columns", [18, 10**9])
def test_criteria_of_the_caller(columns, early_stopping):
    model, inputs = tiny("gemma2")
    options = MIXED | {"eos_token_id": 5, "early_stopping": early_stopping, "length_penalty": 0.0}
    options["stopping_criteria"] = [EndsWith([22, 29, 43, 58, 79, 1], columns)]
    out = engine.generate(model, inputs, max_new_tokens=NEW, **options)
    same(out, theirs(model, inputs, **options))
    assert "criteria" in out.finish_reasons


def test_the_time_counts_from_the_call(monkeypatch):
    """That of the prompt, too: here it is all there is, so a text gets one token."""
    model, inputs = tiny("llama")
    forward, calls = model.forward, []

    @wraps(forward)
    def slow(*arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            time.sleep(0.3)
        return forward(*arguments, **options)

    monkeypatch.setattr(model, "forward", slow)
    out = engine.generate(model, inputs, num_beams=2, max_time=0.25, max_new_tokens=100)
    assert out.finish_reasons == ["time", "time"]
    assert out.stats.new_tokens == 2


@pytest.mark.parametrize("cache", ["dynamic", "offloaded", "quantized"])
def test_beams_go_on_from_a_cache(cache):
    model, inputs = tiny("llama")
    first = engine.generate(model, inputs, **exact(cache, model), max_new_tokens=9)
    both = conversation(first, inputs)
    out = engine.generate(model, both, cache=first.cache, max_new_tokens=9, **MIXED)
    same(out, theirs(model, both, max_new_tokens=9, **MIXED))


def test_a_cache_without_room_for_the_beams_is_refused_before_any_work():
    model, inputs = tiny("llama")
    for options in ({}, {"max_batch_size": 7}):
        live = caches.build("static", model.config, max_cache_len=64, **options)
        with pytest.raises(caches.CapacityError, match=r"2 prompts are to become 8 rows.*max_batch_size=8"):
            engine.generate(model, inputs, cache=live, num_beams=4)
        assert live.total_tokens == 0
    live = caches.build("static", model.config, max_cache_len=64, max_batch_size=8)
    same(engine.generate(model, inputs, cache=live, max_new_tokens=NEW, **MIXED), theirs(model, inputs, **MIXED))


# Diverse beam search, which transformers no longer has.

GROUPS = {
    "beams": [(4, 2), (4, 4), (6, 3), (6, 2)],
    "diversity_penalty": [0.3, 1.0, 5.0],
    "length_penalty": [0.0, 1.0, 2.0],
    "early_stopping": [True, False, "never"],
    "returned": [1, 4],
    "eos": list(EOS),
    "pads": [0, 4],
}
GROUP_CASES = pairwise(**GROUPS)


@pytest.mark.parametrize("case", named(GROUP_CASES))
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_groups(name, case):
    model, inputs = tiny(name, case["pads"])
    options = {option: case[option] for option in ("diversity_penalty", "length_penalty", "early_stopping")}
    options |= dict(zip(("num_beams", "num_beam_groups"), case["beams"], strict=True))
    options["num_return_sequences"], eos = case["returned"], EOS[case["eos"]]
    out = engine.generate(model, inputs, max_new_tokens=9, eos_token_id=eos, pad_token_id=PAD, **options)
    options |= {"new": 9, "eos_ids": eos or (), "pad_id": PAD}
    expected = [text for row in readers(model, inputs) for text in diverse(*row, **options)]
    assert out.tokens == [tokens for _, tokens in expected]
    torch.testing.assert_close(out.sequences_scores, torch.tensor([score for score, _ in expected]), **CLOSE)


class EndsRows(StoppingCriteria):
    """Keeps which rows have ended."""

    def __init__(self):
        self.ended = False

    def __call__(self, input_ids, scores, **kwargs):
        self.ended = self.ended | (input_ids[:, -1] % 3 == 0)
        return self.ended


@pytest.mark.parametrize("beams", [1, 3])
def test_criteria_that_keep_a_state_of_each_row(beams):
    model, inputs = tiny("llama")
    inputs = {name: tensor[1:] for name, tensor in inputs.items()}
    options = {"num_beams": beams, "max_new_tokens": NEW, "do_sample": False, "eos_token_id": 7, "pad_token_id": PAD}
    expected = model.generate(**inputs, **options, stopping_criteria=StoppingCriteriaList([EndsRows()]))
    out = engine.generate(model, inputs, **options, stopping_criteria=[EndsRows()])
    assert torch.equal(out.sequences, expected)


def test_scores_are_float32_whatever_new_tensors_are():
    model, inputs = tiny("llama")
    options = {"num_beams": 3, "max_new_tokens": NEW, "do_sample": False}
    expected = engine.generate(model, inputs, **options).sequences
    torch.set_default_dtype(torch.float16)
    try:
        assert torch.equal(engine.generate(model, inputs, **options).sequences, expected)
    finally:
        torch.set_default_dtype(torch.float32)


# Beam sampling at its edges, with equal seeds.


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
