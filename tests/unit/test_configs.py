"""Configurations travel as dicts and JSON and refuse what they do not know."""

import dataclasses
import json
import subprocess
import sys
from typing import ClassVar

import pytest
import torch

import configs
from configs import CacheConfig, Config, ConfigError, EngineConfig, StaticCacheConfig, nearest


def kinds_below(kind):
    for one in kind.__subclasses__():
        yield one
        yield from kinds_below(one)


BASES = (CacheConfig, configs.PlacedCacheConfig)
KINDS = [kind for kind in dict.fromkeys(kinds_below(Config)) if kind.__module__.startswith("configs.")]
KINDS = [kind for kind in KINDS if kind not in BASES]
CANDIDATES = (77, 0.5, True, False, StaticCacheConfig(max_cache_len=9), "aot_eager", "onednn", "float32", {"0": "cpu"})
CANDIDATES += ("kivi", "int4", "int8", 2, -1, "disk", 777, "slide", ["split"])
NEEDS = {
    "folder": {"residency": "disk"},
    "prefix_store_folder": {"prefix_store_bytes": 9},
}  # options that go with others only


def label(value):
    return value.__name__ if isinstance(value, type) else value


def changed(kind, name):
    """A configuration of this kind with something else than the default for one option, and what goes with it."""
    plain = kind.from_dict(NEEDS.get(name, {}))
    for value in CANDIDATES:
        try:
            config = plain.update(**{name: value})[0]
        except ConfigError:
            continue
        if config != plain:
            return config, plain
    raise AssertionError(f"add a value to CANDIDATES that {kind.__name__}.{name} takes")


def check_travels(config, folder):
    kind, file = type(config), folder / "config.json"
    assert dict(config) == config.to_dict()
    assert kind.from_dict(config.to_dict()) == kind.from_dict(config.to_dict(use_diff=True)) == config
    for use_diff in (False, True):
        config.to_json_file(file, use_diff)
        assert kind.from_json_file(file) == config
        assert file.read_text() == config.to_json_string(use_diff)
        assert json.loads(file.read_text()) == config.to_dict(use_diff)
    if isinstance(config, CacheConfig):
        assert CacheConfig.from_json_file(file) == CacheConfig.from_dict(config.to_dict()) == config
        check_travels(EngineConfig(cache=config), folder)


@pytest.mark.parametrize("kind", KINDS, ids=label)
def test_defaults_travel(kind, tmp_path):
    check_travels(kind(), tmp_path)
    assert set(kind().to_dict(use_diff=True)) <= {"name"}
    assert set(kind().to_dict()) - {"name"} == set(kind.option_names())
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().anything = 1


@pytest.mark.parametrize("kind", KINDS, ids=label)
def test_every_option_travels(kind, tmp_path):
    for name in kind.option_names():
        config, plain = changed(kind, name)
        check_travels(config, tmp_path)
        assert set(config.to_dict(use_diff=True)) - {"name"} == {name, *NEEDS.get(name, {})}
        assert plain.update(**{name: getattr(config, name), "zzz": 5}) == (config, {"zzz": 5})
        assert config.update(**{name: kind.defaults()[name]}) == (plain, {})


@pytest.mark.parametrize("kind", KINDS, ids=label)
def test_every_option_has_a_type(kind):
    for name in kind.option_names():
        for build in (kind, kind().update, lambda **values: kind.from_dict(values)):
            with pytest.raises(ConfigError, match=rf"^{kind.__name__}: {name}=<object .*>, but it has to be \w"):
                build(**{name: object()})


@pytest.mark.parametrize("kind", KINDS, ids=label)
def test_unknown_options_are_refused(kind):
    with pytest.raises(ConfigError, match=rf"^{kind.__name__} has no option 'zzz'; (known: \w|it takes no options)"):
        kind.from_dict({"zzz": 5})


def test_overrides_win():
    assert StaticCacheConfig.from_dict({"max_cache_len": 5}, max_cache_len=6).max_cache_len == 6


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (StaticCacheConfig, {"max_cache_length": 5}, "did you mean 'max_cache_len'"),
        (StaticCacheConfig, {"max_cache_len": 0}, "max_cache_len=0, but it has to be at least 1"),
        (StaticCacheConfig, {"max_cache_len": "12"}, "StaticCacheConfig: max_cache_len='12', .* to be int or None$"),
        (StaticCacheConfig, {"max_cache_len": 1.5}, "max_cache_len=1.5, but it has to be int or None$"),
        (StaticCacheConfig, {"max_cache_len": True}, "max_cache_len=True, but it has to be int or None$"),
        (StaticCacheConfig, {"name": "dynamic"}, "StaticCacheConfig is for the cache 'static', not for 'dynamic'"),
        (configs.SlidingWindowCacheConfig, {"window_length": 0}, "window_length=0"),
        (configs.OffloadedCacheConfig, {"residency": "hosts"}, "residency='hosts', but it has to be 'host' or 'disk'"),
        (configs.OffloadedCacheConfig, {"folder": "/tmp"}, "folder='/tmp' is for residency='disk', but this is 'host'"),
        (CacheConfig, {"name": "statik"}, "no cache configuration named 'statik'; did you mean 'static'"),
        (CacheConfig, {"name": ["static"]}, "no cache configuration named"),
        (CacheConfig, {"max_cache_len": 5}, 'needs its "name"; known: dynamic, static'),
        (CacheConfig, {"name": "static", "size": 5}, "StaticCacheConfig has no option 'size'"),
        (EngineConfig, {"prefill_chunk_tokens": -1}, "prefill_chunk_tokens=-1"),
        (EngineConfig, {"compile": "fast"}, "compile='fast'"),
        (EngineConfig, {"compile": None}, "compile=None, but it has to be str$"),
        (EngineConfig, {"linears": "mkl"}, "linears='mkl'"),
        (EngineConfig, {"cache": 5}, "EngineConfig: cache=5, but it has to be str or CacheConfig or None$"),
        (EngineConfig, {"cache": {"name": "statik"}}, "did you mean 'static'"),
        (EngineConfig, {"cache": {"name": "static", "max_cache_len": "5"}}, "StaticCacheConfig: max_cache_len='5'"),
    ],
)
def test_refusals(kind, values, message):
    with pytest.raises(ConfigError, match=message):
        kind.from_dict(values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"cache":\n  oops}', r"config.json is no JSON: Expecting value: line 2 column 3"),
        (b"\xff\xfe\xfd", r"config.json is no JSON: .* 0xfd in position 2"),
        (b'["static"]', r'config.json holds \["static"\], but a configuration is an object'),
        (b'{"cash": 5}', r"config.json: EngineConfig has no option 'cash'; did you mean 'cache'"),
    ],
)
def test_files_that_hold_no_configuration(content, message, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_json_file(tmp_path / "config.json")


def test_torchs_own_types_are_kept_as_strings():
    config = EngineConfig(dtype=torch.float32, device_map=torch.device("cuda:1"))
    assert (config.dtype, config.device_map) == ("float32", "cuda:1")
    assert EngineConfig.from_dict({"dtype": torch.bfloat16}).dtype == "bfloat16"
    with pytest.raises(ConfigError, match="has to be int"):
        StaticCacheConfig(max_cache_len=torch.float32)


def test_torch_is_not_needed():
    script = "import sys, configs; configs.preset('throughput'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_a_dict_stands_for_the_configuration_of_a_cache():
    form = {"name": "static", "max_cache_len": 4096}
    expected = EngineConfig(cache=StaticCacheConfig(max_cache_len=4096))
    assert EngineConfig.from_dict({"cache": form}) == EngineConfig(cache=form) == expected
    assert EngineConfig().update(cache=form)[0] == expected
    assert expected.to_dict(use_diff=True) == {"cache": form}
    assert EngineConfig(cache=StaticCacheConfig()).to_dict(use_diff=True) == {"cache": {"name": "static"}}


def test_configurations_of_others(monkeypatch):
    monkeypatch.setattr(CacheConfig, "_by_name", dict(CacheConfig._by_name))

    @dataclasses.dataclass(frozen=True)
    class OurCacheConfig(StaticCacheConfig):
        name: ClassVar[str] = "ours, for this test"
        share: float = 0.5
        sizes: list[int] = dataclasses.field(default_factory=list)

    config = EngineConfig(cache=OurCacheConfig(max_cache_len=5, share=1, sizes=[3]))
    assert EngineConfig.from_dict(json.loads(config.to_json_string())) == config
    with pytest.raises(ConfigError, match="share='1', but it has to be float"):
        OurCacheConfig(share="1")
    with pytest.raises(ConfigError, match="sizes=3, but it has to be list"):
        OurCacheConfig(sizes=3)


def test_presets(tmp_path):
    assert configs.presets() == ["endless_streaming", "long_context", "low_memory", "throughput"]
    for name in configs.presets():
        check_travels(configs.preset(name), tmp_path)
        assert configs.preset(name) != EngineConfig()
    assert configs.preset("endless_streaming").cache == configs.SinkCacheConfig(window_length=1024)
    with pytest.raises(ConfigError, match="no preset named 'low_memori'; did you mean 'low_memory'"):
        configs.preset("low_memori")


def test_nearest():
    assert nearest("statik", ["static", "dynamic"]) == "did you mean 'static'?"
    assert nearest("xyz", ["static", "dynamic"]) == "known: dynamic, static"
