"""Guided texts equal those of a slow reference, which reads both texts of every row alone and keeps nothing."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps

import pytest
import torch
from architectures import prompt, tiny_model
from covering import pairwise
from multimodal import seeing_model, seen_prompt
from references import (
    CLOSE,
    Reader,
    Text,
    contrastive,
    conversation,
    diverse,
    draft_of,
    exact,
    never_run,
    processed,
    readers,
    tiny,
)
from transformers import DynamicCache, GenerationMixin, StaticCache

import caches
import engine
from strategies import Crop, Emit, Forward, Needs, Rows, read_prompt

pytestmark = pytest.mark.covering("values", "pairs")

NEW = 10
SCALE = 1.7
PAD = 3
EOS = (29, 5, 66, 94, 76, 26)
NEGATIVES = {  # without their pads
    "none": None,
    "shorter": [[40, 41, 42], [51, 52, 53, 54, 55]],
    "longer": [list(range(20, 40)), list(range(60, 77))],
    "one": [[9, 8, 7, 6]],
}


@dataclass
class Guided:
    """Reads a text after its prompt, and after `other` in place of it."""

    own: Reader
    others: Reader
    prompt: Text
    other: Text
    scale: float

    def read(self, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
        logits, states = self.own.read(text)
        other, _ = self.others.read(self.other + text[len(self.prompt) :])
        logits, other = logits.log_softmax(dim=-1), other.log_softmax(dim=-1)
        return self.scale * (logits - other) + other, states


def guided(model, inputs, negative=None, scale=SCALE) -> list[tuple[Guided, Text]]:
    """Of every row of `inputs` a reader and the prompt."""
    found = []
    for row, (own, text) in enumerate(readers(model, inputs)):
        other = text[-1:] if negative is None else tuple(negative[row % len(negative)])
        found.append((Guided(own, Reader(model), text, other, scale), text))
    return found


def padded(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """As arguments of the call."""
    columns = max(map(len, rows))
    ids = torch.tensor([[0] * (columns - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in rows])
    return {"negative_prompt_ids": ids, "negative_prompt_attention_mask": mask}


def step_by_step(choose, rows, new, eos_ids=(), processors=(), texts_per_row=1):
    """The new tokens of every row, as `choose` takes them from the scores of all rows."""
    rows = [row for row in rows for _ in range(texts_per_row)]
    texts = [prompt for _, prompt in rows]
    begin = len(texts[0])
    ended = [False] * len(rows)
    for _ in range(new):
        scores = [
            processed(processors, text, reader.read(text)[0]) for (reader, _), text in zip(rows, texts, strict=True)
        ]
        tokens = choose(torch.stack(scores)).tolist()
        texts = [(*text, PAD if over else token) for text, token, over in zip(texts, tokens, ended, strict=True)]
        ended = [over or text[-1] in eos_ids for text, over in zip(texts, ended, strict=True)]
        if all(ended):
            break
    return [until_eos(text[begin:], eos_ids) for text in texts]


def until_eos(tokens: Text, eos_ids: Sequence[int]) -> list[int]:
    ends = [place for place, token in enumerate(tokens) if token in eos_ids]
    return list(tokens[: ends[0] + 1] if ends else tokens)


def greedy(rows, **options):
    return step_by_step(lambda scores: scores.argmax(dim=-1), rows, **options)


def sampled(rows, num_return_sequences=1, do_sample=True, top_k=0, **options):
    torch.manual_seed(5)
    draw = lambda scores: torch.multinomial(scores.softmax(dim=-1), 1)[:, 0]  # noqa: E731
    return step_by_step(draw, rows, texts_per_row=num_return_sequences, **options)


def beams(rows, num_beam_groups=1, diversity_penalty=0.0, **options):
    groups = {"num_beam_groups": num_beam_groups, "diversity_penalty": diversity_penalty}
    return [tokens for row in rows for _, tokens in diverse(*row, pad_id=PAD, **groups, **options)]


def proposed(rows, new, eos_ids=(), **options):
    return greedy(rows, new=new, eos_ids=eos_ids)


def draft_for(strategy, name):
    return {"assistant_model": draft_of(name)} if strategy == "assisted" else {}


def one_by_one(rows, **options):
    return [contrastive(*row, **options) for row in rows]


# A strategy's options, and its slow reference.
STRATEGIES = {
    "greedy": ({}, greedy),
    "sampling": ({"do_sample": True, "top_k": 0}, sampled),
    "samples": ({"do_sample": True, "top_k": 0, "num_return_sequences": 3}, sampled),
    "2 beams": ({"num_beams": 2}, beams),
    "4 beams": ({"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5}, beams),
    "groups": ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7, "num_return_sequences": 2}, beams),
    "contrastive": ({"top_k": 3, "penalty_alpha": 0.6}, one_by_one),
    "prompt lookup": ({"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}, proposed),
    "assisted": ({"strategy": "assisted", "num_assistant_tokens": 4}, proposed),
}
MODELS = ["llama", "gpt2", "mistral", "gemma2", "bamba"]


def check(name, strategy, negative="none", pads=0, cache="dynamic", eos=(), config=None, **more):
    """The engine's text is the reference's."""
    model, inputs = tiny(name, pads)
    options, reference = STRATEGIES[strategy]
    given = {} if NEGATIVES[negative] is None else padded(NEGATIVES[negative])
    chosen = {"eos_token_id": list(eos) or None, "pad_token_id": PAD, "max_new_tokens": NEW, "guidance_scale": SCALE}
    torch.manual_seed(5)
    generator = engine.Generator(model, config=config)
    more |= draft_for(strategy, name)
    out = generator.generate(inputs, **chosen, **given, **options, **exact(cache, model), **more)
    rows = guided(model, inputs, NEGATIVES[negative])
    if "num_beams" in options:
        options = {"num_beam_groups": 1} | options
    assert out.tokens == reference(rows, new=NEW, eos_ids=eos, **options)
    return out


CASES = pairwise(strategy=list(STRATEGIES), name=MODELS, negative=list(NEGATIVES), pads=[0, 4], eos=[(), EOS])


@pytest.mark.parametrize("case", [pytest.param(c, id="-".join(map(str, c.values()))) for c in CASES])
def test_every_two_options(case):
    check(**case)


KINDS = ["llama", "gemma2", "jamba"]
CELLS = [(name, cache) for name in KINDS for cache in caches.names()]
TURNS = [(*cell, list(STRATEGIES)[n % len(STRATEGIES)], list(NEGATIVES)[n // 2 % 4]) for n, cell in enumerate(CELLS)]


@pytest.mark.parametrize(("name", "cache", "strategy", "negative"), TURNS)
def test_every_backend(name, cache, strategy, negative):
    check(name, strategy, negative, pads=4, cache=cache, eos=EOS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_scale_and_the_negative_prompt_change_the_text(strategy):
    """Else the comparisons would say little."""
    model, inputs = tiny("llama")
    options = STRATEGIES[strategy][0] | draft_for(strategy, "llama") | {"max_new_tokens": NEW}
    cases = [(1, "none"), (1.7, "none"), (1.7, "shorter"), (1.7, "longer"), (1.7, "one"), (0.4, "none")]
    cases, texts = cases if strategy in ("greedy", "groups") else cases[:3], set()
    for scale, negative in cases:
        given = {} if NEGATIVES[negative] is None else padded(NEGATIVES[negative])
        torch.manual_seed(0)
        texts.add(str(engine.generate(model, inputs, guidance_scale=scale, **given, **options).tokens))
    assert len(texts) == len(cases)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("negative", ["none", "shorter", "longer"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "jamba"])
def test_transformers_own_says_the_same_where_rows_stay_and_have_no_pads(name, negative, rows):
    model, inputs = tiny(name, pads=0)
    inputs = {key: value[:rows] for key, value in inputs.items()}
    given = {} if negative == "none" else {"negative_prompt_ids": torch.tensor(NEGATIVES[negative][:1] * rows)}
    record = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 20, "temperature": 1.3}):
        options |= {"max_new_tokens": NEW, "guidance_scale": SCALE, "repetition_penalty": 1.2} | record
        torch.manual_seed(7)
        expected = GenerationMixin.generate(model, **inputs, **given, **options)
        torch.manual_seed(7)
        out = engine.generate(model, inputs, **given, **options)
        assert torch.equal(out.sequences, expected.sequences)
        torch.testing.assert_close(out.scores, expected.scores, **CLOSE)
        torch.testing.assert_close(out.logits, expected.logits, **CLOSE)


TURNED = [("llama", "shorter", "greedy"), ("llama", "none", "4 beams"), ("jamba", "none", "contrastive")]
TURNED += [("jamba", "none", "4 beams"), ("gemma2", "longer", "greedy")]


@pytest.mark.parametrize("cache", [name for name in caches.names() if name != "none"])
@pytest.mark.parametrize("case", TURNED, ids="-".join)
def test_the_next_turn_goes_on_without_guidance(case, cache):
    """The cache holds the prompts' rows alone: all of them, or nothing where it had columns of other texts."""
    name, negative, strategy = case
    model, inputs = tiny(name)
    given = {} if NEGATIVES[negative] is None else padded(NEGATIVES[negative])
    given |= STRATEGIES[strategy][0] | {"guidance_scale": SCALE, "max_new_tokens": 5}
    first = engine.generate(model, inputs, **exact(cache, model), **given)
    if negative == "longer":
        assert (first.cache.total_tokens, first.cache.log) == (0, None)
    else:
        assert torch.equal(first.cache.log.ids, first.sequences)
        assert first.cache.batch_size == len(first.sequences) or (name, strategy) == ("jamba", "4 beams")
    both = conversation(first, inputs)
    second = engine.generate(model, both, cache=first.cache, max_new_tokens=5)
    assert second.tokens == engine.generate(model, both, cache="none", max_new_tokens=5).tokens


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", ["llama", "mistral", "jamba"])
def test_caches_of_transformers_own(name, kind):
    model, inputs = tiny(name)
    for negative, strategy in (("shorter", "greedy"), ("longer", "greedy"), ("none", "contrastive")):
        size = {"max_cache_len": 64} if kind is StaticCache else {}
        if (name == "jamba" and kind is StaticCache) or (strategy == "contrastive" and kind is StaticCache):
            continue  # transformers' fixed caches cannot become more rows
        live = kind(config=model.config, **size)
        rows = guided(model, inputs, NEGATIVES[negative])
        given = {} if negative == "none" else padded(NEGATIVES[negative])
        options, reference = STRATEGIES[strategy]
        out = engine.generate(
            model, inputs, past_key_values=live, max_new_tokens=NEW, guidance_scale=SCALE, **options, **given
        )
        assert out.tokens == reference(rows, new=NEW, **options)
        again = conversation(out, inputs)
        expected = engine.generate(model, again, cache="none", max_new_tokens=5)
        assert engine.generate(model, again, past_key_values=live, max_new_tokens=5).tokens == expected.tokens


class Told:
    """Two texts of every prompt whose rows change places, whatever the logits say; their last tokens are fed twice."""

    name, samples, needs = "told", False, Needs(rows_per_prompt=2)

    def flow(self, task):
        ids, _ = yield from read_prompt(task, 2)
        for token in range(NEW):
            yield Emit(torch.arange(4)[:, None] * 11 + token + 5)
            yield Rows(torch.tensor([1, 0, 3, 3]))
            ids = yield Emit(torch.full((4, 1), token + 60))
            yield Forward(ids[:, -2:].repeat(1, 2))
            yield Crop(2)


def test_records_are_those_of_the_same_text_without_guidance(monkeypatch):
    model, inputs = tiny("llama")
    monkeypatch.setattr(model.config, "_attn_implementation", "eager")
    record = {f"output_{name}": True for name in ("logits", "attentions", "hidden_states")}
    plain = engine.generate(model, inputs, strategy=Told(), max_new_tokens=2 * NEW + 3, **record)
    given = padded(NEGATIVES["shorter"])
    out = engine.generate(
        model, inputs, strategy=Told(), max_new_tokens=2 * NEW + 3, guidance_scale=SCALE, **given, **record
    )
    assert torch.equal(out.sequences, plain.sequences)
    assert len(out.attentions) == NEW + 1
    for name in ("logits", "attentions", "hidden_states"):
        torch.testing.assert_close(getattr(out, name), getattr(plain, name), **CLOSE)
    assert out.cache.total_tokens == plain.cache.total_tokens
    assert torch.equal(out.cache.log.ids, plain.cache.log.ids)


@dataclass(frozen=True)
class Hesitant:
    """Takes back `begin` tokens of the prompt, and two wrong ones before every right one; its rows change places."""

    begin: int
    name, samples = "hesitant", False

    def flow(self, task):
        logits = yield Forward(task.ids)
        if self.begin:
            yield Crop(self.begin)
            logits = yield Forward(task.ids[:, -self.begin :])
        for _ in range(NEW):
            yield Rows(torch.tensor([1, 0]))
            yield Forward(torch.full((2, 2), 77))
            yield Crop(2)
            yield Rows(torch.tensor([1, 0]))
            ids = yield Emit(logits.argmax(dim=-1, keepdim=True))
            logits = yield Forward(ids[:, -1:])


@pytest.mark.parametrize(
    ("negative", "cache"), [*zip(NEGATIVES, ["dynamic", "static", "dynamic", "none"], strict=True)]
)
@pytest.mark.parametrize(("name", "begin"), [("llama", 5), ("gemma2", 5), ("jamba", 0)])  # states are not of pads alone
def test_what_is_taken_back_is_taken_back_in_both_texts(name, begin, negative, cache):
    model, inputs = tiny(name)
    given = {} if NEGATIVES[negative] is None else padded(NEGATIVES[negative])
    given |= {"guidance_scale": SCALE, "max_new_tokens": NEW + 2}  # it looks so far ahead
    out = engine.generate(model, inputs, cache=cache, strategy=Hesitant(begin), **given)
    assert out.tokens == greedy(guided(model, inputs, NEGATIVES[negative]), new=NEW)


@pytest.mark.parametrize(
    ("name", "strategy"), [("mistral", "greedy"), ("mistral", "contrastive"), ("jamba", "4 beams")]
)
def test_prompts_in_pieces(name, strategy):
    for negative in ("none", "longer"):
        check(name, strategy, negative, pads=4, config=engine.EngineConfig(prefill_chunk_tokens=3))


def test_beams_share_what_both_texts_begin_with(monkeypatch):
    forks, fork = [], caches.Cache.fork
    monkeypatch.setattr(caches.Cache, "fork", lambda cache, times: (forks.append(times), fork(cache, times)))
    check("llama", "4 beams")
    assert forks == [4]


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl", "qwen2_5_vl"])
def test_a_model_that_sees_images_guided_by_words(name):
    model = seeing_model(name)
    ids, given = torch.randint(2, 80, (2, 9)), {"negative_prompt_ids": torch.randint(2, 80, (2, 12))}
    mask = torch.ones_like(ids)
    out = engine.generate(
        model, {"input_ids": ids, "attention_mask": mask}, max_new_tokens=NEW, guidance_scale=SCALE, **given
    )
    rows = guided(model, {"input_ids": ids, "attention_mask": mask}, given["negative_prompt_ids"].tolist())
    assert out.tokens == greedy(rows, new=NEW)


def test_a_model_that_takes_pads_for_text_needs_texts_of_one_length():
    model, inputs = tiny_model("bart"), prompt(pads=0)
    with pytest.raises(
        engine.OptionError, match=r"BartForCausalLM pad tokens before a text change .* the prompt has, 13, for all 2"
    ):
        engine.generate(model, inputs, guidance_scale=SCALE)
    equal = [list(range(20, 33)), list(range(60, 73))]
    out = engine.generate(model, inputs, max_new_tokens=NEW + 1, guidance_scale=SCALE, **padded(equal))
    assert [row[:NEW] for row in out.tokens] == greedy(guided(model, inputs, equal), new=NEW)  # its last one is forced


def test_texts_and_a_stream(shipped):
    """Negative prompts may be texts, of any length: pads are none of the text."""
    texts = ["class A:\n    def f(self", "import os\nimport re\nprint"]
    options = {"max_new_tokens": 16, "guidance_scale": 1.4, "stop_strings": ["self", "\n\n"]}
    for negative in ("def", ["def", "import a\nimport b\nimport c\nimport d\nimport e\n"]):
        stream = shipped.stream(texts, negative_prompt=negative, **options)
        shown = ["", ""]
        for piece in stream:
            shown[piece.row] += piece.text
        rows = [negative] * 2 if isinstance(negative, str) else negative
        given = padded([shipped.tokenizer(text)["input_ids"] for text in rows])
        assert shown == stream.result().text == shipped.generate(texts, **given, **options).text
        pairs = zip(texts, rows, strict=True)
        alone = [shipped.generate(text, negative_prompt=row, **options).text[0] for text, row in pairs]
        assert shown == alone
    ids = [shipped.tokenizer(text)["input_ids"] for text in rows]
    pad = shipped.tokenizer.pad_token_id
    longest = max(map(len, ids))
    unmasked = torch.tensor([[pad] * (longest - len(row)) + row for row in ids])
    assert shipped.generate(texts, negative_prompt_ids=unmasked, **options).text == shown
    wider = torch.nn.functional.pad(unmasked, (9, 0), value=pad)  # columns of pads alone say nothing
    out = shipped.generate(
        texts, negative_prompt_ids=wider[:1], negative_prompt_attention_mask=wider[:1] != pad, **options
    )
    assert out.cache.total_tokens > 0


def test_tokens_of_both_texts_are_read():
    out = check("llama", "greedy", "shorter", pads=4)
    assert out.stats.prompt_tokens == 2 * 13 - 4 + 3 + 5


@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("negative", ["shorter", "longer"])
@pytest.mark.parametrize("ours", [True, False])
def test_after_a_failure_the_cache_is_of_the_prompts_or_empty(ours, negative, call, monkeypatch):
    model, inputs = tiny("llama")
    forward, calls = model.forward, []

    @wraps(forward)
    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("enough")
        return forward(*arguments, **options)

    check_pads_once(model, inputs)
    monkeypatch.setattr(model, "forward", failing)
    live = caches.build("dynamic", model.config) if ours else DynamicCache(config=model.config)
    with pytest.raises(engine.GenerationInterrupted, match="enough") as failed:
        engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=8)).generate(
            inputs, cache=live, guidance_scale=SCALE, max_new_tokens=NEW, **padded(NEGATIVES[negative])
        )
    monkeypatch.undo()
    partial = failed.value.partial
    assert partial.cache is live
    assert caches.driven(live).batch_size in (-1, 2)
    assert (live.get_seq_length() == 0) == (negative == "longer" or call == 1)
    both = {"input_ids": partial.sequences, "attention_mask": torch.ones_like(partial.sequences)}
    both["attention_mask"][:, :13] = inputs["attention_mask"]
    rest = engine.generate(model, both, cache=live, max_new_tokens=4)
    assert rest.tokens == engine.generate(model, both, cache="none", max_new_tokens=4).tokens


def test_a_fixed_cache_takes_the_rows_of_both_texts_when_it_begins():
    model, inputs = tiny("llama")
    live = caches.build("static", model.config, max_cache_len=64)
    with pytest.raises(caches.CapacityError, match=r"2 prompts are to become 8 rows, .* has room for 4"):
        engine.generate(model, inputs, cache=live, guidance_scale=SCALE, num_beams=2)
    out = engine.generate(model, inputs, cache=live, guidance_scale=SCALE, max_new_tokens=NEW)
    assert out.tokens == greedy(guided(model, inputs), new=NEW)


def test_a_fixed_cache_of_transformers_own_for_the_rows_of_both_texts():
    model, inputs = tiny("llama")
    live = StaticCache(model.config, max_cache_len=64)
    live.early_initialization(4, 2, 8, torch.float32, "cpu")
    out = engine.generate(model, inputs, past_key_values=live, guidance_scale=SCALE, max_new_tokens=NEW)
    assert out.tokens == greedy(guided(model, inputs), new=NEW)


def test_a_cache_that_another_run_has_used_meanwhile_is_left_alone():
    model, inputs = tiny("llama")
    live = caches.build("dynamic", model.config)
    stream = engine.stream(model, inputs, cache=live, guidance_scale=SCALE)
    engine.generate(model, inputs, cache=live, max_new_tokens=3)
    with pytest.raises(engine.GenerationInterrupted, match="another run or loop used it"):
        next(stream)
    assert live.total_tokens == 15


def check_pads_once(model, inputs):
    """Whether the model leaves out pads is tried once per model, before its text."""
    engine.generate(model, inputs, guidance_scale=SCALE, max_new_tokens=1)


def test_inputs_that_guidance_cannot_do_without_are_refused(monkeypatch):
    model, inputs = tiny("llama")
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    first = engine.generate(model, inputs, max_new_tokens=5)
    never_run(model, monkeypatch)
    again = conversation(first, inputs)
    with pytest.raises(engine.OptionError, match="the cache holds 17 tokens of the prompts' side alone"):
        engine.generate(model, again, cache=first.cache, guidance_scale=2)
    with pytest.raises(engine.OptionError, match="in place of inputs_embeds"):
        engine.generate(model, inputs_embeds=embeds, guidance_scale=2)
    live = caches.build("static", model.config, max_cache_len=64, max_batch_size=2)
    with pytest.raises(caches.CapacityError, match=r"2 prompts are to become 4 rows, .* has room for 2"):
        engine.generate(model, inputs, cache=live, guidance_scale=2)
    other = StaticCache(model.config, max_cache_len=64)
    other.early_initialization(2, 2, 8, torch.float32, "cpu")
    with pytest.raises(engine.OptionError, match=r"two rows for each of 2 prompts, but the StaticCache .* for 2 rows"):
        engine.generate(model, inputs, past_key_values=other, guidance_scale=2)
    with pytest.raises(engine.InputError, match="the cache holds 2 rows, but the prompt has 1"):
        engine.generate(model, inputs["input_ids"][:1], past_key_values=other)
    seeing = seeing_model("gemma3")
    never_run(seeing, monkeypatch)
    with pytest.raises(engine.OptionError, match=r"in place of .*pixel_values"):
        engine.generate(seeing, seen_prompt("gemma3"), guidance_scale=2)
    translating, source = tiny("t5")
    never_run(translating, monkeypatch)
    with pytest.raises(engine.OptionError, match="T5ForConditionalGeneration reads its prompt with an encoder"):
        engine.generate(translating, source, guidance_scale=2)


def test_pads_without_a_mask_are_found_as_in_prompts():
    model, inputs = tiny("llama")
    ids = padded(NEGATIVES["shorter"])["negative_prompt_ids"]
    out = engine.generate(model, inputs, negative_prompt_ids=ids, guidance_scale=SCALE, max_new_tokens=NEW)
    assert out.tokens == greedy(guided(model, inputs, NEGATIVES["shorter"]), new=NEW)


def test_no_guidance_is_none():
    model, inputs = tiny("llama")
    plain = engine.generate(model, inputs, max_new_tokens=NEW)
    for scale in (None, 1, 1.0):
        out = engine.generate(model, inputs, max_new_tokens=NEW, guidance_scale=scale)
        assert torch.equal(out.sequences, plain.sequences)
        assert out.stats.cache_bytes == plain.stats.cache_bytes


@pytest.mark.parametrize("cache", ["dynamic", "none"])
def test_records_are_of_the_prompts_columns_alone(cache):
    """A longer negative prompt has pads put before the prompts."""
    model, ids = tiny_model("llama"), torch.tensor([[5, 9, 13]])
    negative = torch.tensor([[7, 11, 17, 19, 23]])
    options = dict(guidance_scale=1.5, negative_prompt_ids=negative, max_new_tokens=3, output_hidden_states=True)
    out = engine.generate(model, ids, cache=cache, **options)
    theirs = model.generate(ids, do_sample=False, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, theirs.sequences)
    for mine, other in zip(out.hidden_states, theirs.hidden_states, strict=True):
        for layer, expected in zip(mine, other, strict=True):
            torch.testing.assert_close(layer[:, -expected.shape[1] :], expected, atol=1e-4, rtol=1e-4)
    assert out.hidden_states[0][0].shape[1] == 3


def test_memory_that_is_out_in_the_trial_of_padding():
    model, faults = copy.deepcopy(tiny_model("llama")), []

    def out_once(*_):
        faults.append(len(faults))
        if len(faults) == 1:
            raise torch.OutOfMemoryError("out of memory")

    model.register_forward_pre_hook(out_once)
    asked = {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[5, 6]]), "max_new_tokens": 4}
    ids = torch.arange(3, 12)[None]
    expected = engine.generate(tiny_model("llama"), ids, **asked)
    assert engine.generate(model, ids, **asked).tokens == expected.tokens
