"""The documentation's tables of caches: every cell is found out by doing the thing.

`UPDATE_DOCS=1 pytest -m slow` writes them anew.
"""

from __future__ import annotations

import functools
from functools import partial

import pytest
import torch
from architectures import prompt, tiny_model
from contract import CELLS, KINDS, options_of
from helpers import cache_argument, needed
from pages import check_generated
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from trial import Trial

import caches
import configs
import engine

NEW = 16
SAMPLES = ["llama", "gemma2", "mistral", "mamba2"]


def sample(cache: str, samples: list[str] = SAMPLES) -> str:
    """The first model that the backend takes."""
    return next((name for name in samples if is_for(cache, name)), samples[-1])


def same_text(name: str, cache: str, config: engine.EngineConfig | None = None, **inputs_of) -> bool:
    model, inputs = tiny_model(name), prompt(**inputs_of)
    generator = engine.Generator(model, config=config)
    out = generator.generate(inputs, cache=cache, cache_config=needed(cache), max_new_tokens=NEW)
    return torch.equal(out.sequences, model.generate(**inputs, max_new_tokens=NEW, do_sample=False))


def same_texts(names: list[str], cache: str) -> bool:
    """The text of all these models that the backend takes, and it takes one."""
    return all(same_text(name, cache) for name in {sample(cache, names), *filter(partial(is_for, cache), names)})


def is_for(cache: str, name: str) -> bool:
    try:
        new_cache(cache, name)
    except caches.UnsupportedLayerError:
        return False
    return True


def new_cache(cache: str, name: str) -> caches.EngineCache:
    return caches.build(cache, tiny_model(name).config, **needed(cache))


def next_turn(cache: str) -> bool:
    name = sample(cache)
    model, inputs, live = tiny_model(name), prompt(pads=0), new_cache(cache, name)
    first = engine.generate(model, inputs, cache=live, max_new_tokens=5)
    inputs = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    second = engine.generate(model, inputs, cache=live, max_new_tokens=5)
    expected = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    return torch.equal(second.sequences, expected) and second.stats.prompt_tokens == 2


def in_transformers_beam_search(cache: str) -> bool:
    name = sample(cache)
    model, inputs, handle = tiny_model(name), prompt(), new_cache(cache, name).handle
    if handle is None:
        return False
    options = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 3}
    out = model.generate(**inputs, **options, **{cache_argument(model): handle})
    return torch.equal(out, model.generate(**inputs, **options))


def compiled(cache: str) -> bool:
    samples = ["gemma2", "mistral", "llama", "mamba"]
    return same_text(sample(cache, samples), cache, engine.EngineConfig(compile="aot_eager"))


@functools.cache
def wide_llama(dtype: torch.dtype) -> LlamaForCausalLM:
    """With heads as wide as those of real models: a codec's scales are for groups of channels."""
    sizes = dict(hidden_size=128, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=101, **sizes)).eval().to(dtype)


def bytes_after(model: PreTrainedModel, cache: str, columns: int) -> int:
    ids = prompt(rows=1, pads=0, tokens=columns)["input_ids"]
    options = {name: value for name, value in needed(cache).items() if name == "window_length"}
    return engine.generate(model, ids, cache=cache, cache_config=options, max_new_tokens=1).stats.cache_bytes


def growth(cache: str) -> str:
    """Bytes of another token behind hundreds of others, the scratch of a step left out."""
    if cache == "none":
        return "nothing is kept"
    try:
        if is_for(cache, "llama"):
            shares = [share(cache, wide_llama(dtype), 992, 1248) for dtype in (torch.float32, torch.bfloat16)]
        else:
            shares = [share(cache, tiny_model(sample(cache)), 96, 224)]
    except caches.UnsupportedLayerError:
        return "those of its parts"
    if set(shares) == {"0%"}:
        return "constant size"
    if len(set(shares)) == 1:
        return f"{shares[0]} of keys and values"
    return "{} of float32, {} of bfloat16".format(*shares)


def share(cache: str, model: PreTrainedModel, few: int, many: int) -> str:
    """Bytes of a token, of those of its keys and values in the model's data type."""
    per_token = (bytes_after(model, cache, many) - bytes_after(model, cache, few)) / (many - few)
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // max(1, getattr(config, "num_attention_heads", 1))
    heads = getattr(config, "num_key_value_heads", 2)
    return f"{per_token / (config.num_hidden_layers * 2 * heads * width * model.dtype.itemsize):.0%}"


def trial_of(cache: str, kinds: list[str]) -> Trial | None:
    """Some steps of the first of these kinds of layers that the backend takes."""
    taken = [kind for kind in kinds if (cache, kind) in CELLS]
    if not taken:
        return None
    trial = Trial(cache, taken[0], 3)
    for count in (9, 3):
        trial.step(count)
    trial.check()
    return trial


def follows_rows(cache: str) -> bool:
    return bool(trial := trial_of(cache, list(KINDS))) and shows(trial, trial.select_rows, [2, 0])


def takes_more_rows(cache: str) -> bool:
    return bool(trial := trial_of(cache, list(KINDS))) and shows(trial, trial.select_rows, [2, 0, 1, 1])


def drops_across_an_edge(cache: str) -> bool:
    return bool(trial := trial_of(cache, WINDOWS)) and shows(trial, trial.step, 30, 12)


def crops_across_an_edge(cache: str) -> bool:
    return bool(trial := trial_of(cache, WINDOWS)) and shows(trial, trial.crop, -3)


def crops_further(cache: str) -> bool:
    trial = trial_of(cache, list(KINDS))
    if trial is None:
        return False
    trial.step(30)
    return shows(trial, trial.crop, 2)


def takes_back_a_step_of_states(cache: str) -> bool:
    return bool(trial := trial_of(cache, STATES)) and shows(trial, trial.crop, -3)


def splits_and_joins(cache: str) -> bool:
    if (trial := trial_of(cache, list(KINDS))) is None:
        return False
    parts = [caches.select_rows(trial.cache, torch.tensor(part)) for part in ([2, 0], [1])]
    trial.holding(caches.join_rows(parts), [2, 0, 1]).check()
    return True


def converts_and_back(cache: str) -> bool:
    kinds = [kind for kind in KINDS if ("dynamic", kind) in CELLS]
    if (trial := trial_of(cache, kinds)) is None:
        return False
    there = caches.convert(trial.cache, "dynamic")
    trial.holding(caches.convert(there, cache, **options_of(cache, trial.kind))).check()
    return True


def shows(trial: Trial, operation, *arguments) -> bool:
    """The operation does what it should: everything held is as it must be, and the next step too."""
    operation(*arguments)
    trial.check()
    trial.step(2)
    trial.check()
    return True


def takes(kind: str):
    return lambda cache: trial_of(cache, [kind]) is not None


WINDOWS = [kind for kind, layers in KINDS.items() if not layers.has_states and layers.bounds[0] is not None]
STATES = [kind for kind, layers in KINDS.items() if layers.has_states]
FEATURES = {
    "full attention": lambda cache: same_texts(["llama"], cache),
    "sliding, chunked": lambda cache: same_texts(["mistral", "gemma2", "llama4_text"], cache),
    "states": lambda cache: same_texts(["mamba"], cache),
    "attention and states": lambda cache: same_texts(["bamba", "falcon_h1"], cache),
    "prompt in pieces": lambda cache: same_text(sample(cache), cache, engine.EngineConfig(prefill_chunk_tokens=4)),
    "next turn": next_turn,
    "in transformers' beam search": in_transformers_beam_search,
    "compiled step": compiled,
}
LAYERS = {
    "full": "full",
    "sliding": "sliding",
    "chunked": "chunked",
    "full and windows": "full + sliding",
    "indexed": "indexed",
    "states": "states",
    "attention beside states": "attention, states",
    "both in one layer": "attention with states",
    "encoder-decoder": "encoder, full",
    "imposed window": "imposed window",
    "first tokens and a window": "sinks",
}
OPERATIONS = {
    "rows": follows_rows,
    "more rows": takes_more_rows,
    "roll back in a step, across a window's edge": drops_across_an_edge,
    "steps back, across a window's edge": crops_across_an_edge,
    "back to any token": crops_further,
    "a step of states back": takes_back_a_step_of_states,
    "split and join": splits_and_joins,
    "to dynamic and back": converts_and_back,
}
REFUSALS = (engine.OptionError, caches.CacheError)


def cell(feature, cache: str) -> str:
    """yes, - when it is refused or there is nothing to keep; anything else is a failure."""
    try:
        worked = feature(cache)
    except REFUSALS:
        return "-"
    assert worked or cache == "none" or trial_of(cache, list(KINDS))
    return "yes" if worked else "-"


def table() -> str:
    """What models can do with it, then the kinds of layers it keeps and what can be done with them."""
    lines = [
        "| cache | what it is | " + " | ".join(FEATURES) + " | bytes per token |",
        "|---|---|" + ":-:|" * len(FEATURES) + "---|",
    ]
    for name in caches.names():
        cells = [cell(feature, name) for feature in FEATURES.values()]
        lines.append(f"| `{name}` | {caches.recipe(name).summary} | " + " | ".join(cells) + f" | {growth(name)} |")
    for title, features in (
        ("layers it keeps", {column: takes(kind) for column, kind in LAYERS.items()}),
        ("operations", OPERATIONS),
    ):
        lines += ["", f"| {title} | " + " | ".join(features) + " |", "|---|" + ":-:|" * len(features)]
        for name in caches.names():
            lines.append(f"| `{name}` | " + " | ".join(cell(feature, name) for feature in features.values()) + " |")
    return "\n".join(lines) + "\n"


def compiling(cache: str, **options):
    def attempt():
        generator = engine.Generator(tiny_model("llama"), config=engine.EngineConfig(compile="aot_eager"))
        generator.generate(prompt(), cache=cache, cache_config=options, max_new_tokens=2)

    return attempt


def building(cache: str, name: str = "llama", **options):
    return lambda: caches.build(cache, tiny_model(name).config, **options)


# What cannot be put together, by what asks for it.
TOGETHER = {
    "`dynamic`, compiled": compiling("dynamic"),
    "`offloaded`, compiled": compiling("offloaded"),
    "`offloaded_static`, compiled": compiling("offloaded_static"),
    "`quantized`, compiled": compiling("quantized"),
    "`quantized_sink`, compiled": compiling("quantized_sink", window_length=200),
    "`quantized` of a fixed size": building("quantized", max_cache_len=64),
    "`sink` elsewhere than on the device": building("sink", window_length=64, residency="host"),
    "`sink` without a window": building("sink"),
    "`sink`, learned positions": building("sink", "gpt2", window_length=8),
    "`sink`, positions as a bias": building("sink", "bloom", window_length=8),
    "`sink`, only windows of the model's own": building("sink", "mistral", window_length=64),
    "`quantized_sink`, a window as long as what stays in full": building("quantized_sink", window_length=100),
    "`quantized`, only states": building("quantized", "mamba"),
    "`quantized`, only windows shorter than what stays in full": building("quantized", "mistral"),
    "`sliding_window` without one": building("sliding_window"),
    "`hybrid` without windows": building("hybrid", max_cache_len=64),
    "`mamba`, attention": building("mamba"),
}


def refusals() -> str:
    lines = ["| together | refused, because |", "|---|---|"]
    for title, attempt in TOGETHER.items():
        with pytest.raises((*REFUSALS, configs.ConfigError)) as refused:
            attempt()
        lines.append(f"| {title} | {str(refused.value).replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def test_the_documentation_states_what_is_refused():
    check_generated("refusals", refusals())


@pytest.mark.slow
def test_the_documentation_states_what_the_caches_do():
    torch._dynamo.reset()
    check_generated("support_matrix", table())
