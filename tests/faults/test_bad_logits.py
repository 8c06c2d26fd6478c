"""A model, a draft or a processor whose scores no token can be chosen by stops the run at that step, and says so."""

import copy
from contextlib import contextmanager

import pytest
import torch
from architectures import VOCABULARY
from constraints import END, NEW, Constraint, Drafting, one_of, tree
from helpers import try_facts
from references import draft_of, tiny
from resuming import check_goes_on

import engine

pytestmark = pytest.mark.covering("values", "pairs")

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True, scope="module")
def _facts_are_known():
    for name in ("llama", "jamba"):
        try_facts(tiny(name)[0])


@pytest.fixture(params=[False, True], ids=["read at once", "read late"])
def late(request, monkeypatch):
    monkeypatch.setattr("engine.decoding.token_buffer.reads_late", lambda device: request.param)
    return request.param


@contextmanager
def breaking(module, value, after, rows=slice(None)):
    """From its call with number `after` on, the first tensor that it returns is this value in these rows."""
    calls = []

    def spoil(_, arguments, output):
        calls.append(0)
        if len(calls) > after:
            first = output.logits if hasattr(output, "logits") else output[0] if isinstance(output, tuple) else output
            first[rows] = value

    hook = module.register_forward_hook(spoil)
    try:
        yield
    finally:
        hook.remove()


def stopped(model, inputs, match, **options):
    with pytest.raises(engine.InvalidLogitsError, match=match) as error:
        engine.generate(model, inputs, **{"max_new_tokens": NEW} | options)
    return error.value.partial


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize(
    ("value", "found"),
    [(NAN, f"{VOCABULARY} NaN among {VOCABULARY} scores"), (INF, r"\d+ \+inf among"), (-INF, "nothing but -inf in")],
    ids=str,
)
def test_what_was_found_and_where(late, value, found, options):
    model, inputs = tiny("llama")
    row = 3 if "num_beams" in options else 1
    where = r"row 3 \(of prompt 1\)" if "num_beams" in options else "row 1"
    with breaking(model, value, 3, rows=row):
        part = stopped(
            model, inputs, rf"{found}.*for new token 4 of {where}, .* in float32: float16 overflows", **options,
            output_scores=True, output_logits=True,
        )  # fmt: skip
    assert [len(tokens) for tokens in part.tokens] == [3, 3]
    if "num_beams" not in options:
        assert len(part.scores) == len(part.logits) == 3


def test_one_number_is_enough_but_minus_infinity_is_one(late):
    model, inputs = tiny("llama")
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    for value in (NAN, INF):
        with breaking(model, value, 2, rows=(1, -1, 7)):
            stopped(model, inputs, r"1 (NaN|\+inf) among 101 scores for new token 3 of row 1,")
    with breaking(model, -INF, 0, rows=(slice(None), -1, slice(99, None))):
        assert engine.generate(model, inputs, max_new_tokens=NEW).finish_reasons == whole.finish_reasons


def test_rows_that_have_ended_may_get_anything(late):
    model, inputs = tiny("llama")
    free = engine.generate(model, inputs, max_new_tokens=NEW)
    options = {"eos_token_id": free.tokens[0][2], "max_new_tokens": NEW}
    whole = engine.generate(model, inputs, **options)
    assert whole.finish_reasons == ["eos", "length"]

    def spoil(ids, scores):
        scores[0] = torch.where(ids[0, -1] == 0, -INF, scores[0])
        return scores

    with breaking(model, NAN, 3, rows=0):
        assert engine.generate(model, inputs, **options).tokens == whole.tokens
    assert engine.generate(model, inputs, logits_processor=[spoil], **options).tokens == whole.tokens


def test_the_prompt_in_pieces_of_which_the_first_was_bad():
    model, inputs = tiny("llama")
    generator = engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=5))
    with (
        breaking(model.model.layers[1], NAN, 0),
        pytest.raises(engine.InvalidLogitsError, match="after 0 new tokens") as error,
    ):
        generator.generate(inputs, max_new_tokens=NEW)
    assert error.value.partial.cache.total_tokens == 0
    check_goes_on(model, inputs, error.value.partial)


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_the_turn_before_is_kept(late, name):
    model, inputs = tiny(name, pads=0)
    first = engine.generate(model, inputs, max_new_tokens=NEW)
    mask = torch.ones_like(first.sequences)
    whole = engine.generate(model, first.sequences, attention_mask=mask, max_new_tokens=NEW)
    seen = first.cache.total_tokens
    with breaking(model.model.layers[1], NAN, 0):
        part = stopped(model, first.sequences, "after 0 new tokens per row", cache=first.cache)
    assert part.cache is first.cache
    assert part.cache.total_tokens == seen
    assert engine.generate(model, part.sequences, cache=part.cache, max_new_tokens=NEW).tokens == whole.tokens


@pytest.mark.parametrize("sample", [False, True])
def test_only_the_draft(late, sample):
    model, inputs = tiny("llama")
    draft = draft_of("llama")
    match = r"after \d+ new tokens? per row: the draft returned .* NaN .* the model and its text are sound: leave"
    options = {"assistant_model": draft, "do_sample": sample}
    for after in (0, 3):
        with breaking(draft, NAN, after):
            part = stopped(model, inputs, match, **options)
        assert len(part.tokens[0]) > 0
        check_goes_on(model, inputs, part)


@pytest.mark.parametrize("row", [0, 2], ids=["with the prompt", "without"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_guidance(late, row, options):
    model, inputs = tiny("llama")
    engine.generate(model, inputs, guidance_scale=1.5, max_new_tokens=1)  # finds out what pads change
    for after in (0, 2):
        with breaking(model, NAN, after, rows=row):
            part = stopped(model, inputs, "the model returned", guidance_scale=1.5, **options)
        assert [len(tokens) for tokens in part.tokens] == [after, after]
        check_goes_on(model, inputs, part)


def test_guidance_of_a_model_that_is_broken_from_the_beginning():
    """What it says about pads is not remembered."""
    model, inputs = copy.deepcopy(tiny("llama")[0]), tiny("llama")[1]
    whole = engine.generate(tiny("llama")[0], inputs, guidance_scale=1.5, max_new_tokens=NEW)
    with breaking(model, NAN, 0):
        stopped(model, inputs, "the model returned", guidance_scale=1.5)
    assert engine.generate(model, inputs, guidance_scale=1.5, max_new_tokens=NEW).tokens == whole.tokens


def test_what_the_caller_asked_to_be_removed_is_no_failure(late):
    model, inputs = tiny("llama")
    with breaking(model, NAN, 2, rows=1):
        out = engine.generate(model, inputs, max_new_tokens=NEW, remove_invalid_values=True)
    assert out.finish_reasons == ["length", "length"]


# Processors


def spoils(value, rows=slice(None), at=16):
    def processor(ids, scores):
        return scores if ids.shape[1] < at else scores.index_fill(0, torch.arange(len(scores))[rows], value)

    return processor


def harmless(ids, scores):
    return scores + 0.0


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (NAN, f"{VOCABULARY} to NaN of the {VOCABULARY} scores of row 1"),
        (-INF, f"all {VOCABULARY} scores of row 1 to -inf"),
    ],
    ids=str,
)
@pytest.mark.parametrize("sample", [False, True])
def test_it_is_named(late, value, found, sample):
    model, inputs = tiny("llama")
    processors = [harmless, spoils(value, rows=[1]), harmless]
    match = rf"processor set {found} at new token 4, so no token can be chosen; the model's logits were finite\. .* not"
    part = stopped(model, inputs, match, logits_processor=processors, do_sample=sample)
    assert [len(tokens) for tokens in part.tokens] == [3, 3]

    def function(ids, scores):
        scores[:] = value
        return scores

    stopped(model, inputs, "function set", logits_processor=[harmless, function], do_sample=sample)
    # It has written into what it was given: asking again would not tell which of them it was.
    stopped(model, inputs, "function or harmless.* set", logits_processor=[function, harmless], do_sample=sample)


def test_infinity_is_the_best_but_cannot_be_weighed(late):
    model, inputs = tiny("llama")

    def forces(ids, scores):
        return scores.index_fill(1, torch.tensor([ids.shape[1]]), INF)

    for options in ({}, {"prompt_lookup_num_tokens": 3}):
        out = engine.generate(model, inputs, logits_processor=[forces], max_new_tokens=NEW, **options)
        assert out.tokens == [list(range(13, 13 + NEW))] * 2
    for options in ({"do_sample": True}, {"num_beams": 3}, {"penalty_alpha": 0.6, "top_k": 4}):
        stopped(model, inputs, r"forces set (2|6) to \+inf of the", logits_processor=[forces], **options)


TRIED = [
    {},
    {"num_beams": 3},
    {"num_beams": 30, "num_return_sequences": 30},
    {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
    {"strategy": Drafting()},
]


def finite():
    """Nothing comes after a text that has ended, or that it does not allow."""
    return Constraint(tree(), lambda node, token: (node or {}).get(token), lambda node: list(node or []))


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("options", TRIED, ids=str)
def test_texts_that_are_only_tried_may_lead_nowhere(late, options, sample):
    """Wrong proposals, beams that others have overtaken, texts that have ended."""
    model, inputs = tiny("llama")
    if sample and "strategy" in options:
        pytest.skip("it draws nothing")
    found = []
    for processor in (finite(), one_of()):
        torch.manual_seed(4)
        out = engine.generate(
            model, inputs, logits_processor=[processor], eos_token_id=END, max_new_tokens=NEW + 4, do_sample=sample,
            top_k=0, **options,
        )  # fmt: skip
        found.append(out.tokens)
    assert found[0] == found[1]


def test_the_first_of_several_groups(late):
    model, inputs = tiny("llama")
    calls = []

    def first_group(ids, scores):
        calls.append(0)
        return scores * NAN if len(calls) == 5 else scores  # of two in each step

    groups = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7}
    part = stopped(
        model, inputs, "first_group set .* to NaN of .* at new token 3,", logits_processor=[first_group], **groups
    )
    assert [len(tokens) for tokens in part.tokens] == [2, 2]


@pytest.mark.parametrize("groups", [{}, {"num_beam_groups": 2, "diversity_penalty": 0.7}], ids=["beams", "groups"])
def test_a_search_that_nothing_is_left_to(late, groups):
    model, inputs = tiny("llama")

    def dead_end(ids, scores):
        return scores if ids.shape[1] < 16 else torch.full_like(scores, -INF)

    match = "after 3 new tokens per row: all scores of all beams of prompt 0 are -inf"
    part = stopped(model, inputs, match, logits_processor=[dead_end], num_beams=4, **groups)
    check_goes_on(model, inputs, part)


class Misshapen:
    """A processor that returns something else than scores of the shape it was given, from the second token on."""

    def __init__(self, what, begin):
        self.what, self.begin = what, begin

    def __call__(self, ids, scores):
        return self.what(scores) if ids.shape[1] > self.begin else scores


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=str
)
@pytest.mark.parametrize(
    ("what", "told"),
    [
        (lambda scores: scores[:1], r"Misshapen made scores of shape \[1, 101\] from scores of shape \[\d, 101\]"),
        (lambda scores: scores[:, :50], r"Misshapen made scores of shape \[\d, 50\]"),
        (lambda scores: scores[..., None], r"Misshapen made scores of shape \[\d, 101, 1\]"),
        (lambda scores: None, r"Misshapen returned NoneType where the scores \[\d, 101\] belong"),
        (lambda scores: scores.tolist(), "Misshapen returned list"),
    ],
)
def test_a_processor_that_returns_another_shape_is_named(options, what, told):
    model, inputs = tiny("llama")
    begin = inputs["input_ids"].shape[1]
    with pytest.raises(engine.GenerationInterrupted, match=told) as stopped:
        engine.generate(model, inputs, max_new_tokens=6, logits_processor=[Misshapen(what, begin)], **options)
    assert isinstance(stopped.value.__cause__, engine.OptionError)
    assert [len(tokens) for tokens in stopped.value.partial.tokens] == [1, 1]
