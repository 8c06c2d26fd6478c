"""The README's table of caches: every cell is found out by doing the thing. `UPDATE_README=1` writes it anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from architectures import prompt, tiny_model

import caches
import engine

README = Path(__file__).parent.parent / "README.md"
MARKS = re.compile(r"(?<=<!-- caches -->\n).*?(?=<!-- /caches -->)", flags=re.S)
NEW = 30


def same_text(name: str, cache: str, config: engine.EngineConfig | None = None, **inputs_of) -> bool:
    model, inputs = tiny_model(name), prompt(**inputs_of)
    out = engine.Generator(model, config=config).generate(inputs, cache=cache, max_new_tokens=NEW)
    return torch.equal(out.sequences, model.generate(**inputs, max_new_tokens=NEW, do_sample=False))


def new_cache(cache: str, name: str = "llama") -> caches.Driven:
    options = {"max_cache_len": 64} if caches.recipe(cache).has_a_size else {}
    return caches.build(cache, tiny_model(name).config, **options)


def next_turn(cache: str) -> bool:
    model, inputs = tiny_model("llama"), prompt(pads=0)
    live = new_cache(cache)
    first = engine.generate(model, inputs, cache=live, max_new_tokens=5)
    inputs = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    second = engine.generate(model, inputs, cache=live, max_new_tokens=5)
    expected = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    return torch.equal(second.sequences, expected) and second.stats.prompt_tokens == 2


def rolls_back_in_a_window(cache: str) -> bool:
    model, ids = tiny_model("mistral"), prompt(pads=0)["input_ids"]
    live = new_cache(cache, "mistral")
    with torch.no_grad():
        live.begin(13)
        model(ids, past_key_values=live.handle)
        live.settle()
        live.begin(4)
        model(ids[:, :4], past_key_values=live.handle)
        live.settle(drop=4)
        live.begin(1)
        logits = model(ids[:, :1], past_key_values=live.handle).logits[:, -1]
        expected = model(torch.cat([ids, ids[:, :1]], dim=1)).logits[:, -1]
    return torch.allclose(logits, expected, atol=1e-3)


def in_transformers_beam_search(cache: str) -> bool:
    model, inputs, handle = tiny_model("gemma2"), prompt(), new_cache(cache, "gemma2").handle
    if handle is None:
        return False
    options = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 3}
    out = model.generate(**inputs, **options, past_key_values=handle)
    return torch.equal(out, model.generate(**inputs, **options))


def compiled(cache: str) -> bool:
    return same_text("llama", cache, engine.EngineConfig(compile="aot_eager"))


def bytes_after(cache: str, columns: int) -> int:
    model = tiny_model("llama")
    out = engine.generate(model, prompt(rows=1, pads=0, tokens=columns)["input_ids"], cache=cache, max_new_tokens=1)
    return out.stats.cache_bytes


def growth(cache: str) -> str:
    per_token = round((bytes_after(cache, 192) - bytes_after(cache, 64)) / 128)
    ideal = 4 * 2 * 2 * 8 * 4  # layers x (keys, values) x kv heads x head_dim x float32
    return f"{per_token / ideal:.0%} of keys and values"


FEATURES = {
    "full attention": lambda cache: same_text("llama", cache),
    "sliding, chunked": lambda cache: same_text("mistral", cache) and same_text("llama4_text", cache),
    "prompt in pieces": lambda cache: same_text("gemma2", cache, engine.EngineConfig(prefill_chunk_tokens=4)),
    "next turn": next_turn,
    "roll back in a window": rolls_back_in_a_window,
    "in transformers' beam search": in_transformers_beam_search,
    "compiled step": compiled,
}
REFUSALS = (engine.OptionError, caches.CacheError)


def cell(feature, cache: str) -> str:
    """yes, - when it is refused or there is nothing to keep; anything else is a failure."""
    try:
        worked = feature(cache)
    except REFUSALS:
        return "-"
    assert worked or new_cache(cache).handle is None
    return "yes" if worked else "-"


def table() -> str:
    lines = [
        "| cache | what it is | " + " | ".join(FEATURES) + " | bytes per token |",
        "|---|---|" + ":-:|" * len(FEATURES) + "---|",
    ]
    for name in caches.names():
        cells = [cell(feature, name) for feature in FEATURES.values()]
        lines.append(f"| `{name}` | {caches.recipe(name).summary} | " + " | ".join(cells) + f" | {growth(name)} |")
    return "\n".join(lines) + "\n"


def test_the_readme_states_what_the_caches_do():
    torch._dynamo.reset()
    found = table()
    if os.environ.get("UPDATE_README"):
        README.write_text(MARKS.sub(lambda _: found, README.read_text()))
    assert MARKS.search(README.read_text()).group() == found
