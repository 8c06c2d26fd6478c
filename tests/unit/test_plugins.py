"""Caches, strategies and codecs of others: defined again, under a name that is taken, brought along by a package."""

import functools
import json
import logging
import sys

import pytest
import torch
from architectures import prompt, tiny_model

import caches
import configs
import engine
import strategies
from caches import registry
from caches.quantization.codec import CHOICES
from configs import plugins
from strategies import registry as strategy_registry

CACHE = """
import dataclasses, typing
import caches, configs

@dataclasses.dataclass(frozen=True)
class MineConfig(configs.PlacedCacheConfig{keyword}):
    name: typing.ClassVar[str] = "{name}"
    option: int = {number}

@caches.register(MineConfig{argument})
def mine(specs, options):
    '''A plug-in number {number}.'''
    return caches.Cache("{name}", specs, lambda slot: caches.GrowingStore(slot.timeline))
"""
STRATEGY = """
import dataclasses, typing
import strategies

@strategies.register{argument}
@dataclasses.dataclass(frozen=True)
class Mine(strategies.Greedy):
    name: typing.ClassVar[str] = "{name}"
    number: int = {number}
"""


@pytest.fixture(autouse=True)
def _own_registries(monkeypatch):
    monkeypatch.setattr(registry, "_recipes", dict(registry._recipes))
    monkeypatch.setattr(configs.CacheConfig, "_by_name", dict(configs.CacheConfig._by_name))
    monkeypatch.setattr(strategy_registry, "_strategies", dict(strategy_registry._strategies))
    monkeypatch.setattr(plugins, "_loaded", set())
    for table in (configs.CODECS, CHOICES):
        for name in ("own", "half"):
            monkeypatch.setitem(table, name, None)
            del table[name]


def cell(code, module="__main__", name="mine", number=1, replace=False, **more):
    """Execute it as a cell of a notebook is."""
    argument = {CACHE: ", replace=True", STRATEGY: "(replace=True)"}[code] if replace else ""
    keyword = ", replace=True" if replace else ""
    values = {"name": name, "number": number, "argument": argument, "keyword": keyword} | more
    exec(code.format(**values), {"__name__": module})


def test_a_cell_that_runs_again():
    for number in (1, 2):
        cell(CACHE, number=number)
        assert caches.recipe("mine").summary == f"A plug-in number {number}."
        assert configs.CacheConfig.from_dict({"name": "mine"}).option == number
        out = engine.generate(tiny_model("llama"), prompt(), cache="mine", max_new_tokens=2)
        assert out.stats.cache == "mine"
        cell(STRATEGY, number=number)
        assert strategies.build("mine").number == number
        assert strategies.options("mine") == ["number"]


@pytest.mark.parametrize(("code", "taken"), [(CACHE, "dynamic"), (STRATEGY, "greedy")], ids=["cache", "strategy"])
def test_a_name_that_is_taken(code, taken):
    cell(code)
    for name, holder in (("mine", "__main__.Mine"), (taken, "(configs|strategies)")):
        with pytest.raises(configs.ConfigError, match=rf"named '{name}' is registered already, by {holder}") as raised:
            cell(code, module="another", name=name)
        assert isinstance(raised.value, engine.EngineError)
        assert isinstance(raised.value, ValueError)
    cell(code, module="another", number=3, replace=True)
    found = caches.recipe("mine").options() if code == CACHE else strategies.build("mine")
    assert type(found).__module__ == "another"


def test_another_recipe_for_the_same_options():
    cell(CACHE)
    options = caches.recipe("mine").options
    with pytest.raises(configs.ConfigError, match=r"by __main__.MineConfig and __main__.mine: .* replace=True"):
        caches.register(options)(len)
    caches.register(options, replace=True)(test_a_cell_that_runs_again)
    assert caches.recipe("mine").build is test_a_cell_that_runs_again


def test_a_recipe_without_a_name_of_its_own():
    cell(CACHE)
    found = caches.recipe("mine")
    partial = functools.partial(found.build)
    with pytest.raises(configs.ConfigError, match=r"by __main__.MineConfig and __main__.mine: "):
        caches.register(found.options)(partial)
    caches.register(found.options, replace=True)(partial)
    caches.register(found.options)(partial)
    with pytest.raises(configs.ConfigError, match=r"by __main__.MineConfig and functools.partial"):
        caches.register(found.options)(found.build)


def test_what_failed_is_not_registered():
    with pytest.raises(configs.ConfigError):
        cell(CACHE, module="another", name="static")
    assert configs.CacheConfig.from_dict({"name": "static"}) == configs.StaticCacheConfig()
    assert caches.recipe("static").options is configs.StaticCacheConfig


def halves(groups, bits):
    return torch.zeros_like(groups), torch.ones(len(groups), 1), None


FACTS = configs.CodecFacts(bits=(4,), axes={})


@pytest.mark.parametrize(
    ("arguments", "match"),
    {
        "a name that is never found": (("Own", FACTS, halves), "small letters"),
        "no facts": (("own", {"bits": (4,)}, halves), "configs.CodecFacts and a function"),
        "no function": (("own", FACTS, None), "configs.CodecFacts and a function"),
        "no bits": (("own", configs.CodecFacts((), {}), halves), r"bits=\(\), but codes of"),
        "bits that cannot be packed": (("own", configs.CodecFacts((4, 5), {}), halves), r"bits=\(4, 5\), but codes of"),
        "no elements": (("own", configs.CodecFacts((4,), {}, group=0), halves), "group=0"),
        "another's name": (("kivi", FACTS, halves), "'kivi' is registered already"),
    }.values(),
)
def test_a_codec_that_cannot_be_is_not_registered(arguments, match):
    before = dict(configs.CODECS), dict(CHOICES)
    with pytest.raises(configs.ConfigError, match=match):
        caches.register_codec(*arguments)
    assert before == (configs.CODECS, CHOICES)


def test_a_codec_needs_facts_and_a_function():
    configs.CODECS["half"] = FACTS
    with pytest.raises(
        configs.ConfigError, match=r"no function chooses its codes: register both with caches\.register_codec"
    ):
        caches.build("quantized", tiny_model("llama").config, backend="half")
    CHOICES["own"] = halves
    with pytest.raises(configs.ConfigError, match="no codec named 'own'"):
        caches.build("quantized", tiny_model("llama").config, backend="own")
    for _ in range(2):  # as in a cell of a notebook
        caches.register_codec("own", FACTS, halves)
    assert caches.build("quantized", tiny_model("llama").config, backend="own").layers


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with a cache, a strategy, and one that cannot be imported."""
    names = {"name": "packed", "number": 7, "argument": "", "keyword": ""}
    (tmp_path / "packed_cache.py").write_text(CACHE.format(**names))
    (tmp_path / "packed_strategy.py").write_text(STRATEGY.format(**names))
    (tmp_path / "packed_broken.py").write_text("import there_is_no_such_module\n")
    info = tmp_path / "packed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: packed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvengine.caches]\npacked = packed_cache:MineConfig\nbroken = packed_broken\n"
        "[kvengine.strategies]\npacked = packed_strategy:Mine\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("packed_cache", "packed_strategy", "packed_broken"):
        sys.modules.pop(name, None)


def test_packages_that_bring_some_along(package, caplog):
    caches.recipe("dynamic")
    assert "packed_cache" not in sys.modules  # before it is asked for
    with caplog.at_level(logging.WARNING, logger="configs"):
        out = engine.generate(tiny_model("llama"), prompt(), cache="packed", strategy="packed", max_new_tokens=2)
    assert out.stats.cache == "packed"
    [record] = caplog.records
    assert "the plug-in 'broken' of packed (packed_broken) cannot be loaded" in record.getMessage()
    assert "there_is_no_such_module" in str(record.exc_info[1])
    with pytest.raises(caches.UnknownCacheError, match="packed"):
        caches.recipe("packet")


@pytest.mark.parametrize(
    "find",
    [
        lambda: caches.names(),
        lambda: configs.CacheConfig.names(),
        lambda: [configs.CacheConfig.from_dict({"name": "packed"}).name],
        lambda: [caches.build("packed", tiny_model("llama").config).name],
        lambda: strategies.names(),
        lambda: [strategies.build("packed").name],
    ],
    ids=["caches", "configurations", "from_dict", "build", "strategies", "strategies.build"],
)
def test_all_ways_to_ask(find, package):
    assert "packed" in find()


def test_the_command_line_sees_them(package, cli):
    done = cli(["caches", "packed", "--json"])
    assert done.exit_code == 0, done.stderr
    [entry] = json.loads(done.stdout)["caches"]
    assert (entry["name"], entry["summary"]) == ("packed", "A plug-in number 7.")
    done = cli(["generate", "import os\n", "--cache", "packed", "--max-new-tokens", "2", "--json"])
    assert done.exit_code == 0, done.stderr
    assert '"cache": "packed"' in done.stdout
