"""Greedy decoding next to transformers' `generate`, and llama.cpp where it is installed: same model, prompt and length.

    python benchmarks/decode.py --out decode-cpu.json
    python benchmarks/decode.py --dtype bfloat16 --prompts 64,1000 --out decode-bfloat16-cpu.json
    python benchmarks/plot.py decode-cpu.json

Prints the floor first: the bytes of weights and cache that a step has to read, over the bandwidth measured here. Then
per case the median and spread of several runs, for a step and for the first token, where a step's time goes, in float32
the overhead of the loop, and one JSON line. Weights of 8 and 4 bits are compared with llama.cpp's Q8_0 and Q4_0; their
texts differ from that of the full weights, and texts in 16 bits may part at near ties.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from unittest.mock import patch

import torch
import transformers
import typer
from common import SHAPES, full_bytes_per_token, llama, report, spread, timed
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import caches
import engine
from engine.measuring.decoding import bandwidth

NEW = 64
FILE_TYPES = {"float32": "float32", "bfloat16": "BF16", "float16": "F16"}  # of llama.cpp, by the model's data type
IN_FEW_BITS = {"Q8_0": "int8", "Q4_0": "int4"}
REAL = "smollm2"
_console = Console()


def prompt_of(tokens: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))


class FirstToken(StoppingCriteria):
    """Notes when a call has its first token; ends nothing."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        self.note()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def note(self) -> None:
        if self.at is None:
            self.at = time.perf_counter()


Work: TypeAlias = Callable[[int, FirstToken], list[int]]
"""(number of new tokens, what notes the first) -> the tokens"""


def engines_for(model: Any, ids: torch.Tensor, compiled: bool, peers: dict[str, Any]) -> dict[str, Work]:
    """peers: llama.cpp by its types of weights."""

    def theirs(new: int, first: FirstToken, **options: Any) -> list[int]:
        criteria = StoppingCriteriaList([first])
        out = model.generate(ids, max_new_tokens=new, do_sample=False, stopping_criteria=criteria, **options)
        return out[0, ids.shape[1] :].tolist()

    def ours(**config: Any) -> Work:
        own = copy.deepcopy(model) if "weights" in config else model  # whose layers are replaced
        generator = engine.Generator(own, config=engine.EngineConfig(**config))
        generator.warmup(ids)
        return lambda new, first: generator.generate(ids, max_new_tokens=new, stopping_criteria=[first]).tokens[0]

    found: dict[str, Work] = {
        "transformers dynamic": theirs,
        "transformers static": partial(theirs, cache_implementation="static", disable_compile=True),
        "dynamic, torch's linears": ours(linears="default"),
        "dynamic": ours(),
        "static": ours(cache="static"),
    }
    fastest = {"cache": "static", "compile": "auto" if compiled else "off"}
    if compiled:
        found |= {"dynamic, compiled": ours(compile="auto"), "static, compiled": ours(**fastest)}
    in_full = peers.keys() - IN_FEW_BITS
    if ids.shape[1] <= 64:  # long prompts would measure the same weights once more
        if model.dtype is torch.float32:
            found |= {f"{weights} weights": ours(weights=weights, **fastest) for weights in IN_FEW_BITS.values()}
        in_full = peers.keys()
    if ids.shape[1] <= 1000:
        found |= {f"llama.cpp, {name}": partial(peer.generate, ids) for name, peer in peers.items() if name in in_full}
    return found


def ms_of(engines: dict[str, Work], runs: int) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Per engine the time of one decode step after the first token, and that until the first token, after a warm-up.
    The engines take turns."""
    steps, firsts = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for work in engines.values():
        work(2, FirstToken())
    for _ in range(runs):
        for name, work in engines.items():
            first, begun = FirstToken(), time.perf_counter()
            work(NEW, first)
            assert first.at is not None
            steps[name].append(1000 * (time.perf_counter() - first.at) / (NEW - 1))
            firsts[name].append(1000 * (first.at - begun))
    return {name: spread(taken) for name, taken in steps.items()}, {
        name: spread(taken) for name, taken in firsts.items()
    }


def where_time_goes(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """ms per decode step in the parts of the default engine. Taking the time costs a few microseconds per part."""
    taken: dict[str, float] = defaultdict(float)

    def measured(name: str, work: Callable) -> Callable:
        @wraps(work)  # the engine reads the signature of the model's forward
        def run(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return work(*arguments, **options)
            finally:
                taken[name] += time.perf_counter() - begun

        return run

    generator = engine.Generator(model)
    generator.generate(ids, max_new_tokens=2)
    attention = measured("attention", ALL_ATTENTION_FUNCTIONS["sdpa"])
    forward, begun, since = measured("model", model.forward), dict[nn.Module, float](), 0.0

    @wraps(forward)
    def after_prompt(*arguments: Any, **options: Any) -> Any:
        nonlocal since
        outputs = forward(*arguments, **options)
        if options["input_ids"].shape[1] > 1:
            taken.clear()
            since = time.perf_counter()
        return outputs

    def enter(module: nn.Module, _: Any) -> None:
        begun[module] = time.perf_counter()

    def leave(module: nn.Module, *_: Any) -> None:
        taken["linear layers"] += time.perf_counter() - begun[module]

    hooks = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    with (
        patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": attention}),
        patch.object(caches.Cache, "update", measured("cache", caches.Cache.update)),
        patch.object(model, "forward", after_prompt),
    ):
        generator.generate(ids, max_new_tokens=NEW)
        whole = time.perf_counter() - since
    for hook in hooks:
        hook.remove()
    parts = {name: 1000 * seconds / (NEW - 1) for name, seconds in taken.items()}
    inside = parts.pop("model")
    outside = 1000 * whole / (NEW - 1) - inside
    return parts | {"rest of the model": inside - sum(parts.values()), "outside the model": outside}


def overhead_ms(runs: int, new: int = 200) -> dict[str, dict[str, float]]:
    """Everything outside `model(...)`, per token, on a model of 4 layers, 256 wide."""
    shape = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
    model = llama(vocab_size=1000, num_key_value_heads=2, max_position_embeddings=4096, **shape)
    ids = torch.randint(3, 1000, (1, 64), generator=torch.Generator().manual_seed(0))
    inside, forward = 0.0, model.forward

    @wraps(forward)
    def measured(*arguments: Any, **options: Any) -> Any:
        nonlocal inside
        begun = time.perf_counter()
        outputs = forward(*arguments, **options)
        inside += time.perf_counter() - begun
        return outputs

    generator = engine.Generator(model)
    works = {
        "transformers dynamic": lambda: model.generate(ids, max_new_tokens=new, do_sample=False),
        "dynamic": lambda: generator.generate(ids, max_new_tokens=new),
        "static": lambda: generator.generate(ids, cache="static", max_new_tokens=new),
    }
    samples: dict[str, list[float]] = defaultdict(list)
    with patch.object(model, "forward", measured):
        for run in range(runs + 1):
            for name, work in works.items():
                inside = 0.0
                outside = timed(work) - inside
                if run > 0:
                    samples[name].append(1000 * outside / new)
    return {name: spread(taken) for name, taken in samples.items()}


def measure(
    model: Any, prompt_tokens: int, speed: float, peers: dict[str, Any], runs: int, compiled: bool
) -> dict[str, Any]:
    ids = prompt_of(prompt_tokens, model.config.vocab_size)
    is_tied = model.config.tie_word_embeddings  # then a step reads all embeddings, as its last matrix
    weights = sum(p.nbytes for name, p in model.named_parameters() if is_tied or "embed_tokens" not in name)
    cache_bytes = full_bytes_per_token(model.config, model.dtype.itemsize) * (prompt_tokens + NEW // 2)
    floor_ms = 1000 * (weights + cache_bytes) / speed
    _console.print(
        f"\nprompt {prompt_tokens}, {NEW} new: a step reads {weights / 1e6:.0f} MB of weights and "
        f"{cache_bytes / 1e6:.0f} MB of cache; at {speed / 1e9:.1f} GB/s that is {floor_ms:.1f} ms"
    )
    engines = engines_for(model, ids, compiled, peers)
    expected = engines["transformers dynamic"](NEW, FirstToken())
    lossless = {name: work for name, work in engines.items() if not name.endswith(("weights", *IN_FEW_BITS))}
    same_text = {name: work(NEW, FirstToken()) == expected for name, work in lossless.items()}
    steps, firsts = ms_of(engines, runs)
    table = Table("engine", "ms per token", "least", "most", "x transformers dynamic", "of the floor", "same text",
                  "first token, ms")  # fmt: skip
    base = steps["transformers dynamic"]["median"]
    for name, taken in steps.items():
        ratio, share = base / taken["median"], floor_ms / taken["median"]
        table.add_row(name, *(f"{value:.1f}" for value in taken.values()), f"{ratio:.2f}", f"{share:.0%}",
                      str(same_text.get(name, "")), f"{firsts[name]['median']:.0f}")  # fmt: skip
    _console.print(table)
    profile = where_time_goes(model, ids)
    _console.print("a step of dynamic: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in profile.items()))
    return {"prompt_tokens": prompt_tokens, "new_tokens": NEW, "floor_ms": floor_ms, "engines_ms": steps,
            "first_token_ms": firsts, "same_text": same_text, "step_ms": profile}  # fmt: skip


def loaded(name: str, dtype: str) -> Any:
    if name != REAL:
        return llama(dtype=getattr(torch, dtype), **SHAPES[name])
    model = engine.Generator(REAL, config=engine.EngineConfig(weights="full", dtype=dtype)).model
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def main(
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    runs: Annotated[int, typer.Option(help="runs per engine")] = 5,
    threads: Annotated[int, typer.Option(help="threads of torch and llama.cpp")] = 2,
    compiled: Annotated[bool, typer.Option(help="also the compiled decode step")] = True,
    model: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}, or {REAL}, which is real")] = "small",
    dtype: Annotated[str, typer.Option(help=f"one of {', '.join(FILE_TYPES)}")] = "float32",
    prompts: Annotated[str, typer.Option(help="their lengths")] = "64,4096",
) -> None:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    llm, speed, peers = loaded(model, dtype), bandwidth(seconds=3), {}
    found: dict[str, Any] = {"model": SHAPES.get(model, model), "dtype": dtype, "bandwidth_gb_per_s": speed / 1e9}
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("llama_cpp") and importlib.util.find_spec("gguf"):
            from llama_cpp_peer import LlamaCpp, quantize, write_gguf

            full = Path(folder) / "full.gguf"
            write_gguf(llm, full)
            kinds = ["float32", *IN_FEW_BITS] if dtype == "float32" else [FILE_TYPES[dtype]]
            files = {kind: full if kind == "float32" else quantize(full, kind) for kind in kinds}
            cache_type = "F32" if dtype == "float32" else "F16"
            peers = {kind: LlamaCpp(file, threads, cache_type) for kind, file in files.items()}
        found["cases"] = [measure(llm, int(tokens), speed, peers, runs, compiled) for tokens in prompts.split(",")]
    if dtype == "float32":
        overhead = found["loop_overhead_ms"] = overhead_ms(runs)
        _console.print("outside model(...), 4 layers, 256 wide: " + ", ".join(
            f"{name} {taken['median']:.3f} ms per token" for name, taken in overhead.items()))  # fmt: skip
    report("decode", out, **found)


if __name__ == "__main__":
    typer.run(main)
