"""Criteria of the caller beside the call's own, and functions that know no answer for texts that cannot be."""

import copy

import pytest
import torch
from architectures import prompt, tiny_model
from references import draft_of
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria

import engine

NEW = 12


def llama():
    return tiny_model("llama"), prompt(pads=0)["input_ids"]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize(
    ("criterion", "own"),
    [
        (lambda: MaxLengthCriteria(15), {"max_new_tokens": 4}),
        (lambda: EosTokenCriteria([11]), {"eos_token_id": list(range(2, 60)), "max_new_tokens": NEW}),
        (lambda: MaxTimeCriteria(1000), {"max_time": 1e-9, "max_new_tokens": NEW}),
    ],
    ids=["shorter", "another end", "more time"],
)
def test_a_criterion_takes_the_place_of_the_calls_own_of_its_kind(criterion, own, options):
    model, ids = llama()
    asked = {"pad_token_id": 0, "do_sample": False} | own | options
    expected = model.generate(ids[:1], stopping_criteria=StoppingCriteriaList([criterion()]), **asked)
    out = engine.generate(model, ids[:1], stopping_criteria=[criterion()], **asked)
    assert torch.equal(out.sequences, expected)


def test_a_search_takes_as_many_candidates_beside_an_own_criterion_of_the_end():
    model, ids = llama()
    for seed in range(6):
        torch.manual_seed(seed)
        asked = {
            "eos_token_id": [11, 12, 13, 14],
            "pad_token_id": 0,
            "num_beams": 3,
            "do_sample": True,
            "max_new_tokens": 8,
        }
        expected = model.generate(ids[:1], stopping_criteria=StoppingCriteriaList([EosTokenCriteria([11])]), **asked)
        torch.manual_seed(seed)
        out = engine.generate(model, ids[:1], stopping_criteria=[EosTokenCriteria([11])], **asked)
        assert torch.equal(out.sequences, expected)


def test_an_own_criterion_of_strings_takes_the_place_of_the_calls_too(shipped):
    asked = {"stop_strings": ["e"], "max_new_tokens": 12, "do_sample": False}
    own = [StopStringCriteria(shipped.tokenizer, ["no such text"])]
    out = engine.generate(shipped.model, "import os\n", tokenizer=shipped.tokenizer, stopping_criteria=own, **asked)
    assert len(out.tokens[0]) == 12


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_a_criterion_may_allow_more_tokens_than_the_call(options):
    """transformers dies of it in a search, and never ends with prompt lookup."""
    model, ids = llama()
    criteria, asked = [MaxLengthCriteria(18)], {"pad_token_id": 0, "do_sample": False} | options
    out = engine.generate(model, ids, stopping_criteria=criteria, max_new_tokens=2, **asked)
    assert torch.equal(out.sequences, engine.generate(model, ids, max_new_tokens=5, **asked).sequences)


@pytest.mark.parametrize(("beams", "returned"), [(1, 1), (2, 1), (2, 2)])
def test_fewer_texts_than_the_models_own_settings_have(beams, returned, monkeypatch):
    model, ids = llama()
    monkeypatch.setattr(model, "generation_config", copy.deepcopy(model.generation_config))
    model.generation_config.update(num_beams=4, num_return_sequences=4)
    options = {"num_beams": beams, "num_return_sequences": returned, "max_new_tokens": NEW, "do_sample": False}
    assert torch.equal(engine.generate(model, ids, **options).sequences, model.generate(ids, **options))


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True, "seed": 1}], ids=str)
def test_an_end_id_by_which_no_text_ends_is_no_pad(options, monkeypatch):
    model, ids = llama()
    expected = engine.generate(model, ids, max_new_tokens=NEW, **options).sequences
    monkeypatch.setattr(model.generation_config, "pad_token_id", None)
    assert torch.equal(engine.generate(model, ids, eos_token_id=-1, max_new_tokens=NEW, **options).sequences, expected)


END = 90


def texts_of(allowed, ids):
    """A constraint of two texts per row, which has no answer for any other text."""

    def answer(row, text):
        said = tuple(text[ids.shape[1] :].tolist())
        return [one[len(said)] for one in allowed[row] if one[: len(said)] == said and len(one) > len(said)]

    return answer


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 2}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafts", ["lookup", "same draft", "other draft"])
def test_a_function_is_not_asked_for_what_cannot_follow(rows, options, drafts):
    """Of texts that are proposed it may raise, where they leave those it allows, and behind an end."""
    model, ids = llama()
    ids = ids[:rows].clone()
    ids[:, -6:] = torch.tensor([7, 5, 20, 7, 5, 20])  # so that lookup proposes something wrong
    allowed = [
        [(7, 5, 21, 22, 23, END), (30, 31, 32, 33, 34, END)],
        [(10, 11, 12, 13, 14, 15, 16, END), (40, 41, 42, 43, 44, 45, 46, END)],
    ][:rows]
    asked = {"eos_token_id": END, "pad_token_id": END, "max_new_tokens": NEW} | options
    if rows == 2:  # a row that has ended goes on with pads
        allowed = [[one + (END,) * 9 for one in texts] for texts in allowed]
    proposes = {
        "lookup": {"prompt_lookup_num_tokens": 3},
        "same draft": {"assistant_model": model},
        "other draft": {"assistant_model": draft_of("llama")},
    }[drafts]
    function = texts_of(allowed, ids)
    out = engine.generate(model, ids, prefix_allowed_tokens_fn=function, **asked, **proposes)
    for text, texts in zip(out.tokens, allowed, strict=True):
        assert text in [list(one[: len(text)]) for one in texts]
        assert text[-1] == END
    if not options:
        plain = engine.generate(model, ids, prefix_allowed_tokens_fn=function, **asked)
        assert torch.equal(out.sequences, plain.sequences)


def test_a_function_that_raises_for_the_text_itself_ends_the_run():
    model, ids = llama()

    def allowed(row, text):
        if len(text) > ids.shape[1] + 3:
            raise KeyError("no answer")
        return range(101)

    for proposes in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
        with pytest.raises(engine.GenerationInterrupted, match="no answer") as stopped:
            engine.generate(model, ids, prefix_allowed_tokens_fn=allowed, max_new_tokens=NEW, **proposes)
        assert stopped.value.partial.sequences.shape[1] == ids.shape[1] + 4
