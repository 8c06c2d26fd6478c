"""A run recovers from memory that is out whatever it reads and however it computes, and its cache goes on after it."""

import copy
import functools
from functools import partial
from itertools import product

import pytest
import torch
from encoder_decoders import source, tiny_encoder_decoder
from injection import ERRORS, failing
from multimodal import MULTIMODAL, seeing_model, seen_prompt
from references import tiny
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import engine
from configs import EngineConfig
from engine.model.facts import ModelFacts

NEW = 6
pytestmark = pytest.mark.covering("values", "pairs")

EACH = [["release"], ["chunk"], ["offload"], ["split"]]


def check(model, generate, fallbacks):
    """Failures are tried one by one and change nothing: how many of them were recovered from."""
    torch.manual_seed(3)
    whole, found = generate(), 0
    for forward, late in product((0, 1, 4), (False, True)):
        torch.manual_seed(3)
        with failing(model, [(forward, -1)], late=late):
            try:
                out = generate(on_oom=fallbacks)
            except engine.OutOfMemoryError:
                continue
        assert [taken.name for taken in out.stats.fallbacks] == fallbacks
        assert torch.equal(out.sequences, whole.sequences)
        found += 1
    return found


def recovered(model, inputs, fallbacks, **options):
    return check(model, partial(engine.generate, model, inputs, max_new_tokens=NEW, **options), fallbacks)


each_rung = pytest.mark.parametrize("fallbacks", EACH, ids="".join)


@each_rung
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_embeddings(fallbacks, options):
    model, inputs = tiny("llama")
    embeds = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach()}
    embeds["attention_mask"] = inputs["attention_mask"]
    assert recovered(model, embeds, fallbacks, **options)


@each_rung
@pytest.mark.parametrize("name", MULTIMODAL)
def test_images(fallbacks, name):
    model, inputs = seeing_model(name), seen_prompt(name)
    assert bool(recovered(model, inputs, fallbacks)) == (
        fallbacks not in (["chunk"], ["split"])
    )  # an image is read whole, and with its own rows


@pytest.mark.parametrize("name", MULTIMODAL)
def test_images_are_read_again_with_their_text(name, monkeypatch):
    """Where modules keep a part of what they have read, and another call came between."""
    model, inputs = copy.deepcopy(seeing_model(name)), seen_prompt(name)
    generator = engine.Generator(model)
    expected = generator.generate(inputs, max_new_tokens=NEW).tokens
    monkeypatch.setattr(ModelFacts, "why_not_in_cache", "a part is kept elsewhere")
    stream = generator.stream(inputs, max_new_tokens=NEW)
    next(stream)
    generator.generate(inputs, max_new_tokens=1)
    list(stream)
    assert stream.result().tokens == expected


@each_rung
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_guidance(fallbacks, options):
    model, inputs = tiny("llama")
    options |= {"guidance_scale": 1.5, "negative_prompt": torch.tensor([[7, 8, 9]] * 2)}
    assert recovered(model, inputs, fallbacks, **options)


@each_rung
@pytest.mark.parametrize("name", ["llama", "mistral", "jamba", "t5"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_caches_of_transformers(fallbacks, name, kind):
    """They are not ours to move or to split. What cannot be taken back of them is read again from the beginning."""
    model, inputs = tiny(name)
    if kind is StaticCache and name == "jamba":
        pytest.skip("transformers' own models with states take no StaticCache")

    def generate(**more):
        options = {"max_cache_len": 64} if kind is StaticCache else {}
        cache = kind(config=model.config.get_text_config(decoder=True), **options)
        if name == "t5":
            cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
        return engine.generate(model, inputs, cache=cache, max_new_tokens=NEW, **more)

    reads_on = fallbacks == ["release"] or (fallbacks == ["chunk"] and name != "t5")  # whose prompt is a single token
    assert bool(check(model, generate, fallbacks)) == reads_on


def failing_encoder(monkeypatch, model, failures):
    """Its first reads fail; the calls there were."""
    read, calls = model.get_encoder().forward, []

    @functools.wraps(read)  # its parameters say what it is given
    def fails_at_first(*arguments, **options):
        calls.append(1)
        if len(calls) <= failures:
            raise ERRORS["allocator"]()
        return read(*arguments, **options)

    monkeypatch.setattr(model.get_encoder(), "forward", fails_at_first)
    return calls


@pytest.mark.parametrize(("failures", "fallbacks"), [(1, ["release"]), (2, ["release", "split"]), (3, None)])
@pytest.mark.parametrize("of", ["t5", "bart", "whisper", "draft"])
def test_an_encoder(of, failures, fallbacks, monkeypatch):
    """Before there is a cache to go on with. Two rows are two parts at most."""
    name = "t5" if of == "draft" else of
    model, inputs = tiny_encoder_decoder(name), source(name)
    assistant = copy.deepcopy(model) if of == "draft" else None
    generate = partial(engine.generate, model, inputs, assistant_model=assistant, max_new_tokens=NEW)
    generate = partial(generate, output_hidden_states=of != "draft")
    whole = generate()
    calls = failing_encoder(monkeypatch, assistant or model, failures)
    if fallbacks is None:
        with pytest.raises(engine.OutOfMemoryError, match=r"can't allocate memory.*taken: release, split") as raised:
            generate()
        nothing = raised.value.partial
        assert torch.equal(nothing.sequences, whole.sequences[:, :-NEW])
        assert nothing.tokens == [[], []]
        assert [taken.name for taken in nothing.stats.fallbacks] == ["release", "split"]
        return
    out = generate()
    assert [taken.name for taken in out.stats.fallbacks] == fallbacks
    assert len(calls) == failures + len(fallbacks)
    assert torch.equal(out.sequences, whole.sequences)
    if of != "draft":  # the parts of all rows, together
        torch.testing.assert_close(out.encoder_hidden_states, whole.encoder_hidden_states, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
def test_compiled_steps(monkeypatch):
    model, inputs = tiny("llama")
    generator = engine.Generator(model, config=EngineConfig(compile="aot_eager"))
    generate = partial(generator.generate, inputs, cache="static", max_new_tokens=NEW)
    whole, graph, calls = generate(), generator._runner._compiled, []

    def fails_once(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise ERRORS["device"]()
        return graph(*arguments, **options)

    monkeypatch.setattr(generator._runner, "_compiled", fails_once)
    out = generate()
    assert [taken.name for taken in out.stats.fallbacks] == ["release"]
    assert len(calls) == 2
    assert torch.equal(out.sequences, whole.sequences)
    assert torch.equal(generate().sequences, whole.sequences)
    assert len(calls) > 3


@pytest.mark.parametrize("fallbacks", [*EACH, ["offload", "split"]], ids="-".join)
@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded", "quantized"])
def test_the_next_turn(cache, fallbacks):
    model, inputs = tiny("llama")

    def turns(**more):
        first = engine.generate(model, inputs, cache=cache, max_new_tokens=NEW, **more)
        said = torch.cat([first.sequences, torch.tensor([[11, 12, 13]] * 2)], dim=1)
        return first, engine.generate(model, said, cache=first.cache, max_new_tokens=NEW)

    if (cache, fallbacks) == ("quantized", ["chunk"]):
        pytest.skip("pieces would read codes")
    at = [(number, -1) for number, _ in enumerate(fallbacks)]
    with failing(model, at):
        first, second = turns(on_oom=fallbacks)
    assert len(first.stats.fallbacks) == len(fallbacks)
    assert torch.equal(second.sequences, turns()[1].sequences)
