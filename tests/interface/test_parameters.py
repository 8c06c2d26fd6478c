"""What a call may say: numbers of any kind, whole configurations, seeds; and what other engines call a parameter."""

import copy
import logging
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from architectures import prompt, tiny_model
from encoder_decoders import START, source, tiny_encoder_decoder
from references import draft_of
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import MinNewTokensLengthLogitsProcessor
from transformers.utils import logging as transformers_logging

import engine
import strategies
from configs import ConfigError

NEW = 12


def llama():
    return tiny_model("llama"), prompt(pads=0)["input_ids"]


def texts(model, ids, **options):
    return engine.generate(model, ids, **{"max_new_tokens": NEW} | options).sequences


def theirs(model, ids, **options):
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False} | options)


# Numbers of any kind


@pytest.mark.parametrize(
    ("said", "plain"),
    [
        ({"max_new_tokens": np.int64(7)}, {"max_new_tokens": 7}),
        ({"max_new_tokens": torch.tensor(7)}, {"max_new_tokens": 7}),
        ({"max_new_tokens": 7.0}, {"max_new_tokens": 7}),
        ({"num_beams": np.int32(3), "length_penalty": np.float32(0.5)}, {"num_beams": 3, "length_penalty": 0.5}),
        ({"do_sample": 0}, {"do_sample": False}),
        ({"do_sample": np.False_}, {"do_sample": False}),
        ({"repetition_penalty": 3}, {"repetition_penalty": 3.0}),
        ({"repetition_penalty": np.float64(3)}, {"repetition_penalty": 3.0}),
        ({"eos_token_id": torch.tensor([5, 60])}, {"eos_token_id": [5, 60]}),
        ({"eos_token_id": np.array([5, 60])}, {"eos_token_id": [5, 60]}),
        ({"eos_token_id": []}, {"eos_token_id": None}),
        ({"eos_token_id": -1}, {}),
        ({"eos_token_id": 4000}, {}),
        ({"suppress_tokens": np.arange(5, 50)}, {"suppress_tokens": list(range(5, 50))}),
        ({"sequence_bias": [[[5], 9]]}, {"sequence_bias": {(5,): 9.0}}),
        ({"do_sample": True, "temperature": float("inf"), "seed": 3}, {"do_sample": True, "temperature": float("inf")}),
        ({"max_time": -1}, {"max_time": 0.0}),
        ({"trust_remote_code": True}, {}),
        ({"trust_remote_code": False}, {}),
    ],
    ids=str,
)
def test_numbers_of_any_kind_mean_the_same(said, plain):
    model, ids = llama()
    torch.manual_seed(3)
    expected = theirs(model, ids, **plain)
    assert torch.equal(texts(model, ids, **said), expected)


# A whole configuration


@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 3},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
        {"do_sample": True, "temperature": 0.3, "top_k": 5},
        {"num_assistant_tokens": 7, "max_matching_ngram_size": 3},
        {"assistant_early_exit": 2},
        {"decoder_start_token_id": 5, "forced_decoder_ids": [[1, 2]]},
        {"use_mtp": False, "low_memory": True, "is_assistant": True},
    ],
    ids=str,
)
def test_a_whole_configuration_may_hold_anything(fields):
    """What it holds counts where it applies, and greedy search said by keyword is greedy search."""
    model, ids = llama()
    config = GenerationConfig(**fields, max_new_tokens=NEW, pad_token_id=0)
    said = {"num_beams": 1, "do_sample": False}
    expected = theirs(model, ids, **{name: fields[name] for name in fields if name == "no_repeat_ngram_size"})
    assert torch.equal(texts(model, ids, generation_config=config, **said), expected)
    assert torch.equal(texts(model, ids, generation_config=config, strategy="greedy"), expected)
    assert config.to_dict() == GenerationConfig(**fields, max_new_tokens=NEW, pad_token_id=0).to_dict()
    by_keyword = {name: value for name, value in fields.items() if name in ("length_penalty", "assistant_early_exit")}
    if by_keyword:
        with pytest.raises(engine.OptionError, match=f"{next(iter(by_keyword))}=.* cannot apply: greedy has no use"):
            texts(model, ids, **by_keyword)


def test_a_configuration_that_searches():
    model, ids = llama()
    config = GenerationConfig(num_beams=3, length_penalty=2.0, early_stopping=True, pad_token_id=0)
    expected = theirs(model, ids, num_beams=3, length_penalty=2.0, early_stopping=True)
    assert torch.equal(texts(model, ids, generation_config=config), expected)
    other = theirs(model, ids, num_beams=2, length_penalty=2.0, early_stopping=True)
    assert torch.equal(texts(model, ids, generation_config=config, strategy=strategies.Beam(2, 1, 2.0, True)), other)


def test_a_configuration_as_a_dict():
    model, ids = llama()
    config = {"num_beams": np.int64(3), "length_penalty": 2, "max_new_tokens": NEW}
    assert torch.equal(
        engine.generate(model, ids, generation_config=config).sequences,
        theirs(model, ids, num_beams=3, length_penalty=2.0),
    )
    with pytest.raises(engine.OptionError, match="generation_config has no field 'num_beam'; did you mean 'num_beams'"):
        texts(model, ids, generation_config={"num_beam": 3})


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_copy_of_the_own_configuration_of_an_encoder_decoder(name):
    model, inputs = tiny_encoder_decoder(name), source(name)
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    config = copy.deepcopy(model.generation_config)
    assert config.decoder_start_token_id == START
    out = engine.generate(model, inputs, generation_config=config, max_new_tokens=NEW)
    assert torch.equal(out.sequences, expected)
    config.decoder_start_token_id = 9
    other = model.generate(**inputs, decoder_start_token_id=9, max_new_tokens=NEW, do_sample=False)
    assert not torch.equal(other, expected)
    for said in ({"decoder_start_token_id": 9}, {"generation_config": config}, {"decoder_start_token_id": [9, 9]}):
        assert torch.equal(engine.generate(model, inputs, **said, max_new_tokens=NEW).sequences, other)


# Seeds


def drawing():
    model = tiny_model("llama")
    return {
        "sampling": {"do_sample": True, "temperature": 1.3},
        "several": {"do_sample": True, "num_return_sequences": 3, "top_k": 40},
        "beams": {"do_sample": True, "num_beams": 3},
        "lookup": {"do_sample": True, "prompt_lookup_num_tokens": 3},
        "assisted": {"do_sample": True, "assistant_model": draft_of("llama"), "num_assistant_tokens": 3},
        "the same draft": {"do_sample": True, "assistant_model": model, "num_assistant_tokens": 3},
    }


@pytest.mark.parametrize("name", drawing())
def test_a_seed_draws_the_numbers_of_a_global_one_and_leaves_that_alone(name):
    model, ids = llama()
    options = drawing()[name]
    torch.manual_seed(11)
    expected = texts(model, ids, **options)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    seeded = texts(model, ids, seed=11, **options)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(seeded, expected)
    assert torch.equal(texts(model, ids, cache="static", seed=np.int64(11), **options), expected)
    assert not torch.equal(texts(model, ids, seed=12, **options), expected)
    if name in ("sampling", "several", "beams"):  # proposals are verified with numbers drawn in another order
        torch.manual_seed(11)
        assert torch.equal(seeded, theirs(model, ids, **options))


def test_a_seed_is_nothing_to_greedy_search_and_does_no_harm():
    model, ids = llama()
    assert torch.equal(texts(model, ids, seed=3), theirs(model, ids))


def test_a_strategy_of_a_plug_in_gets_the_generator():
    model, ids = llama()
    seen = []

    class Own:
        name, samples = "own", True

        def flow(self, task):
            seen.append(task.generator)
            yield from strategies.Sampling().flow(task)

    expected = texts(model, ids, do_sample=True, seed=4)
    assert torch.equal(texts(model, ids, strategy=Own(), seed=4), expected)
    texts(model, ids, strategy=Own())
    assert isinstance(seen[0], torch.Generator)
    assert seen[1] is None


def test_streams_follow_a_seed():
    model, ids = llama()
    stream = engine.stream(model, ids, do_sample=True, seed=4, max_new_tokens=NEW)
    torch.rand(3)  # what others draw in between does not matter
    pieces = list(stream)
    assert len(pieces) == 2 * NEW
    assert torch.equal(stream.result().sequences, texts(model, ids, do_sample=True, seed=4))


# Names


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("n", "num_return_sequences"),
        ("stop", "stop_strings"),
        ("max_tokens", "max_new_tokens"),
        ("prompt", "inputs"),
        ("messages", r"inputs, the argument after the model: a list like \[{'role': 'user'"),
        ("kv_bits", r"cache='quantized', cache_config={'nbits': 4}"),
        ("quantize", "cache='quantized' for keys and values"),
        ("best_of", "num_beams"),
        ("logprobs", "top_logprobs"),
        ("ignore_eos", "eos_token_id=None"),
        ("stop_token_ids", "eos_token_id"),
        ("temprature", "did you mean 'temperature'"),
        ("max_new_token", r"did you mean 'max_new_tokens' or 'min_new_tokens'\?"),
        ("topk", "'top_k'"),
        ("tokeniser", "'tokenizer'"),
        ("xyzzy", r"help\(engine.generate\) lists the parameters"),
        ("_eos_token_tensor", "eos_token_id"),
    ],
)
def test_an_unknown_parameter_is_answered_with_what_may_be_meant(name, meant):
    with pytest.raises(engine.OptionError, match=rf"know no input '{name}'; .*{meant}") as failure:
        texts(*llama(), **{name: 5})
    hint = str(failure.value).split("; ")[1]
    assert hint.count("'") <= 6 or "did you mean" not in hint  # three names at most
    assert "'_" not in hint


def test_contrastive_search_is_quiet(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    texts(*llama(), penalty_alpha=0.6, top_k=3)
    assert caplog.text == ""


@dataclass(frozen=True)
class Ranked:
    """Takes the token of rank `rank`, 0 for the most probable one."""

    name: ClassVar[str] = "ranked"
    samples: ClassVar[bool] = False
    rank: int = 0

    def flow(self, task):
        return strategies.one_token_per_step(task, lambda scores: scores.argsort(descending=True)[:, self.rank])


def test_a_registered_strategy_takes_options_of_its_own(monkeypatch):
    monkeypatch.setitem(strategies.registry._strategies, "ranked", Ranked)
    model, ids = llama()
    greedy, second = texts(model, ids), texts(model, ids, strategy=Ranked(1))
    assert torch.equal(texts(model, ids, strategy="ranked"), greedy)
    assert torch.equal(texts(model, ids, strategy="ranked", rank=1), second)
    assert not torch.equal(greedy, second)
    with pytest.raises(engine.OptionError, match="know no input 'rank'"):
        texts(model, ids, strategy="greedy", rank=1)


def test_a_pair_may_be_a_list():
    model, ids = llama()
    decay = {"exponential_decay_length_penalty": [2, 1.5], "eos_token_id": 5}
    assert torch.equal(
        texts(model, ids, **decay), theirs(model, ids, **decay | {"exponential_decay_length_penalty": (2, 1.5)})
    )


def test_pads_that_cannot_be_fed():
    """A row alone is never filled up; checkpoints say -1 where they have no pad."""
    model, ids = llama()
    config = GenerationConfig(pad_token_id=-1, eos_token_id=[5, 60], max_new_tokens=NEW)
    alone = engine.generate(model, ids[:1], generation_config=config).sequences
    assert torch.equal(alone, model.generate(ids[:1], generation_config=config))
    assert torch.equal(texts(model, ids[:1], eos_token_id=[5, 60], pad_token_id=4000), alone)
    with pytest.raises(
        engine.OptionError, match=r"pad_token_id: token id -1 .* vocabulary of 101 .* Of 2 texts some may end"
    ):
        engine.generate(model, ids, generation_config=config)


def test_the_own_processors_of_transformers_still_go():
    model, ids = llama()
    kept = MinNewTokensLengthLogitsProcessor(13, 5, torch.tensor([5, 60]))
    out = texts(model, ids, eos_token_id=[5, 60], logits_processor=kept)
    assert torch.equal(out, theirs(model, ids, eos_token_id=[5, 60], min_new_tokens=5))


# What the model says of itself, and what a call leaves to it


def own_setting(**fields):
    """A model whose own generation configuration has these fields too."""
    model = copy.copy(tiny_model("llama"))
    model.generation_config = copy.deepcopy(model.generation_config)
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    return model


def test_no_end_ids_are_no_end_for_a_model_that_has_some():
    model, ids = own_setting(eos_token_id=list(range(1, 101)), pad_token_id=0), llama()[1]
    assert engine.generate(model, ids, max_new_tokens=NEW).finish_reasons == ["eos", "eos"]
    expected = model.generate(ids, generation_config=GenerationConfig(max_new_tokens=NEW, eos_token_id=[]))
    for said in ({"eos_token_id": []}, {"eos_token_id": None}, {"generation_config": GenerationConfig(eos_token_id=[])},
                 {"generation_config": {"eos_token_id": []}}):  # fmt: skip
        out = engine.generate(model, ids, max_new_tokens=NEW, **said)
        assert out.finish_reasons == ["length", "length"]
        assert torch.equal(out.sequences, expected)
    without_pads = own_setting(eos_token_id=5, pad_token_id=None)
    assert engine.generate(without_pads, ids[:1], eos_token_id=[], max_new_tokens=NEW).finish_reasons == ["length"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_time", "x"),
        ("eos_token_id", "x"),
        ("eos_token_id", 2**70),
        ("num_beams", "x"),
        ("stop_strings", 5),
        ("cache_config", 5),
        ("penalty_alpha", "x"),
        ("max_length", "x"),
        ("min_length", "x"),
        ("do_sample", "x"),
        ("use_cache", "x"),
        ("output_scores", "yes"),
        ("num_assistant_tokens", "x"),
    ],
)
def test_wrong_values_of_the_models_own(name, value):
    model, ids = own_setting(**{name: value}), llama()[1]
    with pytest.raises(engine.OptionError, match=rf"model\.generation_config\.{name}\b"):
        engine.generate(model, ids, max_new_tokens=3)


def test_the_models_own_counts_only_where_the_call_says_nothing():
    model, ids = own_setting(max_time="x", top_k=-1, max_new_tokens=np.int64(3)), llama()[1]
    expected = texts(tiny_model("llama"), ids, max_new_tokens=3)
    assert torch.equal(engine.generate(model, ids, max_time=100).sequences, expected)  # greedy: no top_k
    with pytest.raises(engine.OptionError, match=r"model.generation_config.top_k=-1"):
        engine.generate(model, ids, max_time=100, do_sample=True)
    assert engine.generate(model, ids, max_time=100, do_sample=True, top_k=5).stats.new_tokens == 6


def test_a_draft_with_a_wrong_setting():
    draft, (model, ids) = own_setting(num_assistant_tokens="x"), llama()
    with pytest.raises(engine.OptionError, match=r"assistant_model.generation_config.num_assistant_tokens='x'"):
        texts(model, ids, assistant_model=draft)


def test_healing_that_the_model_asks_for():
    model, ids = own_setting(token_healing=True), llama()[1]
    with pytest.raises(engine.OptionError, match=r"token_healing=True cannot apply.*trim the prompt's last token"):
        texts(model, ids)
    assert torch.equal(texts(model, ids, token_healing=False), texts(tiny_model("llama"), ids))


# What nothing can be made of


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"temperature": 0, "do_sample": True}, "^temperature has to be over 0; for the most probable token leave"),
        ({"temperature": -1, "do_sample": True}, "^temperature=-1, but it is a number over 0, or 0 without do_sample$"),
        ({"temperature": 0.7}, "greedy draws nothing: give do_sample=True too, or leave temperature"),
        ({"tokenizer": "gpt2"}, r"^tokenizer is the text 'gpt2': load it first, with AutoTokenizer.from_pretrained"),
        ({"cache_config": {"max_cache_len": 9}}, "a dynamic cache grows: for a fixed size use cache='static'"),
        ({"inputs": 7}, "^token ids are integers .*, but this is 7: one number has no rows"),
        ({"generation_config": GenerationConfig(token_healing=True)}, "token_healing=True cannot apply"),
        ({"decoder_start_token_id": 5}, "decoder_start_token_id=5 cannot apply: .*first token in the prompt"),
        ({"exponential_decay_length_penalty": (2, 1.5)}, "exponential_decay_length_penalty .* takes an eos_token_id"),
        ({"eos_token_id": 2**70}, "eos_token_id has the token id 1180591620717411303424"),
        ({"pad_token_id": 2**70}, "64 bits"),
        ({"bos_token_id": -(2**70)}, "64 bits"),
        ({"suppress_tokens": [5, 2**70]}, "64 bits"),
        ({"watermarking_config": {"hashing_key": "x"}}, "has hashing_key='x', but it is a whole number"),
        ({"watermarking_config": {"greenlist_ratio": "x"}}, "has greenlist_ratio='x', but it is a finite number"),
        ({"watermarking_config": {"context_width": "x"}}, "context_width='x'"),
        ({"synced_gpus": True}, "synced_gpus=True is for a model that is split among processes"),
        ({"logits_processor": [lambda ids, scores, more: scores]}, r"\(ids, scores, more\), but it is called with ids"),
        ({"stopping_criteria": lambda ids: True}, "called with ids and scores: too many positional"),
        ({"prefix_allowed_tokens_fn": lambda ids: [5]}, "called with a row and its ids: too many positional"),
        ({"generation_config": {"num_beams": 3, "num_return_sequences": 5}}, "has fields that contradict each other"),
        (
            {"num_return_sequences": 2, "do_sample": True, "prompt_lookup_num_tokens": 3},
            "no use for it: texts per prompt are 1; give the prompt several times",
        ),
        ({"num_return_sequences": 2}, "no use for it: it gives the same text every time"),
        ({"max_cache_len": 64}, "max_cache_len=64 cannot apply: cache='dynamic' needs no size.* give cache='static'"),
        ({"max_cache_len": 64, "cache": "offloaded"}, "max_cache_len=64 cannot apply: cache='offloaded'"),
        (
            {"max_cache_len": 64, "cache": "static", "cache_config": {"max_cache_len": 32}},
            "max_cache_len=64 contradicts max_cache_len=32 of the cache",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_nothing_can_be_made_of(said, message):
    model, ids = llama()
    ran = []
    hook = model.model.register_forward_pre_hook(lambda *given: ran.append(0))
    try:
        with pytest.raises((engine.OptionError, engine.InputError, ConfigError), match=message):
            engine.generate(model, **{"inputs": ids, "max_new_tokens": NEW} | said)
    finally:
        hook.remove()
    assert not ran


def test_a_size_for_the_cache_applies_where_caches_have_one(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    transformers_logging.warning_once.cache_clear()  # an earlier test may have seen it
    model, ids = llama()
    for named in ({"cache": "static"}, {"cache_implementation": "static"}):
        assert engine.generate(model, ids, max_cache_len=200, max_new_tokens=3, **named).cache.max_tokens >= 200
    assert "max_cache_len" not in caplog.text
    config = GenerationConfig(max_cache_len=200, max_new_tokens=NEW)  # which may serve other calls
    assert torch.equal(texts(model, ids, generation_config=config), texts(model, ids))
    live = engine.generate(model, ids, max_new_tokens=3)
    with pytest.raises(engine.OptionError, match="max_cache_len is of a new cache, but a live one was given"):
        texts(model, live.sequences, cache=live.cache, max_cache_len=200)


def test_a_configuration_may_be_the_second_argument():
    """As in transformers."""
    model, ids = llama()
    config, gen = GenerationConfig(max_new_tokens=3, num_beams=2), engine.Generator(model)
    expected = model.generate(ids, config)
    assert torch.equal(engine.generate(model, ids, config).sequences, expected)
    assert torch.equal(gen.generate(ids, config).sequences, expected)
    for stream in (gen.stream(ids, config), engine.stream(model, ids, {"max_new_tokens": 3}, num_beams=2)):
        assert list(stream)
        assert torch.equal(stream.result().sequences, expected)
    with pytest.raises(engine.OptionError, match="generation_config=20, but it is a GenerationConfig"):
        engine.generate(model, ids, 20)


def test_one_processor_needs_no_list_and_may_have_a_default_of_its_own():
    class Only(LogitsProcessor):
        def __call__(self, ids, scores, token=7):
            return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([token]), 0.0)

    model, ids = llama()
    for only in (Only(), (Only(),), LogitsProcessorList([Only()])):
        assert set(texts(model, ids, logits_processor=only)[:, 13:].flatten().tolist()) == {7}


# Strategies and criteria of the caller's own


@pytest.mark.parametrize("flow", [None, [1], 5])
def test_a_flow_that_is_no_generator(flow):
    model, ids = llama()
    first = engine.generate(model, ids, max_new_tokens=3)
    strategy = type("Own", (), {"name": "own", "samples": False, "flow": lambda self, task: flow})()
    with pytest.raises(engine.OptionError, match=r"the strategy's flow\(\) returned .* where a generator"):
        texts(model, ids, strategy=strategy)
    seen = first.cache.total_tokens
    with pytest.raises(engine.OptionError, match=r"the strategy's flow\(\) returned"):
        texts(model, first.sequences, strategy=strategy, cache=first.cache)
    assert first.cache.total_tokens == seen
    out = engine.generate(model, first.sequences, cache=first.cache, max_new_tokens=4)
    assert torch.equal(out.sequences, texts(model, first.sequences, max_new_tokens=4))


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize(
    "said",
    [lambda rows: True, lambda rows: [True] * rows, lambda rows: torch.tensor(True), lambda rows: np.ones(rows, bool)],
)
def test_what_a_criterion_may_say(said, options):
    model, ids = llama()
    out = texts(
        model, ids, stopping_criteria=lambda ids, scores: said(len(ids)) if ids.shape[1] >= 16 else False, **options
    )
    assert out.shape[1] == 16


@pytest.mark.parametrize("said", [[True, False, True], torch.tensor([True, False, True]), "x", None, 0.5])
def test_what_a_criterion_may_not_say_is_told_with_its_name(said):
    def ends_soon(ids, scores):
        return said if ids.shape[1] >= 15 else False

    model, ids = llama()
    with pytest.raises(
        engine.GenerationInterrupted, match=r"criterion ends_soon returns whether each of 2 rows ends"
    ) as failure:
        texts(model, ids, stopping_criteria=ends_soon)
    assert isinstance(failure.value.__cause__, engine.OptionError)


def test_records_that_are_asked_for_are_not_warned_of(caplog):
    """transformers says that it may ignore them without `return_dict_in_generate`; here they come in any case."""
    config = GenerationConfig(max_new_tokens=2)
    config.output_logits = True
    with caplog.at_level("WARNING", "transformers"):
        out = engine.generate(tiny_model("llama"), **prompt(), output_scores=True, max_new_tokens=2)
        other = engine.generate(tiny_model("llama"), **prompt(), generation_config=config)
    assert len(out.scores) == len(other.logits) == 2
    assert "output_" not in caplog.text
    assert not config.return_dict_in_generate
