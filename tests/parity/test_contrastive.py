"""Contrastive search equals its slow reference, which reads everything again for every candidate."""

from itertools import product

import pytest
import torch
from covering import pairwise
from helpers import try_facts
from references import NoStutter, contrastive, conversation, named, never_run, readers, tiny
from transformers.generation import (
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

import caches
import engine

pytestmark = pytest.mark.covering("values", "pairs")

NEW = 10
EOS = {"no": None, "some": [29, 5, 66, 94, 76, 26]}
OPTIONS = {"top_k": [2, 4, 7], "penalty_alpha": [0.2, 0.6, 1.0], "eos": list(EOS), "pads": [0, 9], "rows": [1, 2]}
CASES = pairwise(**OPTIONS)
USUAL = {"top_k": 4, "penalty_alpha": 0.6}
MODELS = ["gpt2", "llama", "t5"]


def check(name, case, processors=()):
    model, inputs = tiny(name, case["pads"], case["rows"])
    inputs = {input: value[: case["rows"]] for input, value in inputs.items()}
    options = {option: case[option] for option in ("top_k", "penalty_alpha")}
    eos = EOS[case["eos"]]
    given = {"logits_processor": list(processors), "eos_token_id": eos, "pad_token_id": 3}
    out = engine.generate(model, inputs, max_new_tokens=NEW, **options, **given)
    options |= {"new": NEW, "eos_ids": eos or (), "processors": processors}
    assert out.tokens == [contrastive(*row, **options) for row in readers(model, inputs)]
    begin = out.sequences.shape[1] - max(map(len, out.tokens))
    for row, tokens in zip(out.sequences, out.tokens, strict=True):
        assert row[begin:].tolist() == tokens + [3] * (len(row) - begin - len(tokens))


@pytest.mark.parametrize("case", named(CASES))
@pytest.mark.parametrize("name", [*MODELS, "bart"])
def test_every_two_options(name, case):
    check(name, case)


@pytest.mark.parametrize("processor", [NoRepeatNGramLogitsProcessor(2), NoStutter(), MinLengthLogitsProcessor(18, 29)])
@pytest.mark.parametrize("name", MODELS)
def test_processors(name, processor):
    for case in CASES[:2]:
        check(name, case, processors=[processor])


def test_a_penalty_for_repetition_given_as_an_option():
    """Where rows have pads, it looks at the mask: of the rows that are chosen for, not of the candidates."""
    model, inputs = tiny("gpt2", pads=0)
    out = engine.generate(model, inputs, max_new_tokens=NEW, repetition_penalty=1.4, **USUAL)
    options = USUAL | {"new": NEW, "processors": [RepetitionPenaltyLogitsProcessor(1.4)]}
    assert out.tokens == [contrastive(*row, **options) for row in readers(model, inputs)]
    engine.generate(model, tiny("gpt2")[1], max_new_tokens=NEW, repetition_penalty=1.4, **USUAL)


def test_the_texts_are_others_than_greedy_and_end_in_both_ways():
    for name in MODELS:
        model, inputs = tiny(name)
        greedy = engine.generate(model, inputs, max_new_tokens=NEW)
        out = engine.generate(model, inputs, max_new_tokens=NEW, **USUAL)
        assert all(found != plain for found, plain in zip(out.tokens, greedy.tokens, strict=True))
    reasons = set()
    for case, name in product(CASES[::3], MODELS):
        model, inputs = tiny(name, case["pads"])
        options = {option: case[option] for option in ("top_k", "penalty_alpha")}
        out = engine.generate(model, inputs, max_new_tokens=NEW, **options, eos_token_id=EOS["some"], pad_token_id=3)
        reasons.add(tuple(out.finish_reasons))
    assert {("eos", "eos"), ("length", "eos"), ("eos", "length")} & reasons >= {("eos", "eos")}
    assert len(reasons) > 2


def test_recorded_scores_are_those_that_the_candidates_come_from():
    model, inputs = tiny("gpt2")
    out = engine.generate(model, inputs, max_new_tokens=NEW, output_scores=True, **USUAL)
    assert len(out.scores) == NEW
    for step, scores in enumerate(out.scores):
        candidates = scores.topk(4).indices
        assert (candidates == out.sequences[:, 13 + step, None]).any(dim=1).all()


def test_a_cache_that_holds_tokens_is_refused_before_any_work(monkeypatch):
    model, inputs = tiny("llama")
    first = engine.generate(model, inputs, max_new_tokens=5)
    try_facts(model)
    never_run(model, monkeypatch)
    with pytest.raises(engine.OptionError, match="those of the 17 in the cache are not known: start with an empty"):
        engine.generate(model, conversation(first, inputs), cache=first.cache, **USUAL)
    assert first.cache.total_tokens == 17


def test_a_cache_without_room_for_the_last_candidates_is_refused_before_any_work(monkeypatch):
    model, ids = tiny("llama")[0], torch.arange(3, 39)[None]
    options = {"max_new_tokens": 5, "penalty_alpha": 0.6, "top_k": 3, "cache": "static"}
    assert len(engine.generate(model, ids, cache_config={"max_cache_len": 41}, **options).tokens[0]) == 5
    never_run(model, monkeypatch)
    with pytest.raises(caches.CapacityError, match="36 prompt tokens and 5 new ones need 41"):
        engine.generate(model, ids, cache_config={"max_cache_len": 40}, **options)
