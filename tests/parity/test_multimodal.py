"""Images are read with the prompt, and the conversation about them goes on."""

import copy

import pytest
import torch
from multimodal import IMAGES, MULTIMODAL, SPECIAL, seeing_model, seen_prompt

import engine

pytestmark = pytest.mark.covering("values", "pairs")

NEW = 16
OPTIONS = {"max_new_tokens": NEW, "suppress_tokens": SPECIAL, "output_logits": True}


def theirs(model, inputs, **options):
    options = {"do_sample": False, "return_dict_in_generate": True} | OPTIONS | options
    return model.generate(**{name: value.clone() for name, value in inputs.items()}, **options)


def assert_same(out, expected):
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(out.logits, expected.logits, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_text_is_that_of_transformers(name, cache):
    model, inputs = seeing_model(name), seen_prompt(name)
    out = engine.generate(model, inputs, cache=cache, **OPTIONS)
    assert_same(out, theirs(model, inputs, use_cache=cache != "none"))
    other = inputs | {"pixel_values": -inputs["pixel_values"]}
    assert (engine.generate(model, other, cache=cache, **OPTIONS).logits[0] - out.logits[0]).abs().max() > 0.1


def every_row_twice(inputs):
    """transformers 5.17 cannot repeat rows that have different numbers of images: it repeats the images one by one."""
    images = torch.arange(sum(IMAGES)).split(IMAGES)
    order = torch.cat([row for row in images for _ in range(2)])
    rows = len(inputs["input_ids"])
    return {
        name: value.repeat_interleave(2, dim=0)
        if len(value) == rows
        else value.unflatten(0, (sum(IMAGES), -1))[order].flatten(0, 1)
        for name, value in inputs.items()
    }


@pytest.mark.parametrize("name", MULTIMODAL)
def test_several_texts_about_each_image(name):
    model, inputs = seeing_model(name), seen_prompt(name)
    torch.manual_seed(3)
    expected = theirs(model, every_row_twice(inputs), do_sample=True)
    torch.manual_seed(3)
    assert_same(engine.generate(model, inputs, do_sample=True, num_return_sequences=2, **OPTIONS), expected)


def next_prompt(name, inputs, sequences):
    """The whole conversation, some words more, with what has one entry per token made longer."""
    ids = torch.cat([sequences, torch.tensor([[7, 8, 9], [10, 11, 12]])], dim=1)
    more = ids.shape[1] - inputs["input_ids"].shape[1]
    longer = {"input_ids": ids}
    for key in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
        if key in inputs:
            new = 1 if key == "attention_mask" or name == "paligemma" else 0
            longer[key] = torch.nn.functional.pad(inputs[key], (0, more), value=new)
    return inputs | longer


@pytest.mark.parametrize("again", [True, False], ids=["images again", "text alone"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_next_turn(name, cache, again):
    model, inputs = seeing_model(name), seen_prompt(name)
    generator = engine.Generator(model)
    config = {"max_cache_len": 128} if cache == "static" else None
    first = generator.generate(inputs, cache=cache, cache_config=config, **OPTIONS)
    # Another conversation in between: what the model itself remembers is not about ours.
    generator.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    whole = next_prompt(name, inputs, first.sequences)
    told = whole if again else {key: whole[key] for key in ("input_ids", "attention_mask")}
    second = generator.generate(told, cache=first.cache, **OPTIONS)
    assert_same(second, theirs(model, whole))
    assert second.stats.prompt_tokens == 2 * 4


def test_images_cannot_be_cut_into_pieces():
    generator = engine.Generator(seeing_model("llava"), config=engine.EngineConfig(prefill_chunk_tokens=4))
    with pytest.raises(engine.OptionError, match="pixel_values cannot be cut into pieces of 4 tokens"):
        generator.generate(seen_prompt("llava"), **OPTIONS)


def test_positions_of_images_that_are_missing():
    model, inputs = seeing_model("qwen2_vl"), seen_prompt("qwen2_vl")
    fewer = inputs | {"image_grid_thw": inputs["image_grid_thw"][:2], "pixel_values": inputs["pixel_values"][:32]}
    with pytest.raises(engine.InputError, match="cannot tell the positions of this prompt"):
        engine.generate(model, fewer, **OPTIONS)


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_a_prompt_of_text_alone_is_one_of_a_text_model(name):
    model, ids = seeing_model(name), torch.arange(20, 32)[None]
    beams = {"num_beams": 3, "max_new_tokens": 5}
    expected = model.generate(ids, do_sample=False, **beams)
    assert torch.equal(engine.generate(model, ids, cache="none", **beams).sequences, expected)
    with engine.Generator(model).batch() as batch:
        for seed in range(2):
            batch.submit(ids + seed, max_new_tokens=5)
    assert batch.counts.why_alone == set()


def test_rows_of_images_without_a_cache_are_refused_before_any_work():
    model = seeing_model("llava")
    with pytest.raises(engine.OptionError, match="cannot change places without a cache"):
        engine.generate(model, seen_prompt("llava"), cache="none", num_beams=2, max_new_tokens=3)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_draft_sees_the_images_too(name):
    """Of the model's class; prompt lookup needs no draft."""
    model, inputs = seeing_model(name), seen_prompt(name)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.02 * parameter.std() * torch.randn_like(parameter) if parameter.numel() > 1 else 0
    options = OPTIONS | {"output_logits": False}
    expected = engine.generate(model, inputs, **options).sequences
    out = engine.generate(model, inputs, assistant_model=draft, **options)
    assert torch.equal(out.sequences, expected)
    assert out.stats.accepted_tokens > 0
    assert torch.equal(engine.generate(model, inputs, prompt_lookup_num_tokens=3, **options).sequences, expected)
    other = type("Other", (type(model),), {})
    draft.__class__ = other
    with pytest.raises(engine.OptionError, match="this draft sees token ids only, and the prompt has pixel_values"):
        engine.generate(model, inputs, assistant_model=draft, **options)
