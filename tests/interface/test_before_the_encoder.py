"""What an encoder makes of its source takes long: all that can be refused without is refused before."""

import copy

import pytest
import torch
from encoder_decoders import source, tiny_encoder_decoder
from references import tiny

import caches
import engine
from configs import EngineConfig

NEW = 6
NAMES = ["t5", "whisper"]


def runs_of(model):
    """One entry per forward of the encoder."""
    runs = []
    model.get_encoder().register_forward_pre_hook(lambda *given: runs.append(1))
    return runs


def refused(model, config=None, **options):
    """Why the call is refused, without a forward of the encoder."""
    runs, inputs = runs_of(model), source(model.config.model_type)
    with pytest.raises((engine.EngineError, caches.CacheError)) as raised:
        engine.Generator(model, config=config).generate(inputs, **({"max_new_tokens": NEW} | options))
    assert runs == []
    return str(raised.value)


@pytest.fixture(params=NAMES)
def model(request):
    return copy.deepcopy(tiny_encoder_decoder(request.param))


def test_what_contradicts_each_other(model):
    compiles = EngineConfig(compile="aot_eager")
    few_rows = caches.build("static", model.config, max_cache_len=64, max_batch_size=2)
    assert "holds at most 5 tokens" in refused(model, cache="static", cache_config={"max_cache_len": 5})
    assert "in pieces of 3 tokens" in refused(model, cache="none", prefill_chunk_size=3)
    assert "disable_compile" in refused(model, compiles, cache="static", disable_compile=True)
    assert "cannot be with the dynamic cache" in refused(model, compiles, cache="dynamic")
    assert "the draft has none" in refused(model, assistant_model=tiny("llama")[0])
    assert "max_batch_size=8" in refused(model, cache=few_rows, num_beams=4)


def test_whisper_has_positions_for_so_many_tokens():
    model = copy.deepcopy(tiny_encoder_decoder("whisper"))
    del model.config.max_position_embeddings  # which checkpoints of Whisper do not have
    assert "the model has 256" in refused(model, max_new_tokens=257)
    assert len(engine.generate(model, source("whisper"), max_new_tokens=256).tokens[0]) == 256


def test_a_cache_that_holds_something_else(model):
    out = engine.generate(model, source(model.config.model_type), max_new_tokens=NEW)
    other = {"cache": out.cache, "decoder_input_ids": out.sequences.flip(1)}
    assert "do not begin this prompt" in refused(model, **other)
    goes_on = {"cache": out.cache, "decoder_input_ids": out.sequences}
    assert "hidden states of all tokens" in refused(model, **goes_on, penalty_alpha=0.6, top_k=4)
    other_source = source(model.config.model_type, seed=7)
    with pytest.raises(engine.InputError, match="another source"):  # for which the encoder has to read it
        engine.generate(model, other_source, **goes_on, max_new_tokens=NEW)


@pytest.mark.parametrize("options", [{}, {"cache": "auto"}, {"cache": "static"}, {"num_beams": 2}], ids=str)
def test_then_the_encoder_reads_once(model, options):
    inputs = source(model.config.model_type)
    runs = runs_of(model)
    out = engine.generate(model, inputs, max_new_tokens=NEW, **options)
    assert runs == [1]
    assert out.sequences.shape == (2, 1 + NEW)


def test_the_budget_counts_what_the_encoder_made():
    model, inputs = tiny_encoder_decoder("t5"), source("t5")
    config = EngineConfig(max_cache_bytes=10_000, over_budget="error")
    with pytest.raises(caches.CapacityError, match="max_cache_bytes=10,000"):
        engine.Generator(model, config=config).generate(inputs, max_new_tokens=NEW)


def test_the_source_is_left_as_it_was_given():
    model, given = tiny_encoder_decoder("bart"), source("bart")
    before = {name: value.clone() for name, value in given.items()}
    engine.generate(model, given, max_new_tokens=NEW, assistant_model=copy.deepcopy(model))
    assert list(given) == list(before)
    assert all(torch.equal(given[name], before[name]) for name in before)
