"""What an `EngineConfig` says about the cache, and what wins over it."""

import copy

import pytest
import torch
from architectures import tiny_model

import caches
import configs
import engine
from configs import DynamicCacheConfig, StaticCacheConfig

IDS = torch.tensor([[5, 6, 7]])


def run(config, **options):
    generator = engine.Generator(tiny_model("llama"), config=config)
    return generator.generate(IDS, max_new_tokens=3, **options)


def chosen(config, **options):
    """The name of the cache that is used and the tokens it holds."""
    cache = run(config, **options).cache
    return cache.name, cache.max_tokens


@pytest.mark.parametrize("cache", ["static", StaticCacheConfig(), StaticCacheConfig(max_cache_len=64)])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"cache_config": {"max_cache_len": 32}}, ("static", 32)),
        ({"cache_config": StaticCacheConfig(max_cache_len=32)}, ("static", 32)),
        ({"generation_config": {"cache_config": {"max_cache_len": 32}}}, ("static", 32)),
        ({"cache_implementation": "static", "cache_config": {"max_cache_len": 32}}, ("static", 32)),
        ({"cache": "static"}, ("static", 128)),
        ({"cache": "dynamic"}, ("dynamic", None)),
        ({"cache": DynamicCacheConfig()}, ("dynamic", None)),
        ({"cache_implementation": "dynamic"}, ("dynamic", None)),
    ],
    ids=str,
)
def test_a_call_wins(cache, options, expected):
    if "generation_config" in options:
        given = copy.deepcopy(tiny_model("llama").generation_config)
        given.cache_config = options["generation_config"]["cache_config"]
        options = {"generation_config": given}
    assert chosen(engine.EngineConfig(cache=cache), **options) == expected


def test_without_a_word_of_the_call_it_counts():
    assert chosen(engine.EngineConfig(cache=StaticCacheConfig(max_cache_len=64))) == ("static", 64)
    assert chosen(engine.EngineConfig(cache=StaticCacheConfig())) == ("static", 128)
    assert run(engine.EngineConfig(cache=StaticCacheConfig(max_cache_len=64)), use_cache=False).stats.cache == "none"


def test_it_wins_over_the_model(monkeypatch):
    own = tiny_model("llama").generation_config
    monkeypatch.setattr(own, "cache_implementation", "static")
    monkeypatch.setattr(own, "cache_config", {"max_cache_len": 32})
    assert chosen(None) == ("static", 32)
    assert chosen(engine.EngineConfig(cache=StaticCacheConfig(max_cache_len=64))) == ("static", 64)
    assert chosen(engine.EngineConfig(cache="dynamic")) == ("dynamic", None)
    assert chosen(None, cache="dynamic", generation_config=copy.deepcopy(own)) == ("dynamic", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_config": DynamicCacheConfig()}, "StaticCacheConfig is for the cache 'static', not for 'dynamic'"),
        ({"cache_config": {"max_cache_length": 5}}, "did you mean 'max_cache_len'"),
        ({"cache_config": {"max_cache_len": "5"}}, "max_cache_len='5', but it has to be int or None"),
        ({"cache_config": {"max_cache_len": 2}}, "holds at most 2 tokens"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        run(engine.EngineConfig(cache=StaticCacheConfig(max_cache_len=64)), **options)


def test_options_are_given_once():
    given = copy.deepcopy(tiny_model("llama").generation_config)
    given.cache_config = {"max_cache_len": 32}
    with pytest.raises(engine.OptionError, match=r"cache_config and generation_config.cache_config both"):
        run(None, cache="static", cache_config={"max_cache_len": 64}, generation_config=given)
    with pytest.raises(engine.OptionError, match="a live one was given"):
        run(None, cache=caches.build("dynamic", tiny_model("llama").config), generation_config=given)


def backend(preset):
    cache = configs.preset(preset).cache
    return cache if isinstance(cache, str) else cache.name


@pytest.mark.parametrize("preset", [name for name in configs.presets() if backend(name) in caches.names()])
def test_presets_generate_the_same_text(preset):
    out = run(configs.preset(preset))
    assert torch.equal(out.sequences, run(None).sequences)
    assert out.stats.cache == backend(preset)


@pytest.mark.parametrize("given", [{"cache": "static"}, "low_memory", engine.EngineConfig])
def test_a_generator_takes_a_configuration_alone(given):
    with pytest.raises(engine.OptionError, match=r"it is an EngineConfig: .* configs\.preset\(name\) makes one"):
        engine.Generator(tiny_model("llama"), config=given)


def test_a_generator_knows_at_once_that_there_is_no_such_cache():
    with pytest.raises(engine.EngineError, match="no cache named 'statik'; did you mean 'static'"):
        engine.Generator(tiny_model("llama"), config=engine.EngineConfig(cache="statik"))
