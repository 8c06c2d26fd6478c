"""The classic names, arguments, attributes and methods of transformers' caches."""

import copy

import pytest
import torch
from architectures import WINDOW, prompt, tiny_model
from encoder_decoders import source, tiny_encoder_decoder

import caches
import engine
from configs import ConfigError

NEW = 12
CLASSIC = {  # name: (a model it is for, one it is not for, arguments)
    "DynamicCache": ("llama", None, {}),
    "StaticCache": ("llama", None, {"batch_size": 2, "max_cache_len": 40, "device": "cpu", "dtype": torch.float32}),
    "HybridCache": ("gemma2", "llama", {"max_batch_size": 2, "max_cache_len": 40, "device": torch.device("cpu")}),
    "HybridChunkedCache": ("llama4_text", "llama", {"max_batch_size": 2, "max_cache_len": 40, "dtype": torch.float32}),
    "SlidingWindowCache": ("mistral", "gemma2", {"batch_size": 2, "max_cache_len": 40, "dtype": torch.float32}),
    "OffloadedCache": ("gemma2", None, {"batch_size": 2}),
    "OffloadedStaticCache": (
        "gemma2",
        None,
        {"max_batch_size": 2, "max_cache_len": 40, "device": "cpu", "dtype": torch.float32, "offload_device": "cpu"},
    ),
    "MambaCache": ("mamba", "jamba", {"batch_size": 2, "dtype": torch.float32, "device": "cpu"}),
    "HybridMambaAttentionDynamicCache": ("bamba", "llama", {"batch_size": 2, "dtype": torch.float32}),
}


@pytest.mark.parametrize("name", CLASSIC)
def test_the_examples_of_the_classes(name):
    """Build it, pass it to a forward, find it filled; then in both loops."""
    model_name, other, arguments = CLASSIC[name]
    model, inputs = tiny_model(model_name), prompt()
    build = lambda: getattr(caches, name)(config=model.config, **arguments)  # noqa: E731
    argument = "cache_params" if model_name == "mamba" else "past_key_values"
    with torch.no_grad():
        outputs = model(**inputs, **{argument: (ours := build())}, use_cache=True)
    assert outputs[argument] is ours
    assert ours.seen_tokens == 13
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **{argument: build()}), expected)
    assert torch.equal(engine.generate(model, inputs, cache=build(), max_new_tokens=NEW).sequences, expected)
    if other is not None:
        with pytest.raises(caches.UnsupportedLayerError):
            getattr(caches, name)(config=tiny_model(other).config, **arguments)


@pytest.mark.parametrize("build", [caches.DynamicCache, caches.OffloadedCache])
def test_a_dynamic_cache_without_a_config_finds_its_layers(build):
    for name in ("llama", "mistral", "gemma2", "gpt2"):
        model, inputs = tiny_model(name), prompt()
        expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        ours = build()
        assert len(ours) == 0
        assert torch.equal(
            model.generate(**inputs, max_new_tokens=NEW, do_sample=False, past_key_values=ours), expected
        )
        assert len(ours) == model.config.num_hidden_layers
        ours = build()  # the engine tells it what the model's layers are
        assert torch.equal(engine.generate(model, inputs, cache=ours, max_new_tokens=NEW).sequences, expected)
        assert any(ours.is_sliding) == (name in ("mistral", "gemma2"))


def test_a_dynamic_cache_without_a_config_has_limits(monkeypatch):
    ids = prompt(pads=0)["input_ids"]
    with pytest.raises(caches.StepError, match=r"keeps a state: build it with config=model\.config"), torch.no_grad():
        tiny_model("bamba")(ids, past_key_values=caches.DynamicCache())
    model, ours = tiny_model("llama"), caches.DynamicCache()
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[2], "forward", lambda *args, **kwargs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(ids, past_key_values=ours)
        with pytest.raises(caches.StepError, match="that step died half-way"):
            model(ids[:, :1], past_key_values=ours)


def test_attributes_and_methods():
    model, inputs = tiny_model("llama"), prompt()
    with torch.no_grad():
        ours = model(**inputs, past_key_values=caches.DynamicCache(model.config)).past_key_values
    assert len(ours) == len(ours.key_cache) == len(ours.value_cache) == 4
    assert ours[2][0].shape == ours.key_cache[2].shape == (2, 2, 13, 8)
    assert torch.equal(ours[2][1], list(ours)[2][1])
    assert ours.get_seq_length() == ours.seen_tokens == 13
    assert ours.get_max_length() == ours.get_max_cache_shape() == -1
    assert ours.get_usable_length(5) == 13
    fixed = caches.StaticCache(model.config, max_cache_len=15)
    with torch.no_grad():
        model(**inputs, past_key_values=fixed)
    assert fixed.get_max_length() == fixed.get_max_cache_shape() == 15
    assert (fixed.get_usable_length(2), fixed.get_usable_length(5)) == (13, 10)
    ours.crop(9)
    assert ours.seen_tokens == 9
    ours.crop(-2)
    assert ours.key_cache[0].shape[-2] == 7
    ours.crop(0)
    assert ours.seen_tokens == 7
    twin = copy.deepcopy(ours)
    halves = ours.batch_split(2, 1)
    assert [half.batch_size for half in halves] == [1, 1]
    joined = caches.DynamicCache.from_batch_splits(halves)
    joined.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(joined.key_cache[3], twin.key_cache[3].flip(0))
    joined.batch_repeat_interleave(2)
    joined.batch_select_indices(torch.tensor([3, 0]))
    assert torch.equal(joined.value_cache[3], twin.value_cache[3])
    with pytest.raises(caches.StepError, match="holds 2 rows"):
        ours.batch_split(3, 1)


def test_attributes_of_states():
    model, inputs = tiny_model("mamba"), prompt()
    ours = caches.MambaCache(model.config)
    assert ours.intermediate_size is None
    with torch.no_grad():
        model(**inputs, cache_params=ours)
    config = model.config
    assert ours.intermediate_size == config.intermediate_size
    assert ours.conv_kernel_size == config.conv_kernel
    assert ours.ssm_state_size == config.state_size
    layers, width = config.num_hidden_layers, config.intermediate_size
    assert [state.shape for state in ours.conv_states] == [(2, width, config.conv_kernel)] * layers
    assert [state.shape for state in ours.ssm_states] == [(2, width, config.state_size)] * layers


def test_legacy_tuples():
    model, inputs = tiny_model("llama"), prompt(pads=0)
    first = engine.generate(model, inputs, max_new_tokens=NEW, return_legacy_cache=True)
    so_far = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    past = first.past_key_values
    assert isinstance(past, tuple)
    assert past[0][0].shape == (2, 2, 13 + NEW - 1, 8)
    for config in (None, model.config):
        again = caches.DynamicCache.from_legacy_cache(past, config)
        out = engine.generate(model, so_far, cache=again, max_new_tokens=NEW)
        assert out.stats.prompt_tokens == 2
        assert torch.equal(out.sequences, model.generate(**so_far, max_new_tokens=NEW, do_sample=False))
    third = engine.generate(model, so_far, past_key_values=past, max_new_tokens=NEW)
    assert torch.equal(third.sequences, out.sequences)


def test_legacy_tuples_of_an_encoder_decoder_model():
    model, inputs = tiny_encoder_decoder("bart"), source("bart")
    first = engine.generate(model, inputs, max_new_tokens=NEW, return_legacy_cache=True)
    past = first.past_key_values
    assert [tensor.shape[-2] for tensor in past[0]] == [NEW, NEW, 13, 13]
    again = caches.EncoderDecoderCache.from_legacy_cache(past, model.config)
    assert again.is_updated[0]
    out = engine.generate(model, inputs, decoder_input_ids=first.sequences, cache=again, max_new_tokens=NEW)
    assert torch.equal(out.sequences, engine.generate(model, inputs, max_new_tokens=2 * NEW).sequences)


def test_legacy_tuples_of_an_empty_cache():
    for model, inputs in (
        (tiny_model("llama"), prompt(pads=0)),
        (tiny_encoder_decoder("bart"), source("bart")),
    ):
        past = caches.build("dynamic", model.config).to_legacy_cache()
        for config in (None, model.config):
            again = caches.from_legacy_cache(past, config)
            assert again.total_tokens == 0
            out = engine.generate(model, inputs, cache=again, max_new_tokens=NEW)
            assert torch.equal(out.sequences, engine.generate(model, inputs, max_new_tokens=NEW).sequences)
    half = ((torch.zeros(1, 1, 1, 1),) * 2, (None, None))
    with pytest.raises(caches.StepError, match="1 of 2 layers have None in place of keys or values, layer 1 first"):
        caches.from_legacy_cache(half)


def test_legacy_tuples_of_windows():
    """Tuples hold all columns; a window keeps its last ones, and what it has forgotten no tuple can say."""
    model, ids = tiny_model("mistral"), prompt(pads=0)["input_ids"]
    whole = caches.DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=whole)
        ours = caches.from_legacy_cache(whole.to_legacy_cache(), model.config)
        assert ours.key_cache[0].shape[-2] == WINDOW - 1
        logits = model(ids[:, :1], past_key_values=ours).logits
        torch.testing.assert_close(logits, model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:], atol=1e-4, rtol=1e-4)
    with pytest.raises(caches.UnsupportedLayerError, match="holds keys and values of 7 of 14 tokens"):
        ours.to_legacy_cache()
    out = engine.generate(tiny_model("mamba"), ids, max_new_tokens=2, return_legacy_cache=True)
    with pytest.raises(caches.UnsupportedLayerError, match="holds keys and values of 0 of 14 tokens and more"):
        _ = out.past_key_values


def test_encoder_decoder_of_two_caches_without_configs():
    model, inputs = tiny_encoder_decoder("bart"), source("bart")
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    build = lambda: caches.EncoderDecoderCache(caches.DynamicCache(), caches.DynamicCache())  # noqa: E731
    out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, past_key_values=(ours := build()))
    assert torch.equal(out, expected)
    assert ours.is_updated[0]
    assert len(ours[1]) == 4
    assert torch.equal(engine.generate(model, inputs, cache=build(), max_new_tokens=NEW).sequences, expected)


@pytest.mark.covering("values")
@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache", "OffloadedCache"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "t5gemma"])
def test_encoder_decoder_of_two_caches_with_the_models_config(name, kind):
    model, inputs = tiny_encoder_decoder(name), source(name)
    expected = engine.generate(model, inputs, max_new_tokens=NEW)
    config = model.config.get_text_config(decoder=True)  # of t5gemma it has windows, and no encoder
    options = {"max_cache_len": 40} if kind == "StaticCache" else {}
    build = lambda: caches.EncoderDecoderCache(*(getattr(caches, kind)(config=config, **options) for _ in range(2)))  # noqa: E731
    ours = build()
    assert torch.equal(engine.generate(model, inputs, cache=ours, max_new_tokens=NEW).sequences, expected.sequences)
    assert [part.name for part in ours.parts] == [build().parts[0].name] * 2
    assert ours.cross_attention_cache.total_tokens > ours.cross_attention_cache.layers[0].keys.shape[0]
    if name in ("t5", "bart"):
        out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, past_key_values=build())
        assert torch.equal(out, expected.sequences)


def test_a_filled_pair_gives_its_parts():
    model, inputs = tiny_encoder_decoder("bart"), source("bart")
    filled = engine.generate(model, inputs, max_new_tokens=NEW)
    again = caches.EncoderDecoderCache(filled.cache, filled.cache)
    assert again.parts == filled.cache.parts
    with pytest.raises(caches.UnsupportedLayerError, match="cannot impose a window on an encoder-decoder model"):
        caches.EncoderDecoderCache(caches.SinkCache(8, config=tiny_model("llama").config), caches.DynamicCache())


def test_refusals():
    model, inputs = tiny_model("llama"), prompt()
    static = caches.StaticCache
    with pytest.raises(ConfigError, match="batch_size=2 and max_batch_size=3"):
        static(model.config, max_cache_len=9, batch_size=2, max_batch_size=3)
    with pytest.raises(ConfigError, match="did you mean 'max_cache_len'"):
        static(model.config, max_cache_length=9)
    with pytest.raises(ConfigError, match="offload_device='cuda', but layers can wait in host memory"):
        caches.OffloadedStaticCache(model.config, max_cache_len=9, offload_device="cuda")
    with pytest.raises(caches.StepError, match="2 or 4 tensors"):
        caches.from_legacy_cache([(torch.zeros(1, 1, 1, 1),)])
    with pytest.raises(caches.StepError, match="the model has 4 layers, but the legacy cache 1"):
        caches.from_legacy_cache([(torch.zeros(1, 1, 1, 1),) * 2], model.config)
    with pytest.raises(caches.UnsupportedLayerError, match="pass transformers' own"):
        caches.EncoderDecoderCache(caches.DynamicCache(), object())
    elsewhere = {"device": "meta"}, {"layer_device_map": {2: 0}}, {"dtype": torch.bfloat16}
    for place in elsewhere:
        ours = static(model.config, max_cache_len=40, **place)
        with (
            pytest.raises(caches.StepError, match=r"was built for (layer \d on (meta|cuda:0)|bfloat16)"),
            torch.no_grad(),
        ):
            model(**inputs, past_key_values=ours)
    with pytest.raises(caches.CapacityError, match="room for 1 rows, but the step has 2"), torch.no_grad():
        model(**inputs, past_key_values=static(model.config, max_cache_len=40, batch_size=1))
    with pytest.raises(engine.InputError, match="room for 1 rows, but the prompt has 2"):
        engine.generate(model, inputs, cache=static(model.config, max_cache_len=40, batch_size=1))


def test_numbers_that_are_not_finite_are_found_on_request():
    model, inputs = tiny_model("falcon_h1"), prompt()
    ours = engine.generate(model, inputs, max_new_tokens=3).cache
    ours.check_finite()
    ours.key_cache[1][1, 0, 5, 3] = float("inf")
    with pytest.raises(caches.StepError, match="layer 1: 1 elements of keys in row 1 are NaN or infinite"):
        ours.check_finite()
    ours.ssm_states[0][0] = float("nan")
    with pytest.raises(caches.StepError, match=r"layer 0: \d+ elements of recurrent 0 in row 0"):
        ours.check_finite()


@pytest.mark.parametrize(
    ("build", "backend"),
    [
        (lambda **more: caches.QuantizedCache("quanto", nbits=4, residual_length=4, **more), "quanto"),
        (
            lambda **more: caches.QuantizedCache("HQQ", axis_key=1, axis_value=1, residual_length=4, **more),
            "hqq",
        ),
        (lambda **more: caches.QuantoQuantizedCache(nbits=2, residual_length=4, **more), "quanto"),
        (lambda **more: caches.QuantoQuantizedCache(caches.QuantizedCacheConfig(residual_length=4), **more), "quanto"),
        (
            lambda **more: caches.HQQQuantizedCache(
                caches.QuantizedCacheConfig(backend="hqq", nbits=8, residual_length=4), **more
            ),
            "hqq",
        ),
    ],
)
def test_quantized_caches_by_their_names(build, backend):
    """With a configuration of the model, or finding its layers as they are used."""
    model, inputs = tiny_model("llama"), prompt()
    options = {"max_new_tokens": NEW, "do_sample": False}
    with_layers, without = build(config=model.config), build()
    texts = [model.generate(**inputs, **options, past_key_values=ours) for ours in (with_layers, without)]
    assert torch.equal(*texts)
    assert len(without) == len(with_layers) == model.config.num_hidden_layers
    assert with_layers.is_quantized
    assert without.is_quantized
    named = caches.build("quantized", model.config, backend=backend, residual_length=4)
    assert type(with_layers) is type(named)
    assert with_layers.bytes < caches.convert(with_layers, "dynamic").bytes


def test_a_quantized_cache_with_another_backends_options():
    with pytest.raises(ConfigError, match=r"HQQQuantizedCache writes with hqq, but .* backend='kivi'"):
        caches.HQQQuantizedCache(caches.QuantizedCacheConfig(backend="kivi"))
    with pytest.raises(ConfigError, match=r"QuantoQuantizedCache writes with quanto, but .* backend='fp8'"):
        caches.QuantoQuantizedCache(backend="fp8")
