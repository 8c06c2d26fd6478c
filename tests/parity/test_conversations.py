"""Later turns on a live cache equal the same text read anew: pads and ended rows are remembered."""

import copy

import pytest
import torch
from architectures import prompt, tiny_model

import engine

TEXTS = ["import os\n", "class Path:\n    def joinpath(self, *others):\n"]


@pytest.fixture
def same_pad_and_end(shipped):
    """A tokenizer whose pad is its end-of-text: the mask cannot be read off the ids."""
    tokenizer, model = copy.deepcopy(shipped.tokenizer), copy.deepcopy(shipped.model)
    tokenizer.pad_token = tokenizer.eos_token
    model.generation_config.pad_token_id = None
    return engine.Generator(model, tokenizer)


def test_pads_of_the_first_turn_are_remembered(same_pad_and_end):
    generator = same_pad_and_end
    alone = [generator.generate(text, max_new_tokens=16).text[0] for text in TEXTS]
    first = generator.generate(TEXTS, max_new_tokens=8)
    second = generator.generate(first.sequences, cache=first.cache, max_new_tokens=8)
    assert [a + b for a, b in zip(first.text, second.text, strict=True)] == alone


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_row_that_ended_early_goes_on_where_it_ended(cache):
    model, inputs = tiny_model("llama"), prompt()
    free = engine.generate(model, inputs, max_new_tokens=12).sequences[:, 13:]
    eos = next(token for token in free[0, 2:8].tolist() if token not in free[1].tolist())
    size = {"cache_config": {"max_cache_len": 99}} if cache == "static" else {}
    first = engine.generate(model, inputs, cache=cache, eos_token_id=eos, max_new_tokens=12, **size)
    assert first.finish_reasons == ["eos", "length"]
    more = prompt(tokens=5, pads=0, seed=4)["input_ids"]
    second = engine.generate(model, torch.cat([first.sequences, more], dim=1), cache=first.cache, max_new_tokens=9)

    ended = first.sequences[0, 4:].tolist()
    ended = ended[: ended.index(eos, 9) + 1]
    rows = [torch.tensor(ended + more[0].tolist()), torch.cat([first.sequences[1], more[1]])]
    for row, ids in enumerate(rows):
        alone = {"attention_mask": torch.ones_like(ids)}  # a pad id that it said is a token
        expected = engine.generate(model, ids, **alone, max_new_tokens=9).sequences[0, -9:]
        assert torch.equal(second.sequences[row, -9:], expected)


def test_a_row_that_ended_early_cannot_go_on_in_a_window():
    model, inputs = tiny_model("mistral"), prompt()
    eos = engine.generate(model, inputs, max_new_tokens=3).sequences[0, -1].item()
    first = engine.generate(model, inputs, eos_token_id=eos, max_new_tokens=12)
    assert first.finish_reasons == ["eos", "length"]
    more = torch.cat([first.sequences, prompt(tokens=2, pads=0)["input_ids"]], dim=1)
    with pytest.raises(engine.InputError, match="row 0 has padding between its tokens"):
        engine.generate(model, more, cache=first.cache, max_new_tokens=9)
    mask = torch.ones_like(more)
    mask[:, :25] = first.cache.log.mask
    with pytest.raises(engine.InputError, match="row 0 has padding between its tokens"):
        engine.generate(model, more, attention_mask=mask, cache=first.cache, max_new_tokens=9)


def test_a_row_that_has_nothing_new():
    model, inputs = tiny_model("llama"), prompt()
    eos = engine.generate(model, inputs, max_new_tokens=3).sequences[0, -1].item()
    first = engine.generate(model, inputs, eos_token_id=eos, max_new_tokens=12)
    with pytest.raises(engine.InputError, match="row 0 has ended"):
        engine.generate(model, first.sequences, cache=first.cache, max_new_tokens=9)


def test_a_mask_that_contradicts_the_cache_is_refused():
    model, inputs = tiny_model("llama"), prompt()
    first = engine.generate(model, inputs, max_new_tokens=4)
    with pytest.raises(engine.InputError, match="leave it out"):
        engine.generate(model, first.sequences, attention_mask=torch.ones(2, 17), cache=first.cache, max_new_tokens=4)


def test_new_tokens_only_then_everything():
    model, inputs = tiny_model("llama"), prompt()
    first = engine.generate(model, inputs, max_new_tokens=4)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 4, dtype=torch.long)], dim=1)
    options = {"cache": first.cache, "max_new_tokens": 4}
    engine.generate(model, first.sequences[:, -1:], attention_mask=mask, **options)
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(engine.generate(model, expected[:, :21], **options).sequences, expected[:, :25])
    with pytest.raises(engine.InputError, match="differ from token 0"):
        engine.generate(model, prompt(tokens=30, seed=8)["input_ids"], **options)


def test_a_cache_in_use_is_left_alone():
    model, inputs = tiny_model("llama"), prompt()
    expected = engine.generate(model, inputs, max_new_tokens=8)
    stream = engine.stream(model, inputs, max_new_tokens=8)
    next(stream)
    busy = stream._driver.loop.session.cache
    with pytest.raises((engine.EngineError, RuntimeError), match="step is open"):
        engine.generate(model, expected.sequences, cache=busy, max_new_tokens=2)
    list(stream)
    assert torch.equal(stream.result().sequences, expected.sequences)


def test_a_stream_that_starts_late_on_a_cache_that_has_changed():
    model, inputs = tiny_model("llama"), prompt()
    first = engine.generate(model, inputs, max_new_tokens=4)
    late = engine.stream(model, first.sequences, cache=first.cache, max_new_tokens=4)
    never = engine.stream(model, first.sequences, cache=first.cache, max_new_tokens=4)
    second = engine.generate(model, first.sequences, cache=first.cache, max_new_tokens=4)
    with pytest.raises(engine.GenerationInterrupted, match="another run or loop used it"):
        next(late)
    assert never.result().stats.new_tokens == 0
    whole = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(engine.generate(model, second.sequences, cache=first.cache, max_new_tokens=4).sequences, whole)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_cache_made_in_inference_mode(cache):
    model, inputs = tiny_model("llama"), prompt()
    with torch.inference_mode():
        first = engine.generate(model, inputs, cache=cache, max_new_tokens=4)
        first.cache.select_rows(torch.tensor([0, 1]))
    second = engine.generate(model, first.sequences.clone(), cache=first.cache, max_new_tokens=4)
    assert torch.equal(second.sequences, model.generate(**inputs, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("name", ["llama", "mamba", "jamba", "mamba2", "lfm2", "mistral"])
def test_a_row_that_ended_with_the_last_token(name):
    """Its pad comes with the next turn; where it changes states and windows, that is refused."""
    model, inputs = tiny_model(name), prompt(pads=0)
    first = engine.generate(model, inputs, max_new_tokens=2)
    ids = torch.cat([first.sequences, torch.tensor([[0, 9], [8, 9]])], dim=1)
    mask = torch.ones_like(ids)
    mask[0, -2] = 0
    given = {"attention_mask": mask, "cache": first.cache, "max_new_tokens": 5}
    if name == "llama":
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        assert torch.equal(engine.generate(model, ids, **given).sequences, expected)
    else:
        with pytest.raises(engine.InputError, match="row 0 has padding between its tokens"):
            engine.generate(model, ids, **given)
