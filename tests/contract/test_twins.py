"""A backend, a codec or a strategy under another name gives the same answers: nothing asks for names but registries."""

import ast
import functools
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from architectures import tiny_model
from encoder_decoders import tiny_encoder_decoder
from injection import failing

import caches
import configs
import engine
import strategies
from caches import registry
from caches.quantization.codec import CHOICES
from caches.registry import _warn_once
from configs import EngineConfig
from strategies import registry as strategy_registry

ROOT = Path(caches.__file__).parents[1]
REGISTRIES = {"caches/backends.py", "caches/quantization/codec.py", "configs/cache.py", "configs/quantized.py"}
# Words of others that are spelled like one of ours: of RoPE, of OpenAI's tools, of a package, of layers.
OTHER_WORDS = {
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


def _compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every text that something is compared with, or that selects an entry of a table."""
    for node in ast.walk(tree):
        operands: list[Any] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        elif isinstance(node, ast.Dict):
            operands = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "with" in node.func.attr:
            operands = node.args  # startswith, endswith
        for operand in operands:
            texts = operand.elts if isinstance(operand, ast.Tuple | ast.List | ast.Set) else [operand]
            yield from ((node.lineno, text.value) for text in texts if isinstance(text, ast.Constant))


def test_names_are_compared_in_registries_alone():
    names = {*caches.names(), *strategies.names(), *configs.CODECS}
    quoted = re.compile("|".join(f'"{name}"' for name in names))
    asked = []
    for folder in ("engine", "caches", "strategies", "configs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            place, code = path.relative_to(ROOT).as_posix(), path.read_text()
            if place not in REGISTRIES and quoted.search(code):
                compared = [(line, text) for line, text in _compared(ast.parse(code)) if text in names]
                asked += [f"{place}:{line}: {text}" for line, text in compared if (place, text) not in OTHER_WORDS]
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


def outcome(model, name: str, config: EngineConfig, at=(), **asked: Any) -> dict[str, Any]:
    """What a run with this cache comes to; messages and descriptions are part of it."""
    ids = torch.arange(3, 33)[None]
    try:
        with failing(model, at=at, all_happen=False):
            options = OPTIONS.get(name.removesuffix("_twin"))
            out = engine.Generator(model, config=config).generate(
                ids, cache=name, cache_config=options, max_new_tokens=6, **asked
            )
    except engine.EngineError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"tokens": out.tokens, "cache": out.stats.cache, "fallbacks": list(map(str, out.stats.fallbacks))}


def answers(model, name: str) -> str:
    """All that differs between backends, as text without the name's suffix."""
    options = OPTIONS.get(name.removesuffix("_twin"))
    free = {"free_bytes": 10**9}
    plan = engine.plan(model, prompt_tokens=30, max_new_tokens=6, cache=name, cache_config=options, **free)
    answers = [plan.why, plan.choice, vars(plan[name])]
    answers.append(outcome(model, name, EngineConfig()))  # the first one measures the model too
    most = max(1, 7 * sum(plan[name].cache_bytes.values()) // 10)
    for action in ("offload", "slide"):
        answers.append(outcome(model, name, EngineConfig(max_cache_bytes=most, over_budget=action)))
    for fallbacks in ("offload", "quantize"):
        answers.append(outcome(model, name, EngineConfig(on_oom=(fallbacks,)), at=[(1, 0)]))
    answers.append(outcome(model, name, EngineConfig(), use_cache=False))
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


@pytest.mark.parametrize("name", ["quantized", "none"])
def test_the_command_line_says_the_same(twins, cli, name):
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
    _warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "caches"):
        for _ in range(2):
            caches.build(name, tiny_model("llama").config, **options)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warns
    assert not warns or ("backend='kivi'" in said[0] and repr(name) in said[0])


def test_a_strategy_under_another_name_has_the_limits_of_the_original(monkeypatch):
    from engine.server.protocol import ChatRequest
    from engine.server.reading import Limits, parameters

    monkeypatch.setattr(strategy_registry, "_strategies", dict(strategy_registry._strategies))
    for strategy in (strategies.Beam, strategies.Contrastive):
        values = {field.name: field.default for field in fields(strategy)}
        strategies.register(
            dataclass(frozen=True)(type("Twin", (strategy,), values | {"name": f"{strategy.name}_twin"}))
        )

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
