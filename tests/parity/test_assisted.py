"""Assisted decoding and prompt lookup with models: the text is that of greedy search, on every backend."""

import copy
import gc
import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from architectures import suiting, tiny_model
from helpers import StopAfter
from references import conversation, draft_of, exact, never_run, tiny
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedTokenizerFast, StaticCache
from transformers.generation import NoRepeatNGramLogitsProcessor

import engine
from strategies import Assisted

pytestmark = pytest.mark.covering("values", "pairs")

NEW = 14
KINDS = ["llama", "mistral", "gemma2", "mamba", "jamba", "bamba", "t5"]
ALL = 0.0  # no threshold: every draft is as long as was said


def of_rows(name, rows):
    return tiny(name, pads=0 if name in ("t5", "bart") else 4, rows=rows)  # there they mean a prompt of two rows


def bad_draft(name):
    """One that hardly ever says the same."""
    return draft_of(name, noise=1.0)


def drafts(name):
    return {"the model itself": tiny(name)[0], "a good one": draft_of(name), "a bad one": bad_draft(name)}


def assisted(model, inputs, draft, tokens=5, **options):
    options = {"max_new_tokens": NEW, "assistant_confidence_threshold": ALL} | options
    return engine.generate(model, inputs, assistant_model=draft, num_assistant_tokens=tokens, **options)


def greedy(model, inputs, **options):
    return engine.generate(model, inputs, **{"max_new_tokens": NEW} | options)


def same(out, expected):
    assert torch.equal(out.sequences, expected.sequences)
    assert out.tokens == expected.tokens
    assert out.finish_reasons == expected.finish_reasons
    assert out.stats.new_tokens == expected.stats.new_tokens


@pytest.mark.parametrize("draft", ["the model itself", "a good one", "a bad one"])
@pytest.mark.parametrize("name", [*KINDS, "lfm2", "falcon_h1", "whisper"])
def test_every_kind_of_model_and_draft(name, draft):
    if suiting_or_none(name) == ["none"]:
        pytest.skip("this release of transformers does not know it")
    model, inputs = tiny(name)
    out = assisted(model, inputs, drafts(name)[draft])
    same(out, greedy(model, inputs))
    if draft == "the model itself":
        assert out.stats.accepted_tokens == out.stats.drafted_tokens
        assert out.stats.verifications <= 3


def suiting_or_none(name):
    return ["dynamic"] if name in ("t5", "bart", "whisper") else suiting(name)


def test_a_draft_of_another_kind_than_the_model():
    """Its windows and states forget, so that it has to read the text again after every round."""
    model, inputs = tiny("llama", rows=3)
    for name in ("mistral", "gemma2", "mamba", "bamba", "gpt2"):
        same(assisted(model, inputs, tiny_model(name)), greedy(model, inputs))


@pytest.mark.parametrize("new", [1, 2, 3, 7])
@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_nothing_is_proposed_beyond_the_end(name, new):
    model, inputs = tiny(name)
    for cache in ("dynamic", "none"):
        options = {"max_new_tokens": new, "cache": cache}
        same(assisted(model, inputs, draft_of(name), 20, **options), greedy(model, inputs, **options))
        same(engine.generate(model, inputs, prompt_lookup_num_tokens=20, **options), greedy(model, inputs, **options))


@pytest.mark.parametrize(
    "name", ["mistral", "t5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bamba"))]
)
def test_rows_end_where_greedy_ones_do(name):
    model, inputs = of_rows(name, 4)
    free, ended = greedy(model, inputs, max_new_tokens=20), set()
    for column in (2, 9):
        eos = [int(free.tokens[0][column]), int(free.tokens[-1][column + 3])]
        expected = greedy(model, inputs, eos_token_id=eos, pad_token_id=3, max_new_tokens=20)
        for draft in drafts(name).values():
            out = assisted(model, inputs, draft, eos_token_id=eos, pad_token_id=3, max_new_tokens=20)
            same(out, expected)
        options = {"eos_token_id": eos, "pad_token_id": 3, "max_new_tokens": 20, "prompt_lookup_num_tokens": 4}
        same(engine.generate(model, inputs, **options), expected)
        ended |= set(map(len, expected.tokens))
    assert min(ended) < 20


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stops", [["self"], [".", "("]])
def test_stop_strings_and_streams(shipped, stops, late, monkeypatch):
    monkeypatch.setattr("engine.decoding.token_buffer.reads_late", lambda device: late)
    texts = ["import os\n", "class Path:\n    def __init__(self", "def "]
    expected = shipped.generate(texts, max_new_tokens=40, stop_strings=stops)
    for options in ({"assistant_model": shipped.model}, {"prompt_lookup_num_tokens": 5}):
        stream = shipped.stream(texts, max_new_tokens=40, stop_strings=stops, **options)
        shown = ["", "", ""]
        for piece in stream:
            shown[piece.row] += piece.text
        same(stream.result(), expected)
        assert shown == stream.result().text == expected.text


def test_code_repeats_itself(shipped):
    text = "class A:\n    def __init__(self, name):\n        self.name = name\n\nclass B:\n    def __init__(self"
    expected = shipped.generate(text, max_new_tokens=40)
    out = shipped.generate(text, max_new_tokens=40, prompt_lookup_num_tokens=6)
    same(out, expected)
    assert out.stats.accepted_tokens > 8
    assert out.stats.verifications < 32
    assert expected.stats.drafted_tokens is expected.stats.accepted_tokens is expected.stats.verifications is None


@pytest.mark.parametrize(
    "name", ["gemma2", "bamba", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "t5"))]
)
def test_transformers_own_caches(name):
    model, inputs = tiny(name)
    expected = greedy(model, inputs, max_new_tokens=24)

    def new_cache():
        own = DynamicCache(config=model.config)
        return EncoderDecoderCache(own, DynamicCache(config=model.config)) if name == "t5" else own

    for draft in drafts(name).values():
        live = new_cache()
        same(assisted(model, inputs, draft, past_key_values=live, max_new_tokens=24), expected)
        if name in ("mistral", "gemma2"):  # it is as greedy search leaves it
            plain = new_cache()
            greedy(model, inputs, past_key_values=plain, max_new_tokens=24)
            assert live.get_seq_length() == plain.get_seq_length() == 13 + 23
            for mine, other in zip(live.layers, plain.layers, strict=True):
                assert not getattr(mine, "record_past", False)
                torch.testing.assert_close(mine.keys, other.keys, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_taken_back_from_is_refused(monkeypatch):
    model, inputs = tiny("mistral")
    never_run(model, monkeypatch)
    message = r"a StaticSlidingWindowLayer of transformers' cannot .* such as cache='static'"
    with pytest.raises(engine.OptionError, match=message):
        assisted(model, inputs, draft_of("mistral"), past_key_values=StaticCache(model.config, max_cache_len=64))


@pytest.mark.parametrize("cache", ["dynamic", "quantized"])
@pytest.mark.parametrize("name", ["llama", "mistral", "jamba", "t5"])
def test_the_next_turn(name, cache):
    model, inputs = tiny(name, pads=0) if name != "t5" else tiny(name)
    given = exact(cache, model)
    first = assisted(model, inputs, draft_of(name), max_new_tokens=9, **given)
    assert first.cache.total_tokens == first.sequences.shape[1] - 1
    both = conversation(first, inputs) if name != "t5" else next_turn_of_pair(first, inputs)
    expected = greedy(model, both, cache="none", max_new_tokens=9)
    for draft in (draft_of(name), bad_draft(name)):
        live = copy.deepcopy(first.cache)
        same(assisted(model, both, draft, cache=live, max_new_tokens=9), expected)
    out = engine.generate(model, both, cache=first.cache, prompt_lookup_num_tokens=3, max_new_tokens=9)
    same(out, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "jamba", "bamba"])
def test_a_text_that_ends_among_what_was_verified_leaves_nothing_behind_it(name, cache):
    model, inputs = tiny(name, pads=0, rows=1)
    given = exact(cache, model)
    free = greedy(model, inputs, max_new_tokens=20).tokens[0]
    for column in (3, 8):
        for end in ({"eos_token_id": free[column]}, {"stopping_criteria": [StopAfter(13 + column)]}):
            first = assisted(model, inputs, model, tokens=6, max_new_tokens=20, **end, **given)
            assert first.tokens[0] == free[: len(first.tokens[0])]
            assert 0 < len(first.tokens[0]) <= column + 1
            assert first.cache.total_tokens < first.sequences.shape[1]
            both = conversation(first, inputs)
            second = engine.generate(model, both, max_new_tokens=9, cache=first.cache)
            same(second, greedy(model, both, cache="none", max_new_tokens=9))


def next_turn_of_pair(first, inputs):
    """The same source; the decoder's text goes on after a turn of two tokens."""
    ids = torch.cat([first.sequences, torch.tensor([[50, 51], [52, 53]])], dim=1)
    return inputs | {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}


def test_a_turn_of_which_only_the_new_tokens_are_given():
    model, inputs = tiny("llama")
    first = greedy(model, inputs, max_new_tokens=9)
    both = conversation(first, inputs)
    seen = first.cache.total_tokens
    new = both | {"input_ids": both["input_ids"][:, seen:]}
    expected = greedy(model, both, cache="none", max_new_tokens=9)
    for draft in (model, draft_of("llama"), tiny_model("mamba")):
        out = assisted(model, new, draft, cache=copy.deepcopy(first.cache), max_new_tokens=9)
        assert out.tokens == expected.tokens
        if draft is model:  # it has read what only the cache had
            assert out.stats.accepted_tokens == out.stats.drafted_tokens
    unknown = copy.deepcopy(first.cache)
    unknown.log = None
    with pytest.raises(engine.OptionError, match=f"has to read the {seen} tokens in the cache too, .* conversation"):
        assisted(model, new, draft_of("llama"), cache=unknown)


def test_a_model_that_would_have_to_read_the_cache_again_needs_the_conversation():
    model, inputs = tiny("jamba", pads=0)
    first = greedy(model, inputs, max_new_tokens=9)
    both = conversation(first, inputs)
    new = both | {"input_ids": both["input_ids"][:, first.cache.total_tokens :]}
    with pytest.raises(engine.OptionError, match="21 tokens in the cache were not given: give the whole conversation"):
        engine.generate(model, new, cache=first.cache, prompt_lookup_num_tokens=3, max_new_tokens=4)


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9}])
def test_processors(options):
    model, inputs = tiny("gpt2", rows=3)
    options = options | {"eos_token_id": 26, "max_new_tokens": 20}
    expected = greedy(model, inputs, **options)
    for draft in drafts("gpt2").values():
        same(assisted(model, inputs, draft, **options), expected)
    same(engine.generate(model, inputs, prompt_lookup_num_tokens=3, **options), expected)
    same(
        assisted(model, inputs, model, max_new_tokens=20, logits_processor=[NoRepeatNGramLogitsProcessor(1)]),
        greedy(model, inputs, max_new_tokens=20, logits_processor=[NoRepeatNGramLogitsProcessor(1)]),
    )


def test_records_are_those_of_greedy_search():
    model, inputs = tiny("llama", rows=3)
    asked = {"output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    for eos in (None, 26, 91):
        expected = greedy(model, inputs, eos_token_id=eos, **asked)
        for draft in drafts("llama").values():
            out = assisted(model, inputs, draft, eos_token_id=eos, **asked)
            same(out, expected)
            for name in ("scores", "logits"):
                found, wanted = (torch.stack(getattr(one, name)) for one in (out, expected))
                running = torch.tensor([[step < len(row) for row in out.tokens] for step in range(len(found))])
                torch.testing.assert_close(found[running], wanted[running], rtol=1e-4, atol=1e-4)
    out = assisted(model, inputs, model, stopping_criteria=[StopAfter(13 + 4)], **asked)
    assert len(out.logits) == len(out.scores) == out.sequences.shape[1] - 13 == 4  # the text ends among verified ones
    out = assisted(model, inputs, model, output_hidden_states=True)
    assert [states[-1].shape[1] for states in out.hidden_states] == [13, 6, 6, 1]  # of what was fed together


def test_sampling_draws_as_the_options_say():
    model, inputs = tiny("llama", rows=3)
    for given in ({"assistant_model": draft_of("llama")}, {"prompt_lookup_num_tokens": 4}):
        certain = engine.generate(model, inputs, do_sample=True, top_k=1, max_new_tokens=NEW, **given)
        assert torch.equal(certain.sequences, greedy(model, inputs).sequences)
        torch.manual_seed(1)
        first = engine.generate(model, inputs, do_sample=True, max_new_tokens=NEW, **given)
        torch.manual_seed(1)
        again = engine.generate(model, inputs, do_sample=True, max_new_tokens=NEW, **given)
        assert torch.equal(first.sequences, again.sequences)
        assert not torch.equal(first.sequences, certain.sequences)
    torch.manual_seed(2)
    out = assisted(model, inputs, model, do_sample=True, temperature=0.8)
    assert out.stats.accepted_tokens > 0.9 * out.stats.drafted_tokens  # rounding aside, the distributions are equal


def test_a_sampled_token_is_drawn_from_the_models_distribution():
    """4000 rows at once, the second new token, given the first: a chi-square test, 6 standard deviations."""
    model, inputs = tiny("llama", pads=0, rows=1)
    many = {name: value.repeat(4000, 1) for name, value in inputs.items()}
    torch.manual_seed(0)
    out = assisted(model, many, draft_of("llama", 0.3), tokens=2, do_sample=True, top_k=3, max_new_tokens=3)
    assert 0.1 < out.stats.accepted_tokens / out.stats.drafted_tokens < 0.9
    new = out.sequences[:, 13:]
    firsts = new[:, 0].unique()
    assert len(firsts) == 3
    for first in firsts:
        text = torch.cat([inputs["input_ids"], first.view(1, 1)], dim=1)
        with torch.no_grad():
            best = model(text).logits[0, -1].topk(3)
        chosen = new[new[:, 0] == first, 1]
        found = torch.stack([(chosen == token).sum() for token in best.indices])
        assert found.sum() == len(chosen)
        expected = best.values.softmax(dim=-1) * len(chosen)
        assert float(((found - expected) ** 2 / expected).sum()) < 36 + 2


# The draft's side.


def test_the_draft_is_made_once_and_its_lane_once_per_run(monkeypatch):
    from engine.decoding import draft as room

    made = {"ModelRunner": 0, "ModelSession": 0, "caches": 0}

    def counted(name, make):
        def wrapper(*arguments, **options):
            made[name] += 1
            return make(*arguments, **options)

        return wrapper

    monkeypatch.setattr(room, "ModelRunner", counted("ModelRunner", room.ModelRunner))
    monkeypatch.setattr(room, "ModelSession", counted("ModelSession", room.ModelSession))
    monkeypatch.setattr(room.caches, "build", counted("caches", room.caches.build))
    model, inputs = tiny("llama")
    generator = engine.Generator(model)
    for run in (1, 2, 3):
        generator.generate(inputs, assistant_model=draft_of("llama"), cache=DynamicCache(), max_new_tokens=NEW)
        assert made == {"ModelRunner": 1, "ModelSession": run, "caches": run}
    other = copy.deepcopy(draft_of("llama"))
    generator.generate(inputs, assistant_model=other, max_new_tokens=NEW)
    assert made["ModelRunner"] == 2
    generator.generate(inputs, assistant_model=draft_of("llama"), max_new_tokens=NEW)
    alive = weakref.ref(other)
    del other
    gc.collect()
    assert alive() is None  # only the last draft is kept


def test_what_a_heuristic_has_learned_is_remembered():
    model, inputs = tiny("llama")
    generator = engine.Generator(model)

    def forwards(tokens=2, **options):
        given = {"num_assistant_tokens": tokens, "assistant_confidence_threshold": ALL, "max_new_tokens": 25}
        return generator.generate(inputs, assistant_model=model, **given, **options).stats.verifications

    assert forwards() == 8  # 3 tokens each after the first one
    first = forwards(num_assistant_tokens_schedule="heuristic")
    assert forwards(num_assistant_tokens_schedule="heuristic") < first < 8
    assert forwards(1, num_assistant_tokens_schedule="heuristic") > 3  # 1, 3, 5, 7: another beginning
    assert forwards(num_assistant_tokens_schedule="heuristic_transient") == first
    assert forwards() == 8


def test_the_drafts_own_configuration_says_what_the_call_does_not(monkeypatch):
    model, inputs = tiny("llama")
    draft = copy.deepcopy(model)
    draft.generation_config.num_assistant_tokens = 2
    draft.generation_config.assistant_confidence_threshold = 0.0
    assert engine.generate(model, inputs, assistant_model=draft, max_new_tokens=25).stats.verifications == 8
    out = engine.generate(model, inputs, assistant_model=draft, num_assistant_tokens=5, max_new_tokens=25)
    assert out.stats.verifications == 4
    assert (Assisted().num_assistant_tokens, Assisted().assistant_confidence_threshold) == (20, 0.4)


def test_a_failure_of_the_draft_leaves_a_cache_that_can_be_continued(monkeypatch):
    model, inputs = tiny("llama")
    draft, calls = copy.deepcopy(draft_of("llama")), []
    forward = draft.model.layers[2].forward

    def fails(*arguments, **options):
        calls.append(0)
        return 1 / 0 if len(calls) == 9 else forward(*arguments, **options)

    monkeypatch.setattr(draft.model.layers[2], "forward", fails)
    with pytest.raises(engine.GenerationInterrupted, match="ZeroDivisionError") as failure:
        assisted(model, inputs, draft)
    part = failure.value.partial
    new = part.sequences.shape[1] - 13
    assert 0 < new < NEW
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, new, dtype=torch.long)], dim=1)
    rest = engine.generate(model, part.sequences, attention_mask=mask, cache=part.cache, max_new_tokens=NEW - new)
    assert torch.equal(rest.sequences, greedy(model, inputs).sequences)


# A draft with a vocabulary of its own.


@pytest.fixture(scope="module")
def permuted(shipped):
    """The shipped model and its tokenizer, with the ids in another order."""
    tokenizer = shipped.tokenizer
    size = shipped.model.config.vocab_size
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    whole["model"]["vocab"] = {token: int(order[i]) for token, i in whole["model"]["vocab"].items()}
    for added in whole["added_tokens"]:
        added["id"] = int(order[added["id"]])
    model = copy.deepcopy(shipped.model)
    with torch.no_grad():
        for embedding, mine in ((model.get_input_embeddings(), shipped.model.get_input_embeddings()),
                                (model.get_output_embeddings(), shipped.model.get_output_embeddings())):  # fmt: skip
            embedding.weight = torch.nn.Parameter(torch.empty_like(mine.weight).index_copy_(0, order, mine.weight))
    from tokenizers import Tokenizer

    special = {name: getattr(tokenizer, name) for name in ("eos_token", "bos_token", "pad_token")}
    return model, PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(whole)), **special)


def test_a_draft_with_other_ids_is_understood(shipped, permuted):
    draft, tokenizer = permuted
    for text in ("class Path:\n    def __init__(self", "# Größe\nimport os\nprint("):
        expected = shipped.generate(text, max_new_tokens=30)
        for options in ({}, {"cache": "static"}, {"do_sample": True, "top_k": 1}):
            out = shipped.generate(
                text, assistant_model=draft, assistant_tokenizer=tokenizer, num_assistant_tokens=5, max_new_tokens=30,
                **options,
            )  # fmt: skip
            same(out, expected)
            assert out.stats.accepted_tokens > 0.5 * out.stats.drafted_tokens > 5


def test_a_draft_that_reads_letters(shipped):
    """Its words are shorter than the model's: what it says has to be put together."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    text = "class Path:\n    def __init__(self, ü"
    expected = shipped.generate(text, max_new_tokens=20)
    draft = copy.deepcopy(tiny_model("llama"))
    draft.resize_token_embeddings(256)
    draft.eval()
    given = {"assistant_tokenizer": tokenizer, "assistant_confidence_threshold": ALL, "max_new_tokens": 20}
    out = shipped.generate(text, assistant_model=draft, **given)
    same(out, expected)
    assert out.stats.drafted_tokens > 0
    with pytest.raises(engine.OptionError, match=r"one text at a time, .* there are 2 rows: generate them one by one"):
        shipped.generate([text, text], assistant_model=draft, **given)
    with pytest.raises(engine.OptionError, match="says what the draft's ids mean: give tokenizer="):
        engine.generate(shipped.model, torch.tensor([[5, 6]]), assistant_model=draft, **given)


# What cannot be.


def test_a_draft_that_does_not_pay_is_told_once(caplog):
    model = tiny("llama")[0]
    gen, draft, options = (
        engine.Generator(model),
        draft_of("llama", noise=3),
        {"assistant_confidence_threshold": 0, "eos_token_id": []},
    )
    out = gen.generate([[5, 6, 7]], max_new_tokens=4, assistant_model=draft, **options)
    assert out.stats.drafted_tokens < 100
    assert "does not pay" not in caplog.text  # too few to tell
    expected = gen.generate([[5, 6, 7]] * 8, max_new_tokens=40, eos_token_id=[])
    for _ in range(2):
        out = gen.generate([[5, 6, 7]] * 8, max_new_tokens=40, assistant_model=draft, **options)
        same(out, expected)
        assert out.stats.drafted_tokens < 8 * 19 * 5  # one step of all that ask the draft has 20 tokens per row
    said = f"{out.stats.accepted_tokens} of {out.stats.drafted_tokens} proposed tokens were accepted"
    assert caplog.text.count(said) == 1
    caplog.clear()
    gen.generate([[5, 6, 7]] * 8, max_new_tokens=16, assistant_model=copy.deepcopy(model), **options)
    assert "does not pay" not in caplog.text  # all are accepted, each at the price of a step


def test_a_draft_by_its_path():
    gen = engine.Generator(engine.SHIPPED_MODEL)
    path, options = str(engine.SHIPPED_MODEL), {"max_new_tokens": 4, "num_assistant_tokens": 2}
    expected = gen.generate("import os\n", max_new_tokens=4).tokens
    out = gen.generate("import os\n", assistant_model=engine.SHIPPED_MODEL, **options)
    assert out.tokens == expected
    assert out.stats.accepted_tokens
    loaded = gen._builder.draft
    [request] = gen.generate_many(["import os\n"], assistant_model=path, **options)
    assert request.result().tokens == expected
    chat = gen.chat(cache="static", assistant_model=path, **options)
    assert chat.send("x").stats.verifications
    assert chat.send("y", num_assistant_tokens=3).stats.cached_tokens
    assert gen._builder.draft is loaded  # loaded once
    gen.release()
    assert gen.pools["draft_bytes"] == 0
    ended = []
    streamer = SimpleNamespace(put=print, end=lambda: ended.append(True))
    with pytest.raises(engine.OptionError, match="assistant_model: there is no folder"):
        gen.generate("x", assistant_model="/no/such", streamer=streamer)
    assert ended


def test_a_draft_sees_no_embeddings_and_no_given_encoder_outputs(monkeypatch):
    model, inputs = tiny("llama", pads=0)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    with pytest.raises(engine.OptionError, match="sees token ids only, and the prompt has inputs_embeds: give a draft"):
        assisted(model, {"inputs_embeds": embeds}, draft_of("llama"))
    out = engine.generate(model, inputs_embeds=embeds, prompt_lookup_num_tokens=3, max_new_tokens=NEW)
    assert out.tokens == greedy(model, inputs).tokens
    model, inputs = tiny("t5")
    with torch.no_grad():
        encoded = model.get_encoder()(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    given = {"encoder_outputs": encoded, "attention_mask": inputs["attention_mask"]}
    with pytest.raises(engine.OptionError, match=r"the encoder of the draft .* reads input_ids, and was given none"):
        engine.generate(model, **given, assistant_model=draft_of("t5"), max_new_tokens=NEW)


def test_a_tokenizer_of_the_same_vocabulary_is_not_needed(shipped):
    with pytest.raises(engine.OptionError, match="has the vocabulary of tokenizer: leave it out"):
        shipped.generate("import", assistant_model=shipped.model, assistant_tokenizer=shipped.tokenizer)
