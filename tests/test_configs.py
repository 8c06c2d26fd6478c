"""Configurations travel as dicts and JSON and refuse what they do not know."""

import dataclasses

import pytest

from configs import ConfigError, DynamicCacheConfig, EngineConfig, NoCacheConfig, StaticCacheConfig, nearest

SAMPLES = [
    DynamicCacheConfig(),
    NoCacheConfig(),
    StaticCacheConfig(max_cache_len=77),
    EngineConfig(cache="static", prefill_chunk_tokens=5, compile="inductor", dtype="float32"),
]


@pytest.mark.parametrize("config", SAMPLES, ids=lambda config: type(config).__name__)
def test_round_trips(config, tmp_path):
    kind, file = type(config), tmp_path / "config.json"
    assert kind.from_dict(config.to_dict()) == config
    config.to_json_file(file)
    assert kind.from_json_file(file) == config
    assert file.read_text() == config.to_json_string()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.anything = 1


def test_overrides_win():
    assert StaticCacheConfig.from_dict({"max_cache_len": 5}, max_cache_len=6).max_cache_len == 6


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (StaticCacheConfig, {"max_cache_length": 5}, "did you mean 'max_cache_len'"),
        (StaticCacheConfig, {"zzz": 5}, "known: max_cache_len"),
        (DynamicCacheConfig, {"zzz": 5}, "takes no options"),
        (StaticCacheConfig, {"max_cache_len": 0}, "max_cache_len=0, but it has to be at least 1"),
        (EngineConfig, {"prefill_chunk_tokens": -1}, "prefill_chunk_tokens=-1"),
        (EngineConfig, {"compile": "fast"}, "compile='fast'"),
        (EngineConfig, {"linears": "mkl"}, "linears='mkl'"),
    ],
)
def test_refusals(kind, values, message):
    with pytest.raises(ConfigError, match=message):
        kind.from_dict(values)


def test_nearest():
    assert nearest("statik", ["static", "dynamic"]) == "did you mean 'static'?"
    assert nearest("xyz", ["static", "dynamic"]) == "known: dynamic, static"
