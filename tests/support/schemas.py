"""Random JSON schemas, and texts that follow them."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from architectures import randomised
from jsonschema import Draft202012Validator
from transformers import AutoTokenizer, PreTrainedModel

import engine
from engine.request.call import read_call
from engine.request.constraints.constraint import read_constraints
from engine.request.constraints.grammar import Grammar

VOCABULARY = 4096
NEW = 160
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 0},
    "beam": {"num_beams": 3, "num_return_sequences": 2},
    "diverse_beam": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "assisted": {"num_assistant_tokens": 3},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}
CACHES: dict[str, dict[str, Any]] = {"dynamic": {}, "static": {}, "sliding_window": {"window_length": 24}}
_WORDS = ("id", "name", "a long key", "créé", "x/y", "größe_in_mm", "tags", '"quoted"', "is_ok", "日本")


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)


@functools.cache
def model(layers: int = 2) -> PreTrainedModel:
    """Random, with the shipped tokenizer; with one layer it is a draft that agrees at times."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    ids = dict(eos_token_id=0, pad_token_id=0, bos_token_id=0, max_position_embeddings=512)
    found = randomised("LlamaConfig", dict(vocab_size=VOCABULARY, num_hidden_layers=layers) | sizes | ids)
    found.generation_config.eos_token_id = 0
    return found


@functools.cache
def generator() -> engine.Generator:
    return engine.Generator(model(), tokenizer())


def grammar_of(columns: int = 0, ends: tuple[int, ...] = (0,), **asked: Any) -> Grammar:
    """Of one text that follows what is asked, behind so many columns."""
    return Grammar(read_constraints(read_call(**asked), 1), tokenizer(), VOCABULARY, ends, columns)


def random_schema(seed: int) -> dict[str, Any]:
    """Of the kinds that people use; texts that follow it are short."""
    draw = Random(seed)
    schema = _schema(draw, depth=2)
    if draw.random() < 0.2:
        schema = {"$defs": {"part": _schema(draw, depth=0)}, "type": "object", "required": ["one"],
                  "properties": {"one": {"$ref": "#/$defs/part"}, "two": {"$ref": "#/$defs/part"}},
                  "additionalProperties": False}  # fmt: skip
    return schema


def _schema(draw: Random, depth: int) -> dict[str, Any]:
    flat: list[Callable[[Random], dict[str, Any]]] = [_text, _integer, _number, _choice, _fixed]
    deep: list[Callable[[Random, int], dict[str, Any]]] = [_object, _object, _array, _either]
    if depth > 0 and draw.random() < 0.7:
        return draw.choice(deep)(draw, depth - 1)
    return draw.choice(flat)(draw)


def _object(draw: Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_WORDS, draw.randint(1, 4))
    return {"type": "object", "properties": {name: _schema(draw, depth) for name in names},
            "required": [name for name in names if draw.random() < 0.7], "additionalProperties": False}  # fmt: skip


def _array(draw: Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    return {"type": "array", "items": _schema(draw, depth), "minItems": least, "maxItems": least + draw.randint(0, 2)}


def _either(draw: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(draw, depth) for _ in range(draw.randint(2, 3))]}


def _text(draw: Random) -> dict[str, Any]:
    least = draw.randint(0, 3)
    return draw.choice([
        {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 5)},
        {"type": "string", "pattern": draw.choice(["^[a-z]{2,4}$", "^[A-Z][0-9]{3}$", "^(yes|no)!?$", "^a+b?$"])},
        {"type": "string", "format": draw.choice(["date", "time", "date-time"])},
    ])  # fmt: skip


def _integer(draw: Random) -> dict[str, Any]:
    least = draw.randint(-200, 200)
    return {
        "type": "integer",
        draw.choice(["minimum", "exclusiveMinimum"]): least,
        "maximum": least + draw.randint(2, 999),
    }


def _number(draw: Random) -> dict[str, Any]:
    return draw.choice([
        {"type": "number", "minimum": 0, "maximum": draw.randint(1, 50)},
        {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500},
    ])  # fmt: skip


def _choice(draw: Random) -> dict[str, Any]:
    return {"enum": draw.sample(["red", "green", "", "a b", 1, 2.5, True, None, "ü"], draw.randint(1, 4))}


def _fixed(draw: Random) -> dict[str, Any]:
    return draw.choice([{"type": "boolean"}, {"type": "null"}, {"const": {"a": [1, "x"]}}, {"type": ["integer", "null"],
                        "minimum": 0, "maximum": 9}])  # fmt: skip


def play(seed: int, strategy: str, cache: str) -> Counter[str]:
    """One call: how its texts ended. Raises `AssertionError` for a complete text that does not follow the schema."""
    schema = random_schema(seed)
    options = dict(STRATEGIES[strategy])
    if strategy == "assisted":
        options["assistant_model"] = model(layers=1)
    out = generator().generate(
        "import os\n", json_schema=schema, cache=cache, cache_config=CACHES[cache] or None, seed=seed,
        max_new_tokens=NEW, **options,
    )  # fmt: skip
    assert out.text is not None
    assert out.parsed is not None
    for text, parsed, reason in zip(out.text, out.parsed, out.finish_reasons, strict=True):
        assert reason in ("eos", "length", None), reason
        where = f"schema {seed}, {strategy}, {cache}: {text!r} ({reason}) for {json.dumps(schema)}"
        if reason == "eos":
            assert json.loads(text) == parsed, where
            assert Draft202012Validator(schema).is_valid(parsed), where
        else:
            assert parsed is None, where
    return Counter(map(str, out.finish_reasons))
