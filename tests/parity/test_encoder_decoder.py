"""Encoder-decoder models: the source is encoded once, the cross part is written once, and the text is transformers'."""

import pytest
import torch
import transformers
from encoder_decoders import DEFAULT, ENCODER_DECODERS, RARE, source, tiny_encoder_decoder
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, StaticCache

import caches
import engine
from caches import EncoderDecoder

pytestmark = pytest.mark.covering("values", "pairs")

NEW = 14
CLOSE = {"atol": 1e-2, "rtol": 1e-3}  # where nothing is similar: these models amplify rounding
PAIRS = {
    "dynamic": {},
    "static": {},
    "dynamic + static": {"cache": "encoder_decoder", "cache_config": {"cross_cache": "static"}},
    "static + dynamic": {
        "cache": "encoder_decoder",
        "cache_config": {"self_cache": "static", "cross_cache": {"name": "dynamic"}},
    },
    "none": {},
}


def theirs(model, inputs, **options):
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    return GenerationMixin.generate(model, **inputs, **options)  # Whisper has a `generate` of its own


def known(name):
    if not hasattr(transformers, ENCODER_DECODERS[name][0]):
        pytest.skip("this release of transformers does not know it yet")
    return tiny_encoder_decoder(name), source(name)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in RARE)])
def test_greedy(name, pair):
    model, inputs = known(name)
    options = {"output_logits": True, "return_dict_in_generate": True, "use_cache": pair != "none"}
    expected = theirs(model, inputs, **options)
    out = engine.generate(model, inputs, **({"cache": pair} | PAIRS[pair]), max_new_tokens=NEW, output_logits=True)
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(out.logits, expected.logits, **CLOSE)
    if pair != "none":
        assert isinstance(out.cache, EncoderDecoder)
        assert out.cache.self_attention_cache.fixed == pair.startswith("static")
        assert out.cache.total_tokens == NEW


@pytest.mark.parametrize("chunk", [None, 2], ids=["whole", "in pieces"])
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_a_prompt_for_the_decoder_padded_on_the_left(name, cache, chunk):
    if cache == "none" and chunk is not None:
        pytest.skip("without a cache a prompt cannot be read in pieces")
    model, inputs = known(name)
    ids = torch.tensor([[0, 0, 2, 40, 41], [2, 50, 51, 52, 53]])
    decoder = {"decoder_input_ids": ids, "decoder_attention_mask": (ids != 0).long()}
    if name != "whisper":  # transformers puts the start token in front of prompts that do not begin with it
        decoder = {"decoder_input_ids": ids[:, 2:], "decoder_attention_mask": torch.ones(2, 3, dtype=torch.long)}
        decoder["decoder_input_ids"][:, 0] = 2
    expected = theirs(model, inputs, **decoder)
    generator = engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=chunk))
    out = generator.generate(inputs, **decoder, cache=cache, max_new_tokens=NEW)
    assert torch.equal(out.sequences, expected)


def test_a_decoder_with_windows_in_a_hybrid_cache():
    model, inputs = known("t5gemma")
    out = engine.generate(model, inputs, cache="hybrid", max_new_tokens=NEW)
    assert torch.equal(out.sequences, theirs(model, inputs))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DEFAULT)
def test_ours_in_transformers_generate(name, cache):
    model, inputs = known(name)
    for options in ({}, {"num_beams": 3}):
        ours = caches.build(cache, model.config, **({"max_cache_len": 40} if cache == "static" else {}))
        assert torch.equal(theirs(model, inputs, past_key_values=ours, **options), theirs(model, inputs, **options))
        assert ours.total_tokens == NEW


@pytest.mark.parametrize("name", ["t5gemma", "t5gemma2"])
def test_a_model_whose_generate_makes_the_cross_part_anew(name):
    """It leaves a filled one as it is; an empty one it would make by arguments that ours does not take."""
    model, inputs = known(name)
    first = theirs(model, inputs, max_new_tokens=4, return_dict_in_generate=True)
    ours = caches.branch(engine.generate(model, inputs, max_new_tokens=4).cache)  # no forward has marked its layers
    expected, out = (
        theirs(model, inputs, decoder_input_ids=first.sequences, past_key_values=cache, max_new_tokens=4)
        for cache in (first.past_key_values, ours)
    )
    assert torch.equal(out, expected)
    assert ours.get_seq_length() == first.past_key_values.get_seq_length()
    with pytest.raises(TypeError, match="does not, where it makes the encoder's part"):
        model.generate(**inputs, past_key_values=caches.build("dynamic", model.config), max_new_tokens=2)


@pytest.mark.parametrize("name", DEFAULT)
def test_theirs_in_ours(name):
    model, inputs = known(name)
    columns = model.get_encoder()(**{k: v for k, v in inputs.items() if k != "decoder_input_ids"})[0].shape[1]
    config = model.config
    for parts in (
        (DynamicCache(), DynamicCache()),
        (StaticCache(config, max_cache_len=40), StaticCache(config, max_cache_len=columns)),
    ):
        out = engine.generate(model, inputs, cache=EncoderDecoderCache(*parts), max_new_tokens=NEW)
        assert torch.equal(out.sequences, theirs(model, inputs))
    with pytest.raises(caches.UnsupportedLayerError, match="the model needs an EncoderDecoderCache"):
        engine.generate(model, inputs, cache=DynamicCache(), max_new_tokens=NEW)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_source_is_read_once(cache):
    model, inputs = known("bart")
    calls = {"encoder": 0, "cross keys": 0}

    def counted(module, what):
        return module.register_forward_hook(lambda *_: calls.update({what: calls[what] + 1}))

    hooks = [counted(model.get_encoder(), "encoder")]
    hooks.append(counted(model.get_decoder().layers[1].encoder_attn.k_proj, "cross keys"))
    out = engine.generate(model, inputs, cache=cache, max_new_tokens=9)
    assert calls == {"encoder": 1, "cross keys": 1}
    assert out.stats.prompt_tokens == int(inputs["attention_mask"].sum()) + 2  # and the two start tokens
    again = engine.generate(model, inputs, decoder_input_ids=out.sequences, cache=out.cache, max_new_tokens=9)
    assert calls == {"encoder": 2, "cross keys": 1}
    for hook in hooks:
        hook.remove()
    assert torch.equal(again.sequences, theirs(model, inputs, max_new_tokens=18))


def test_a_forward_that_died_in_a_plain_call_leaves_no_trace(monkeypatch):
    model, inputs = known("bart")
    ids = torch.tensor([[2, 9, 8], [2, 7, 6]])
    ours = caches.build("dynamic", model.config)
    other = source("bart", seed=4)
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(model.get_decoder().layers[2], "forward", lambda *args, **kwargs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(**other, decoder_input_ids=ids, past_key_values=ours)
        logits = model(**inputs, decoder_input_ids=ids, past_key_values=ours).logits
        torch.testing.assert_close(logits, model(**inputs, decoder_input_ids=ids).logits, **CLOSE)


def test_rows():
    model, inputs = known("t5")
    index = torch.tensor([1, 1, 0])
    cache = engine.generate(model, inputs, max_new_tokens=5).cache
    whole = theirs(model, inputs, max_new_tokens=20)
    cache.select_rows(index)
    chosen = {name: value[index] for name, value in inputs.items()}
    out = engine.generate(model, chosen, decoder_input_ids=whole[index, :6], cache=cache, max_new_tokens=15)
    assert torch.equal(out.sequences, whole[index])
    cache.reset()
    assert cache.bytes == 0
    assert not cache.is_updated.get(0)
    assert torch.equal(engine.generate(model, inputs, cache=cache, max_new_tokens=20).sequences, whole)


def test_rows_that_only_one_part_has_room_for():
    model, inputs = known("t5")
    pair = {"self_cache": "dynamic", "cross_cache": "static"}
    cache = engine.generate(model, inputs, cache="encoder_decoder", cache_config=pair, max_new_tokens=5).cache
    with pytest.raises(caches.StepError, match="room for 2 rows cannot hold 3"):
        cache.select_rows(torch.tensor([0, 1, 1]))
    assert [part.batch_size for part in cache.parts] == [2, 2]


def test_a_source_that_was_encoded_again_is_the_same():
    """Beside other rows, or on other threads, an encoder rounds differently."""
    model, inputs = known("t5")
    first = engine.generate(model, **inputs, max_new_tokens=NEW)
    states = model.get_encoder()(**inputs).last_hidden_state
    again = {"attention_mask": inputs["attention_mask"], "decoder_input_ids": first.sequences, "max_new_tokens": NEW}
    rounded = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states * (1 + 1e-6))
    expected = theirs(model, inputs, max_new_tokens=2 * NEW)
    out = engine.generate(model, encoder_outputs=rounded, cache=first.cache, **again)
    assert torch.equal(out.sequences, expected)
    states[-1, 1] += 0.01 * states[-1, 1].norm()
    other = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states)
    with pytest.raises(engine.InputError, match="another source"):
        engine.generate(model, encoder_outputs=other, cache=out.cache, **again | {"decoder_input_ids": out.sequences})


def test_encoder_outputs_in_place_of_a_source():
    model, inputs = known("t5")
    outputs = model.get_encoder()(**inputs)
    given = {"encoder_outputs": outputs, "attention_mask": inputs["attention_mask"]}
    assert torch.equal(engine.generate(model, **given, max_new_tokens=NEW).sequences, theirs(model, inputs))


def test_text_is_padded_on_the_right(tokenizer):
    config = tiny_encoder_decoder("t5").config.to_dict() | {"vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**config)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    texts = ["import os", "def read_lines(path):"]
    tokenizer.padding_side = "right"
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    expected = theirs(model, inputs, eos_token_id=None)
    out = engine.generate(model, texts, tokenizer=tokenizer, max_new_tokens=NEW, eos_token_id=None)
    assert torch.equal(out.sequences, expected)
    assert out.text == tokenizer.batch_decode(expected[:, 1:], skip_special_tokens=True)


def test_refusals():
    model, inputs = known("t5")
    first = engine.generate(model, inputs, max_new_tokens=5)
    again = {"decoder_input_ids": first.sequences, "cache": first.cache, "max_new_tokens": 5}
    with pytest.raises(engine.InputError, match="another source"):
        engine.generate(model, source("t5", seed=3), **again)
    with pytest.raises(engine.InputError, match="token id 500 is outside the model's vocabulary of 101"):
        engine.generate(model, torch.tensor([[5, 500]]), max_new_tokens=5)
    with pytest.raises(engine.OptionError, match="decoder_inputs_ids"):
        engine.generate(model, inputs, decoder_inputs_ids=first.sequences)
    with pytest.raises(caches.UnsupportedLayerError, match="cannot impose a window"):
        engine.generate(model, inputs, cache="sliding_window", cache_config={"window_length": 4})
    with pytest.raises(caches.UnsupportedLayerError, match="looks at everything"):
        caches.build("dynamic", model.config, cross_cache="sliding_window")
    with pytest.raises(caches.UnsupportedLayerError, match="a part of an encoder-decoder cache keeps keys"):
        caches.build("encoder_decoder", model.config, self_cache="none")
    with pytest.raises(caches.UnsupportedLayerError, match="no encoder"):
        caches.build("encoder_decoder", transformers.LlamaConfig())
    with pytest.raises(caches.UnsupportedLayerError, match="no encoder"):
        first.cache.check_fits(transformers.LlamaConfig())
    with pytest.raises(engine.InputError, match="input_features"):
        engine.generate(tiny_encoder_decoder("whisper"), max_new_tokens=5)


@pytest.mark.parametrize("name", ["bart", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "whisper"))])
def test_the_compiled_step(name):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, inputs = known(name)
    compiled = engine.Generator(model, config=engine.EngineConfig(cache="static", compile="aot_eager"))
    for _ in range(2):
        assert torch.equal(compiled.generate(inputs, max_new_tokens=NEW).sequences, theirs(model, inputs))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("made", ["ours", "theirs"])
def test_a_cache_cropped_to_nothing_answers_from_the_new_source(made):
    model = tiny_encoder_decoder("bart")
    first, second = source("bart"), source("bart", seed=1)
    cache = (
        caches.build("dynamic", model.config) if made == "ours" else EncoderDecoderCache(DynamicCache(), DynamicCache())
    )
    engine.generate(model, **first, cache=cache, max_new_tokens=5)
    cache.crop(-cache.get_seq_length())
    expected = engine.generate(model, **second, max_new_tokens=5)
    assert expected.tokens != engine.generate(model, **first, max_new_tokens=5).tokens
    assert engine.generate(model, **second, cache=cache, max_new_tokens=5).tokens == expected.tokens
