"""Diverse beam search gives what group beam search of transformers 4.47 gave, and so does its slow reference."""

import json
from functools import cache
from pathlib import Path

import pytest
import record_diverse
import torch
from record_diverse import MODELS, PAD, inputs_of, model_of, until_end
from references import diverse, readers
from transformers.generation import (
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

import engine


@cache
def recordings():
    return json.loads(Path(record_diverse.__file__).with_name("diverse_recordings.json").read_text())


def recorded_of(model):
    return [case for case in recordings() if case["model"] == model]


def engines(case):
    """The new tokens of every text without the end token, and the scores."""
    options = case["options"]
    out = engine.generate(model_of(case["model"]), inputs_of(case), pad_token_id=PAD, **options)
    return [until_end(tokens, options["eos_token_id"]) for tokens in out.tokens], out.sequences_scores.tolist()


def references(case):
    options = dict(case["options"])
    new, eos_ids = options.pop("max_new_tokens"), options.pop("eos_token_id") or []
    groups = {"pad_id": PAD, "new": new, "eos_ids": eos_ids}
    found = []
    for reader, prompt in readers(model_of(case["model"]), inputs_of(case)):
        alone = dict(options)
        processors = [make(alone.pop(name), len(prompt), eos_ids) for name, make in PROCESSORS.items() if name in alone]
        found += diverse(reader, prompt, processors=processors, **groups, **alone)
    return [until_end(tokens, eos_ids) for _, tokens in found], [score for score, _ in found]


PROCESSORS = {
    "repetition_penalty": lambda penalty, prompt, eos_ids: RepetitionPenaltyLogitsProcessor(penalty),
    "no_repeat_ngram_size": lambda size, prompt, eos_ids: NoRepeatNGramLogitsProcessor(size),
    "min_new_tokens": lambda tokens, prompt, eos_ids: MinNewTokensLengthLogitsProcessor(prompt, tokens, eos_ids),
}


def check(found_by, cases):
    wrong = []
    for case in cases:
        texts, scores = found_by(case)
        close = torch.allclose(torch.tensor(scores), torch.tensor(case["scores"]), rtol=1e-4, atol=1e-4)
        if texts != case["texts"] or not close:
            wrong.append((recordings().index(case), case["options"], case["texts"], texts, case["scores"], scores))
    assert not wrong, f"{len(wrong)} of {len(cases)} differ, the first: {wrong[0]}"


def test_the_recordings_are_many_and_end_in_all_ways():
    ends = {(len(text) < case["options"]["max_new_tokens"]) for case in recordings() for text in case["texts"]}
    assert len(recordings()) >= 114
    assert ends == {True, False}


@pytest.mark.parametrize("model", MODELS)
def test_the_engine_gives_what_was_recorded(model):
    check(engines, recorded_of(model))


@pytest.mark.parametrize("begin", [0, *(pytest.param(begin, marks=pytest.mark.slow) for begin in (1, 2))])
@pytest.mark.parametrize("model", MODELS)
def test_the_reference_gives_what_was_recorded(model, begin):
    check(references, recorded_of(model)[begin::3])
