"""Processors that keep something per row follow their rows, and what is taken back, whatever the strategy does."""

import inspect
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from constraints import CHOICES, END, NEW, PAD, Constraint, Drafting, one_of, tree
from places import ROOT
from references import contrastive, diverse, draft_of, readers, tiny
from transformers import GenerationMixin, SynthIDTextWatermarkingConfig
from transformers.generation.logits_process import (
    DiaEOSDelayPatternLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

import engine
from engine.request.logits_processors import Processing
from strategies import Emit, Forward, Needs, Rows, read_prompt

pytestmark = pytest.mark.covering("values", "pairs")


def test_the_documentation_shows_this_very_class():
    assert inspect.getsource(Constraint) in (ROOT / "docs" / "extend" / "logits-processor.md").read_text()


@dataclass
class Stateless:
    """The same, reading all ids every time."""

    prompt: int = 13

    def __call__(self, ids, scores):
        constrained = torch.full_like(scores, float("-inf"))
        for row, text in enumerate(ids[:, self.prompt :].tolist()):
            node = tree()
            for token in text:
                node = node.get(token, {})
            allowed = list(node) or [END]
            constrained[row, allowed] = scores[row, allowed]
        return constrained


@dataclass(frozen=True)
class Swapping:
    """Two greedy texts of every prompt, whose rows change places with those of the other prompt."""

    name, samples, needs = "swapping", False, Needs(rows_per_prompt=2)

    def flow(self, task):
        ids, logits = yield from read_prompt(task, 2)
        order = torch.tensor([3, 1, 0, 2])
        while True:
            scores = task.process(ids, logits)
            task.process(ids, logits)  # asked twice
            yield Emit(scores.argmax(dim=-1, keepdim=True))
            yield Rows(order)
            ids = yield Emit(torch.full((4, 0), 0))
            logits = yield Forward(ids[:, -1:])


RUNS = {
    "greedy": {},
    "2 beams": {"num_beams": 2},
    "5 beams": {"num_beams": 5, "num_return_sequences": 4, "length_penalty": 0.3},
    "drawn beams": {"num_beams": 3, "do_sample": True, "top_k": 0},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.9, "num_return_sequences": 4},
    "samples": {"do_sample": True, "top_k": 0, "num_return_sequences": 3},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "guided beams": {"num_beams": 3, "guidance_scale": 1.5},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
    "assisted": {"strategy": "assisted", "num_assistant_tokens": 3},
    "drafting": {"strategy": Drafting()},
    "swapping": {"strategy": Swapping()},
}


def draft_for(options, name):
    return {"assistant_model": draft_of(name)} if options.get("strategy") == "assisted" else {}


def run(processor, options, name="llama", cache="dynamic", rows=2):
    model, inputs = tiny(name)
    inputs = {key: value[:rows] for key, value in inputs.items()}
    options = options | draft_for(options, name)
    torch.manual_seed(1)
    return engine.generate(
        model, inputs, cache=cache, logits_processor=[processor], max_new_tokens=NEW + 4, eos_token_id=END,
        pad_token_id=PAD, **options,
    ).tokens  # fmt: skip


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(("name", "cache"), [("llama", "dynamic"), ("gemma2", "static"), ("jamba", "dynamic")])
def test_the_text_is_that_of_a_processor_that_reads_everything(name, cache, options):
    found = run(one_of(), options, name, cache)
    assert found == run(Stateless(), options, name, cache)
    assert all(text[:-1] in CHOICES and text[-1] == END for text in found)
    assert name != "llama" or len({str(text) for text in found}) > 1


@pytest.mark.parametrize("options", ["greedy", "samples", "drafting"])
def test_columns_that_the_host_reads_late_are_pads_in_the_end(options, monkeypatch):
    monkeypatch.setattr("engine.decoding.token_buffer.reads_late", lambda device: True)
    assert run(one_of(), RUNS[options]) == run(Stateless(), RUNS[options])


class Rooted(Constraint):
    def select_rows(self, index):
        """Every row stays where it is, or is a copy of the first."""
        self.states = [list(self.states[min(row, len(self.states) - 1)]) for row in range(len(index))]


class Stubborn(Constraint):
    def crop(self, columns):
        if columns == 0:
            self.states = []


@pytest.mark.parametrize(("kind", "options"), [(Rooted, "5 beams"), (Rooted, "swapping"), (Stubborn, "drafting")])
def test_without_following_the_text_is_another(kind, options):
    """Else the test above would say little."""
    assert run(one_of(kind), RUNS[options]) != run(one_of(), RUNS[options])


def test_one_object_serves_one_run_after_the_other():
    processor = one_of()
    for options in RUNS.values():
        for rows in (2, 1):
            if rows == 1 and options.get("strategy") == Swapping():
                continue
            assert run(processor, options, rows=rows) == run(one_of(), options, rows=rows)


class Recorder:
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def __call__(self, ids, scores):
        self.told.append(tuple(ids.shape))
        return scores

    def select_rows(self, index):
        assert index.device.type == "cpu"
        self.told.append(index.tolist())

    def crop(self, columns):
        self.told.append(columns)


def test_what_a_follower_is_told():
    recorder = Recorder()
    run(recorder, RUNS["samples"] | {"num_return_sequences": 2})  # nothing is kept when the prompts become more rows
    assert recorder.told == [0, *((4, 13 + step) for step in range(NEW + 4))]

    recorder = Recorder()
    run(recorder, RUNS["contrastive"])
    told = iter(recorder.told)
    assert next(told) == 0
    for column, (called, candidates, chosen) in enumerate(zip(told, told, told, strict=True)):
        assert (called, candidates) == ((2, 13 + column), [0] * 4 + [1] * 4)
        assert chosen[0] < 4 <= chosen[1]

    recorder = Recorder()
    run(recorder, RUNS["drafting"])
    assert recorder.told[:7] == [0, (2, 13), (2, 14), (2, 15), (2, 16), 13, (2, 14)]


def called(texts_and_rows):
    """What a follower is told when these texts are processed one after the other, and these rows taken."""
    recorder = Recorder()
    processing = Processing([recorder], torch.tensor([[1, 2], [3, 4]]))
    for given in texts_and_rows:
        if isinstance(given, torch.Tensor):
            processing.select_rows(given)
        else:
            processing(torch.tensor(given), torch.zeros(len(given), 5))
    return recorder.told


def test_columns_are_forgotten_from_the_first_that_differs():
    first = [[1, 2, 5, 6], [3, 4, 7, 8]]
    again = [0, (2, 4)]
    assert called([first, first]) == [*again, (2, 4)]
    assert called([first, [[1, 2, 5], [3, 4, 7]]]) == [*again, 3, (2, 3)]
    # As long as before, or longer, with another token in one row: drafts that were not accepted.
    assert called([first, [[1, 2, 5, 6], [3, 4, 9, 8]]]) == [*again, 2, (2, 4)]
    assert called([first, [[1, 2, 5, 6, 7], [3, 4, 7, 9, 9]]]) == [*again, 3, (2, 5)]
    # Rows that have changed places have not changed.
    assert called([first, torch.tensor([1, 0]), first[::-1]]) == [*again, [1, 0], (2, 4)]
    # Before the first call nothing is kept.
    assert called([torch.tensor([0, 0, 1, 1]), [first[0]] * 4]) == [0, (4, 4)]


def test_the_texts_it_was_given_are_remembered_not_the_memory_they_were_in():
    recorder = Recorder()
    processing = Processing([recorder], torch.tensor([[1, 2]]))
    ids = torch.tensor([[1, 2, 5]])
    processing(ids, torch.zeros(1, 5))
    ids[0, 2] = 6
    processing(ids, torch.zeros(1, 5))
    assert recorder.told == [0, (1, 3), 2, (1, 3)]


def test_other_rows_without_a_word_are_refused():
    with pytest.raises(engine.EngineError, match=r"4 rows processed after those of 2, .* yield Rows in between"):
        called([[[1, 2], [3, 4]], [[1, 2]] * 4])


def test_half_a_follower_is_refused(monkeypatch):
    class Half(Recorder):
        crop = None

    model, inputs = tiny("llama")
    for options in ({"logits_processor": [Half()]}, {"prefix_allowed_tokens_fn": Half()}):
        with pytest.raises(engine.OptionError, match=r"Half has select_rows\(\) alone of the two methods of an engine"):
            engine.generate(model, inputs, **options)


class Allowed:
    """For `prefix_allowed_tokens_fn`: it counts its columns, of every row and beam."""

    def __init__(self, beams):
        self.beams, self.asked, self.states = beams, 0, []

    def __call__(self, prompt, ids):
        if not self.states:
            self.prompt, self.states, self.asked = len(ids), [[tree()] for _ in range(2 * self.beams)], 0
        states = self.states[self.asked % len(self.states)]
        self.asked += 1
        for token in ids[self.prompt + len(states) - 1 :].tolist():
            states.append(states[-1].get(token, {}))
        return list(states[-1]) or [END]

    select_rows, crop = Constraint.select_rows, Constraint.crop


@pytest.mark.parametrize("options", ["greedy", "5 beams", "contrastive", "drafting"])
def test_a_function_for_prefixes_may_follow_too(options):
    model, inputs = tiny("llama")
    options = RUNS[options]
    allowed = Allowed(options.get("num_beams", 1))
    out = engine.generate(
        model, inputs, prefix_allowed_tokens_fn=allowed, max_new_tokens=NEW + 4, eos_token_id=END, pad_token_id=PAD,
        **options,
    )  # fmt: skip
    assert out.tokens == run(Stateless(), options)


# transformers' own.

MARK = {"keys": [654, 400, 836, 123], "ngram_len": 3, "context_history_size": 4}


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_watermark_is_transformers_own_where_rows_stay(name, skip):
    model, inputs = tiny(name, pads=0)
    options = {"watermarking_config": SynthIDTextWatermarkingConfig(**MARK, skip_first_ngram_calls=skip)}
    options |= {"do_sample": True, "top_k": 9, "max_new_tokens": 40, "num_return_sequences": 2}
    torch.manual_seed(2)
    expected = GenerationMixin.generate(model, **inputs, **options)
    torch.manual_seed(2)
    out = engine.generate(model, inputs, **options)
    assert torch.equal(out.sequences, expected)
    torch.manual_seed(2)
    plain = engine.generate(model, inputs, **options | {"watermarking_config": None})
    assert not torch.equal(plain.sequences, expected)


def watermark(**options):
    size = {"sampling_table_size": 2**16, "sampling_table_seed": 0}
    return SynthIDTextWatermarkLogitsProcessor(**MARK, **size, **options, device=torch.device("cpu"))


def marked(prompt, ids, scores, **options):
    """By a watermark that sees the texts from their beginning."""
    mark = watermark(**options)
    for column in range(prompt, ids.shape[1]):
        mark(ids[:, :column], scores)
    return mark(ids, scores)


@pytest.mark.parametrize("skip", [False, True])
def test_a_watermark_knows_what_it_has_marked_from_the_ids_alone(skip):
    """Texts of few tokens, the 0 that contexts begin with among them, so that contexts come again."""
    marks = {"skip_first_ngram_calls": skip}
    texts, scores = torch.randint(0, 3, (60, 40)), torch.randn(60, 101)
    processing = Processing([watermark(**marks)], texts[:, :2])
    for columns in (2, 3, 4, 9, 7, 40, 20):
        expected = marked(2, texts[:, :columns], scores, **marks)
        assert torch.equal(processing(texts[:, :columns], scores), expected)


@pytest.mark.parametrize("given", ["option", "object"])
@pytest.mark.parametrize("strategy", ["5 beams", "contrastive", "drafting"])
def test_a_watermark_follows_rows_and_what_is_taken_back(strategy, given):
    model, inputs = tiny("llama")
    mark = {"watermarking_config": SynthIDTextWatermarkingConfig(**MARK)}
    if given == "object":
        mark = {"logits_processor": [watermark()]}
    options = RUNS[strategy] | {"max_new_tokens": NEW}
    out = engine.generate(model, inputs, **options, **mark)
    assert out.tokens != engine.generate(model, inputs, **options).tokens
    alone = {"new": NEW, "processors": [partial(marked, 13)]}
    rows = readers(model, inputs)
    if strategy == "5 beams":
        alone |= RUNS[strategy] | {"num_beam_groups": 1, "diversity_penalty": 0.0}
        assert out.tokens == [text for row in rows for _, text in diverse(*row, **alone)]
    elif strategy == "contrastive":
        assert out.tokens == [contrastive(*row, **alone, **RUNS[strategy]) for row in rows]
    else:
        greedy = engine.generate(model, inputs, max_new_tokens=NEW, logits_processor=[Each(partial(marked, 13))])
        assert out.tokens == greedy.tokens


@dataclass
class Each:
    """Every row alone."""

    processor: object

    def __call__(self, ids, scores):
        rows = zip(ids.split(1), scores.split(1), strict=True)
        return torch.cat([self.processor(*row) for row in rows])


@pytest.mark.parametrize("name", ["gpt2", "t5"])
@pytest.mark.parametrize("option", ["encoder_repetition_penalty", "encoder_no_repeat_ngram_size"])
def test_every_beam_is_compared_with_its_own_source(name, option):
    model, inputs = tiny(name, pads=0)
    options = {"num_beams": 3, "num_return_sequences": 2}
    value = 1.8 if option == "encoder_repetition_penalty" else 1
    out = engine.generate(model, inputs, max_new_tokens=NEW, **options, **{option: value})
    expected = []
    kind = EncoderRepetitionPenaltyLogitsProcessor if value == 1.8 else EncoderNoRepeatNGramLogitsProcessor
    for row, source in zip(readers(model, inputs), inputs["input_ids"].split(1), strict=True):
        processors = [kind(value, source)]
        found = diverse(*row, new=NEW, num_beam_groups=1, diversity_penalty=0.0, processors=processors, **options)
        expected += [text for _, text in found]
    assert out.tokens == expected
    assert out.tokens != engine.generate(model, inputs, max_new_tokens=NEW, **options).tokens


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda model: UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model), "give guidance_scale and negative"),
        (lambda _: DiaEOSDelayPatternLogitsProcessor([0, 2], END, 20), "only Dia's own generate"),
    ],
)
def test_processors_that_count_what_they_cannot_know_are_refused(processor, message):
    model, inputs = tiny("llama")
    with pytest.raises(engine.OptionError, match=message):
        engine.generate(model, inputs, logits_processor=[processor(model)])


# In transformers 5.17 the penalty looks at pads too, so it says the same of all prompts.
TAKES_PADS = "Tensor" in str(inspect.signature(RepetitionPenaltyLogitsProcessor.__init__))
LOOKS_AT_PADS = pytest.mark.skipif(not TAKES_PADS, reason="this release of transformers does not leave pads out")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        pytest.param({"repetition_penalty": 1.3}, "RepetitionPenalty", marks=LOOKS_AT_PADS),
        ({"prefix_allowed_tokens_fn": lambda prompt, ids: [5 + prompt]}, "PrefixConstrained"),
        ({"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGram"),
    ],
)
def test_what_knows_prompts_by_their_place_is_refused_where_they_change_it(options, name):
    model, inputs = tiny("llama")
    with pytest.raises(
        engine.GenerationInterrupted, match=rf"{name}LogitsProcessor knows by its place which prompt a row is of"
    ):
        engine.generate(model, inputs, strategy=Swapping(), max_new_tokens=NEW, **options)


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_what_knows_prompts_by_their_place_works_where_they_keep_it(options):
    model, inputs = tiny("llama")
    options = {} if options.get("strategy") == Swapping() else options | draft_for(options, "llama")
    knows = {"repetition_penalty": 1.3, "prefix_allowed_tokens_fn": lambda prompt, ids: range(2 + prompt, 101, 2)}
    out = engine.generate(model, inputs, max_new_tokens=NEW, encoder_no_repeat_ngram_size=2, **knows, **options)
    for row, text in enumerate(out.tokens):  # samples have numbers of their own, as in transformers
        prompt = row if options.get("do_sample") and "num_beams" not in options else row // (len(out.tokens) // 2)
        assert {token % 2 for token in text} == {prompt % 2}


def test_a_penalty_without_pads_is_the_same_for_all_prompts():
    model, inputs = tiny("llama", pads=0)
    out = engine.generate(model, inputs, strategy=Swapping(), max_new_tokens=1, repetition_penalty=1.3)
    greedy = engine.generate(model, inputs, max_new_tokens=1, repetition_penalty=1.3)
    assert sorted(out.tokens) == sorted(greedy.tokens * 2)
