"""Beam search equals transformers', diverse beam search its slow reference, whatever the cache."""

import copy
import dataclasses
import time
from functools import wraps
from itertools import product

import pytest
import torch
from covering import pairwise
from references import CLOSE, NoStutter, conversation, diverse, exact, named, readers, tiny
from transformers import DynamicCache, GenerationMixin, StoppingCriteria, StoppingCriteriaList
from transformers.generation import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

import caches
import engine
import strategies
from caches.timeline.timeline import Timeline

pytestmark = pytest.mark.covering("values", "pairs")

NEW = 12
PAD = 3  # where it is 0, transformers fills up with the first eos id
AMPLIFIED = {"atol": 1e-2, "rtol": 1e-3}  # logits: bart amplifies rounding
MODELS = ["llama", "gpt2", "mistral", "gemma2", "t5", "bart", "whisper"]
STATES = ["mamba", "jamba"]
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


def check_same(name, case, cache="dynamic"):
    model, inputs = tiny(name, case["pads"])
    options = {option: case[option] for option in ("num_beams", "length_penalty", "early_stopping")}
    options["num_return_sequences"] = 1 if case["returned"] == "one" else case["num_beams"]
    options |= {"eos_token_id": EOS[case["eos"]], "pad_token_id": PAD}
    chosen = exact(cache, model)
    same(engine.generate(model, inputs, max_new_tokens=NEW, **options, **chosen), theirs(model, inputs, **options))


def same(out, expected):
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(out.sequences_scores, expected.sequences_scores, **CLOSE)
    assert torch.equal(out.beam_indices, expected.beam_indices.long())


@pytest.mark.parametrize("case", named(CASES))
@pytest.mark.parametrize("name", MODELS)
def test_every_two_options(name, case):
    check_same(name, case)


def cells(names):
    """Every model with every backend, each with the next of the cases."""
    return [
        pytest.param(name, cache, CASES[number % len(CASES)], id=f"{name}-{cache}")
        for number, (name, cache) in enumerate(product(names, caches.names()))
    ]


@pytest.mark.parametrize(("name", "cache", "case"), cells(MODELS + STATES))
def test_every_backend(name, cache, case):
    check_same(name, case, cache)


@pytest.mark.product
@pytest.mark.parametrize("cache", caches.names())
@pytest.mark.parametrize("name", MODELS + STATES)
def test_every_backend_with_a_third_of_the_cases(name, cache):
    for case in CASES[caches.names().index(cache) % 3 :: 3]:
        check_same(name, case, cache)


@pytest.mark.product
@pytest.mark.parametrize("eos", EOS)
@pytest.mark.parametrize("num_beams", OPTIONS["num_beams"])
@pytest.mark.parametrize("name", MODELS + STATES)
def test_all_options(name, num_beams, eos):
    for values in product(*(OPTIONS | {"num_beams": [num_beams], "eos": [eos]}).values()):
        check_same(name, dict(zip(OPTIONS, values, strict=True)))


def test_the_cases_end_in_all_ways():
    """Texts that end, that do not, and prompts that are done before others: else the comparisons would say little."""
    reasons, fewer = set(), False
    for name, penalty in product(MODELS, OPTIONS["length_penalty"]):
        out = engine.generate(*tiny(name), max_new_tokens=NEW, **MIXED | {"length_penalty": penalty})
        reasons.add(frozenset(out.finish_reasons))
        fewer |= out.sequences.shape[1] < tiny(name)[1].get("input_ids", out.sequences).shape[1] + NEW
    assert {frozenset(["eos"]), frozenset(["eos", "length"])} <= reasons
    assert fewer


PROCESSED = {
    "repetition": {"repetition_penalty": 1.6},
    "n-grams": {"no_repeat_ngram_size": 2},
    "least": {"min_new_tokens": 6, "renormalize_logits": True},
    "forced": {"forced_eos_token_id": 5},
    "own": {"logits_processor": [NoStutter()]},
    "prefix": {"prefix_allowed_tokens_fn": lambda prompt, ids: range(2 + prompt, 101, 2)},
}


@pytest.mark.parametrize("name", ["gpt2", "t5"])
@pytest.mark.parametrize("options", PROCESSED.values(), ids=PROCESSED)
def test_processors(name, options):
    model, inputs = tiny(name)
    out = engine.generate(model, inputs, max_new_tokens=NEW, **MIXED, **options)
    same(out, theirs(model, inputs, **MIXED, **options))


def test_an_object_means_what_the_options_mean():
    model, inputs = tiny("gpt2")
    options = PROCESSED["prefix"] | {"max_new_tokens": NEW, "top_p": 0.1}
    for strategy in (strategies.Beam(num_beams=4, do_sample=True), strategies.DiverseBeam(4, 2, 0.5)):
        fields = dataclasses.asdict(strategy)
        chosen = options if strategy.samples else PROCESSED["prefix"] | {"max_new_tokens": NEW}
        torch.manual_seed(0)
        expected = engine.generate(model, inputs, **chosen, **fields)
        torch.manual_seed(0)
        out = engine.generate(model, inputs, **chosen, strategy=strategy)
        assert torch.equal(out.sequences, expected.sequences)
        assert not (out.sequences[0, 13:] % 2).any()
        assert (out.sequences[1, 13:] % 2).all()


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_recorded_scores_and_logits(name):
    model, inputs = tiny(name)
    record = {"output_scores": True, "output_logits": True}
    out = engine.generate(model, inputs, max_new_tokens=NEW, **MIXED, **record)
    expected = theirs(model, inputs, **MIXED, **record)
    same(out, expected)
    torch.testing.assert_close(out.scores, expected.scores, **AMPLIFIED)
    torch.testing.assert_close(out.logits, expected.logits, **AMPLIFIED)


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("name", ["mistral", "t5"])
def test_beam_sampling(name, cache):
    model, inputs = tiny(name)
    options = MIXED | {"do_sample": True, "temperature": 1.7, "top_k": 30}
    torch.manual_seed(7)
    expected = theirs(model, inputs, **options)
    torch.manual_seed(7)
    same(engine.generate(model, inputs, cache=cache, max_new_tokens=NEW, **options), expected)


@pytest.mark.parametrize("cache", ["dynamic", "static", "quantized"])
@pytest.mark.parametrize("name", ["llama", "bamba", "t5", "bart"])
def test_several_samples_of_every_prompt(name, cache):
    model, inputs = tiny(name)
    model = copy.deepcopy(model).double()  # these weights make much of rounding
    options = {"do_sample": True, "num_return_sequences": 3, "eos_token_id": EOS["one"], "pad_token_id": PAD}
    torch.manual_seed(7)
    expected = theirs(model, inputs, **options)
    torch.manual_seed(7)
    out = engine.generate(model, inputs, **exact(cache, model), max_new_tokens=NEW, **options, output_scores=True)
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(out.scores, expected.scores, **AMPLIFIED)


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


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_stop_strings(shipped, cache):
    texts = ["class A:\n    def f(self", "import os\nimport re\nprint"]
    options = {"num_beams": 4, "num_return_sequences": 2, "stop_strings": ["self", "import", "\n\n"]}
    out = shipped.generate(texts, cache=cache, max_new_tokens=24, **options)
    shipped.tokenizer.padding_side = "left"
    inputs = shipped.tokenizer(texts, return_tensors="pt", padding=True)
    expected = theirs(shipped.model, inputs, tokenizer=shipped.tokenizer, max_new_tokens=24, **options)
    assert torch.equal(out.sequences, expected.sequences)
    assert "stop_string" in out.finish_reasons
    assert not any(stop in text for stop in options["stop_strings"] for text in out.text)


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


@pytest.mark.parametrize("name", ["llama", "mistral", "jamba"])
def test_a_cache_of_transformers_own(name):
    model, inputs = tiny(name)
    live = DynamicCache(config=model.config)
    out = engine.generate(model, inputs, past_key_values=live, max_new_tokens=NEW, **MIXED)
    same(out, theirs(model, inputs, past_key_values=DynamicCache(config=model.config), **MIXED))
    assert out.cache is live


@pytest.mark.slow
def test_compiled():
    torch._dynamo.reset()
    model, inputs = tiny("llama")
    generator = engine.Generator(model, config=engine.EngineConfig(cache="static", compile="aot_eager"))
    for beams in (4, 4, 3):
        options = MIXED | {"num_beams": beams}
        same(generator.generate(inputs, max_new_tokens=NEW, **options), theirs(model, inputs, **options))


@pytest.mark.parametrize("name", ["llama", "mistral", "bamba"])
def test_a_prompt_in_pieces(name):
    model, inputs = tiny(name)
    generator = engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=4))
    same(generator.generate(inputs, max_new_tokens=NEW, **MIXED), theirs(model, inputs, **MIXED))


@pytest.mark.parametrize("cache", caches.names())
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "jamba"])
def test_the_next_turn_after_a_beam_search(name, cache, monkeypatch):
    model, inputs = tiny(name)
    monkeypatch.setattr(Timeline, "slack", 16)  # a window that can go back to where the texts part
    if cache == "none":
        pytest.skip("nothing is kept")
    first = engine.generate(model, inputs, **exact(cache, model), num_beams=4, num_return_sequences=2, max_new_tokens=9)
    both = conversation(first, inputs)
    second = engine.generate(model, both, cache=first.cache, max_new_tokens=9)
    assert torch.equal(second.sequences, theirs(model, both, max_new_tokens=9).sequences)
    if name != "jamba":  # a state cannot go back to where the texts part: it reads all again
        assert second.stats.prompt_tokens <= 4 * (9 + 3)


@pytest.mark.parametrize("cache", ["dynamic", "offloaded", "quantized"])
def test_beams_go_on_from_a_cache(cache):
    model, inputs = tiny("llama")
    first = engine.generate(model, inputs, **exact(cache, model), max_new_tokens=9)
    both = conversation(first, inputs)
    out = engine.generate(model, both, cache=first.cache, max_new_tokens=9, **MIXED)
    same(out, theirs(model, both, max_new_tokens=9, **MIXED))


class Fails:
    """A logits processor that raises in its fifth call."""

    def __init__(self):
        self.left = 5

    def __call__(self, ids, scores):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("enough")
        return scores


@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded", "quantized", "none"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "bamba"])
def test_a_search_that_fails_on_the_way(name, cache):
    model, inputs = tiny(name)
    with pytest.raises(engine.GenerationInterrupted, match=r"4 new tokens per row .*enough") as failed:
        engine.generate(
            model, inputs, **exact(cache, model), num_beams=3, max_new_tokens=NEW, logits_processor=[Fails()]
        )
    partial = failed.value.partial
    assert partial.sequences.shape == (2, 13 + 4)  # the best beam of each prompt
    assert torch.equal(partial.sequences[:, :13], inputs["input_ids"])
    both = conversation(partial, inputs)
    again = engine.generate(model, both, cache=partial.cache, max_new_tokens=NEW)
    assert torch.equal(again.sequences, theirs(model, both).sequences)


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


def check_diverse(name, case, cache="dynamic", **processing):
    model, inputs = tiny(name, case["pads"])
    options = {option: case[option] for option in ("diversity_penalty", "length_penalty", "early_stopping")}
    options |= dict(zip(("num_beams", "num_beam_groups"), case["beams"], strict=True))
    options["num_return_sequences"], eos = case["returned"], EOS[case["eos"]]
    chosen = exact(cache, model) | processing
    out = engine.generate(model, inputs, max_new_tokens=9, eos_token_id=eos, pad_token_id=PAD, **options, **chosen)
    options |= {"new": 9, "eos_ids": eos or (), "pad_id": PAD, "processors": processing.get("logits_processor", ())}
    expected = [text for row in readers(model, inputs) for text in diverse(*row, **options)]
    assert out.tokens == [tokens for _, tokens in expected]
    torch.testing.assert_close(out.sequences_scores, torch.tensor([score for score, _ in expected]), **CLOSE)
    return out


@pytest.mark.parametrize("case", named(GROUP_CASES))
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_groups(name, case):
    check_diverse(name, case)


@pytest.mark.product
@pytest.mark.parametrize("beams", GROUPS["beams"])
@pytest.mark.parametrize("eos", EOS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_groups_with_a_fifth_of_all_options(name, eos, beams):
    for values in list(product(*(GROUPS | {"beams": [beams], "eos": [eos]}).values()))[::5]:
        check_diverse(name, dict(zip(GROUPS, values, strict=True)))


@pytest.mark.parametrize("cache", caches.names())
@pytest.mark.parametrize("name", ["llama", "mistral", "jamba", "bart"])
def test_groups_on_every_backend(name, cache):
    check_diverse(name, GROUP_CASES[len(cache) % len(GROUP_CASES)], cache)


@pytest.mark.parametrize(
    "processor", [RepetitionPenaltyLogitsProcessor(1.6), NoRepeatNGramLogitsProcessor(2), NoStutter()]
)
def test_groups_are_penalised_before_the_processors(processor):
    for case in GROUP_CASES[:3]:
        check_diverse("gpt2", case, logits_processor=[processor])


def test_groups_with_a_penalty_for_repetition_given_as_an_option():
    model, inputs = tiny("gpt2", pads=0)
    options = {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 0.5}
    out = engine.generate(model, inputs, max_new_tokens=9, repetition_penalty=1.4, **options)
    options |= {"new": 9, "processors": [RepetitionPenaltyLogitsProcessor(1.4)]}
    assert out.tokens == [diverse(*row, **options)[0][1] for row in readers(model, inputs)]


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "t5"))])
def test_the_reference_with_one_group_is_transformers_beam_search(name):
    for case in CASES[::3]:
        model, inputs = tiny(name, case["pads"])
        options = {option: case[option] for option in ("num_beams", "length_penalty", "early_stopping")}
        eos = EOS[case["eos"]]
        expected = theirs(model, inputs, **options, eos_token_id=eos, pad_token_id=PAD)
        one = {"new": NEW, "num_beam_groups": 1, "diversity_penalty": 0.0, "eos_ids": eos or ()}
        for number, row in enumerate(readers(model, inputs)):
            [(score, tokens)] = diverse(*row, **options, **one)
            assert expected.sequences[number, len(row[1]) :].tolist()[: len(tokens)] == tokens
            assert score == pytest.approx(float(expected.sequences_scores[number]), rel=1e-4)


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
