"""A backend, a codec or a strategy under another name gives the same answers: nothing asks for names but registries."""

import functools
import json
import logging
import re
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest
import torch
from architectures import tiny_model
from compared import comparisons
from encoder_decoders import tiny_encoder_decoder
from injection import failing
from strategy_cases import OPTIONS as OPTIONS_OF_STRATEGIES

import caches
import configs
import engine
import strategies
from caches import registry
from caches.platform.warn_once import warn_once
from caches.quantization.codec import CHOICES
from configs import EngineConfig
from strategies import registry as strategy_registry

REGISTRIES = {"caches/backends.py", "caches/quantization/codec.py", "configs/cache.py", "configs/quantized.py"}
# Words of others that are spelled like one of ours: of RoPE, of OpenAI's tools, of packages, layers and parameters.
OTHER_WORDS = {
    ("caches/layers/model_version.py", "dynamic"),
    ("caches/layers/rope.py", "dynamic"),
    ("caches/layers/quirks.py", "mamba"),
    ("engine/kernels/weight_conversion.py", "hqq"),
    ("engine/request/parameter_hints.py", "quantized"),
    ("engine/request/parameter_hints.py", "sliding_window"),
    ("engine/server/bodies.py", "none"),
    ("engine/model/model_sizes.py", "dynamic"),
    ("engine/model/rope_frequencies.py", "dynamic"),
    ("engine/server/reading.py", "none"),
    ("engine/model/masks.py", "none"),
    ("engine/model/masks.py", "hybrid"),
    ("caches/layers/layer_spec.py", "hybrid"),
    ("caches/layers/layer_spec.py", "sliding_window"),
}
IN_SHORT = ("dynamic", "offloaded", "quantized", "encoder_decoder", "none")
OPTIONS = {
    "sliding_window": {"window_length": 12},
    "sink": {"window_length": 12},
    "quantized": {"residual_length": 8, "backend": "kivi", "q_group_size": 8},
    "offloaded_quantized": {"residual_length": 8, "backend": "kivi", "q_group_size": 8},
    "quantized_sink": {"window_length": 24, "residual_length": 8, "backend": "kivi", "q_group_size": 8},
}


def test_names_are_compared_in_registries_alone():
    names = {*caches.names(), *strategies.names(), *configs.CODECS}
    asked = comparisons(names, REGISTRIES, OTHER_WORDS)
    assert not asked, "a fact of the backend in its configuration answers this, and a plug-in's too"


@pytest.fixture
def twins(monkeypatch) -> None:
    """Every backend once more, under its name with "_twin"."""
    monkeypatch.setattr(registry, "_recipes", dict(registry._recipes))
    monkeypatch.setattr(configs.CacheConfig, "_by_name", dict(configs.CacheConfig._by_name))
    for recipe in list(registry._recipes.values()):
        twin = dataclass(frozen=True)(type("Twin", (recipe.options,), {"name": f"{recipe.name}_twin"}))

        @functools.wraps(recipe.build)
        def build(specs, options, of_original=recipe.build):
            return of_original(specs, options)

        caches.register(twin, any_layers=recipe.any_layers)(build)


@pytest.fixture
def codec_twins(monkeypatch) -> None:
    for table in (configs.CODECS, CHOICES):
        for name in list(table):
            monkeypatch.setitem(table, f"{name}_twin", table[name])


@pytest.fixture
def strategy_twins(monkeypatch) -> None:
    monkeypatch.setattr(strategy_registry, "_strategies", dict(strategy_registry._strategies))
    for strategy in list(strategy_registry._strategies.values()):
        defaults = {field.name: field.default for field in fields(strategy)}
        twin = type("Twin", (strategy,), defaults | {"name": f"{strategy.name}_twin"})
        strategies.register(dataclass(frozen=True)(twin))


def outcome(model, config: EngineConfig, at=(), **asked: Any) -> dict[str, Any]:
    """What a run comes to; messages and descriptions are part of it."""
    ids = torch.arange(3, 33)[None]
    try:
        with failing(model, at=at, all_happen=False):
            out = engine.Generator(model, config=config).generate(ids, max_new_tokens=6, **asked)
    except engine.EngineError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"tokens": out.tokens, "cache": out.stats.cache, "fallbacks": list(map(str, out.stats.fallbacks))}


def answers(model, name: str, **options: Any) -> str:
    """All that differs between backends, as text without the suffix of names."""
    options = OPTIONS.get(name.removesuffix("_twin"), {}) | options
    free, cache = {"free_bytes": 10**9}, {"cache": name, "cache_config": options}
    plan = engine.plan(model, prompt_tokens=30, max_new_tokens=6, **cache, **free)
    answers = [plan.why, plan.choice, vars(plan[name])]
    answers.append(outcome(model, EngineConfig(), **cache))  # the first one measures the model too
    most = max(1, 7 * sum(plan[name].cache_bytes.values()) // 10)
    for action in ("offload", "slide"):
        answers.append(outcome(model, EngineConfig(max_cache_bytes=most, over_budget=action), **cache))
    for fallbacks in ("offload", "quantize"):
        answers.append(outcome(model, EngineConfig(on_oom=(fallbacks,)), at=[(1, 0)], **cache))
    answers.append(outcome(model, EngineConfig(), use_cache=False, **cache))
    return json.dumps(answers, default=str, indent=1).replace("_twin", "")


def model_of(name: str):
    if name == "encoder_decoder":
        return tiny_encoder_decoder("t5")
    return tiny_model({"mamba": "mamba", "hybrid": "gemma2"}.get(name, "llama"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.slow) for name in caches.names()],
)
def test_a_backend_under_another_name_gives_the_same_answers(twins, name):
    model = model_of(name)
    assert answers(model, f"{name}_twin") == answers(model, name)


IN_ALL = ["kivi", *(pytest.param(name, marks=pytest.mark.slow) for name in ("quanto", "hqq", "fp8"))]


@pytest.mark.parametrize("codec", IN_ALL)
def test_a_codec_under_another_name_gives_the_same_answers(codec_twins, cli, tmp_path, codec):
    facts, model = configs.CODECS[codec], tiny_model("llama")
    if facts.package is not None:
        pytest.importorskip(facts.package)
    of_both = (answers(model, "quantized", backend=backend) for backend in (codec, f"{codec}_twin"))
    said, of_twin = (
        re.sub(r"""\s*['"]?backend['"]?[=:]\s*['"]?\w+['"]?,?""", "", text) for text in of_both
    )  # the default is not said
    assert said == of_twin
    texts = []
    for backend in (codec, f"{codec}_twin"):
        cache = {"cache": "quantized", "cache_config": OPTIONS["quantized"] | {"backend": backend}}
        out = engine.generate(model, torch.arange(3, 33)[None], max_new_tokens=6, **cache)
        out.cache.save(tmp_path / backend, model)
        again = caches.load(tmp_path / backend, model)
        texts.append(engine.generate(model, out.sequences, cache=again, max_new_tokens=6).tokens)
    assert texts[0] == texts[1]
    shown = cli(["caches", "quantized"])
    assert shown.exit_code == 0
    assert f"{codec}_twin" in shown.stdout


@pytest.mark.parametrize("name", strategies.names())
def test_a_strategy_under_another_name_gives_the_same_texts(strategy_twins, name):
    model, options = tiny_model("llama"), OPTIONS_OF_STRATEGIES.get(name, {}) | {"seed": 1}
    if name == "assisted":
        options |= {"assistant_model": model}

    def told(asked: str) -> str:
        strategy = {"strategy": asked, **options}
        runs = [outcome(model, EngineConfig(), **strategy)]
        for fallback in ("chunk", "split"):
            runs.append(outcome(model, EngineConfig(on_oom=(fallback,)), at=[(0, 0), (3, 0)], **strategy))
        for more in ({"top_logprobs": 2}, {"do_sample": True}, {"do_sample": False}, {"cache": "none"}, {"top_p": 0.5},
                     {"num_beams": 2}, {"num_beams": 2, "top_logprobs": 2},
                     {"output_scores": True, "cache": "quantized"}):  # fmt: skip
            runs.append(outcome(model, EngineConfig(), **strategy | more))
        return json.dumps(runs, indent=1).replace("_twin", "")

    original = told(name)
    assert "tokens" in original
    assert told(f"{name}_twin") == original


def test_a_server_says_the_same(twins, strategy_twins):
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    from served import NAME, served

    asked = [{"cache": "quantized", "cache_config": OPTIONS["quantized"]}, {"cache": "none"},
             {"strategy": "beam", "num_beams": 2}]  # fmt: skip
    refused = [{"cache": "sink"}, {"cache": "quantized", "cache_config": {"backend": "other"}}]

    def told(server, options: dict[str, Any]) -> str:
        body = {"model": NAME, "messages": [{"role": "user", "content": "import os"}], "max_tokens": 6}
        answer = server.http.post("/v1/chat/completions", json=body | {"temperature": 0, "engine": options})
        said = {name: value for name, value in answer.json().items() if name not in ("id", "created")}
        return json.dumps([answer.status_code, said]).replace("_twin", "")

    with served(engine.Generator(engine.SHIPPED_MODEL)) as server:
        for options in asked + refused:
            other = {key: f"{value}_twin" if key in ("cache", "strategy") else value for key, value in options.items()}
            original = told(server, options)
            assert ("error" in original) == (options in refused), original
            assert told(server, other) == original


@pytest.mark.parametrize("name", ["quantized", "none"])
def test_the_command_line_says_the_same(twins, cli, name):
    texts = []
    for asked in (name, f"{name}_twin"):
        done = cli(["generate", "import os\n", "--cache", asked, "--max-new-tokens", "4", "--json"])
        assert done.exit_code == 0, done.stderr
        found = json.loads(done.stdout.replace("_twin", ""))
        texts.append((found["rows"], found["stats"]["cache"], found["stats"]["cache_bytes"]))
    assert texts[0] == texts[1]
    for arguments in (["plan", "--prompt-tokens", "64", "--max-new-tokens", "8", "--cache"], ["caches"]):
        said = []
        for asked in (name, f"{name}_twin"):
            done = cli([*arguments, asked, "--json"])
            assert done.exit_code == 0
            found = json.loads(done.stdout.replace("_twin", "")) | {"free_bytes": None, "why": None}
            for backend in found.get("backends", ()):
                backend |= dict.fromkeys(("longest_context", "largest_batch"))  # what is free changes
            said.append(found)
        assert said[0] == said[1]


def test_the_plan_of_a_backend_that_rounds_says_that_the_text_can_change(twins):
    for name in ("quantized_twin", "sink_twin"):
        plan = engine.plan(tiny_model("llama").config, prompt_tokens=30, max_new_tokens=6, cache=name,
                           cache_config=OPTIONS[name.removesuffix("_twin")], free_bytes=10**9)  # fmt: skip
        assert f"it can change the text: {plan[name].changes_text}" in plan.why
    inner = configs.EncoderDecoderCacheConfig(self_cache="quantized_twin")
    assert "4 bits" in inner.changes_text
    assert configs.EncoderDecoderCacheConfig(cross_cache="static").changes_text is None


@pytest.mark.parametrize(
    ("options", "warns"),
    [({"nbits": 2}, True), ({"backend": "hqq", "nbits": 1}, True), ({"nbits": 2, "axis_key": -1}, False),
     ({"backend": "kivi", "nbits": 2}, False), ({}, False), ({"backend": "hqq", "nbits": 3}, False),
     ({"nbits_key": 2}, True), ({"backend": "hqq", "nbits_value": 2}, False),
     ({"backend": "coarse"}, True), ({"backend": "fine"}, False)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["quantized", "offloaded_quantized", "two_bits"])
def test_few_bits_of_keys_per_token_warn_once_before_any_work(monkeypatch, caplog, twins, name, options, warns):
    @dataclass(frozen=True)
    class TwoBits(configs.QuantizedCacheConfig):
        name: ClassVar[str] = "two_bits"

    caches.register(TwoBits)(lambda specs, options: caches.recipe("quantized").build(specs, options))
    for codec, per_channel in (("coarse", ()), ("fine", ("keys",))):
        monkeypatch.setitem(configs.CODECS, codec, configs.CodecFacts((2,), {}, per_channel=per_channel))
        monkeypatch.setitem(CHOICES, codec, CHOICES["kivi"])
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "caches"):
        for _ in range(2):
            caches.build(name, tiny_model("llama").config, **options)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warns
    assert not warns or ("backend='kivi'" in said[0] and repr(name) in said[0])


def test_a_strategy_under_another_name_has_the_limits_of_the_original(strategy_twins):
    from engine.server.bodies import ChatRequest
    from engine.server.reading import Limits, parameters

    def asked(name: str, **more: Any) -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "engine": {"strategy": name}} | more
        try:
            return str(parameters(ChatRequest(**body), 4, Limits(64, 8, 3, 9.0)))
        except engine.EngineError as error:
            return str(error)

    for name in ("beam", "contrastive"):
        for more in ({}, {"logprobs": True}):
            said = asked(name, **more)
            assert asked(f"{name}_twin", **more).replace("_twin", "") == said
            assert "3 at most" in said or "logprobs" in said
