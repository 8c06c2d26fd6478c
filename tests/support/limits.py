"""Runs under real limits of memory: each ends in time, with the text of the run without a limit or with an error of
ours.

    python tests/support/limits.py 300                       seeds 0 to 299, on the packaged model
    python tests/support/limits.py 300 --model FOLDER        on another one, whose text the limits must not change
    python tests/support/limits.py --seed 17                 that one, and what it does

Each seed draws a call (a backend and where it keeps its tensors, a budget, fallbacks, a long prompt) and a limit: 4 to
300 MB more than the process has once the model is loaded, of all addresses or of what it has for itself. It runs in a
process of its own, which is ended when it takes too long. Linux only.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch
from places import README
from transformers import AutoModelForCausalLM, AutoTokenizer

import engine
from caches.attention import fused, kernels
from caches.platform.host_allocator import give_back_freed_memory
from engine.memory.plan import cache_bytes

PER_CALL = 6  # limits for the same call, which is run once without any
LIMITS = {"VmSize": resource.RLIMIT_AS, "VmData": resource.RLIMIT_DATA}  # by what counts against them
LEAST_BYTES, MOST_BYTES = 4_000_000, 300_000_000
LEAST_TOKENS, MOST_TOKENS = 1500, 4000  # of a prompt
TIMES, START_S = 3, 6  # that a run may take as long as without a limit, and what it needs to start
TIMEOUT_S = 300
CHANGING = ("quantize", "slide")  # the fallbacks that change the text

WINDOW = {"window_length": 256}
PLACES: list[tuple[str, dict[str, Any]]] = [
    ("auto", {}),
    ("auto", {}),
    ("dynamic", {}),
    ("static", {}),
    ("sliding_window", WINDOW),
    ("sink", WINDOW),
    ("quantized_sink", WINDOW),
    ("quantized", {"nbits": 4}),
    ("quantized", {"nbits": 2}),
    ("none", {}),
    *[
        (name, {"residency": place} | more)
        for name, more in (("offloaded", {}), ("offloaded_static", {}), ("offloaded_quantized", {"nbits": 4}))
        for place in ("host", "disk")
    ],
]
WITH_BUDGET = ("auto", "dynamic", "static", "quantized")
STRATEGIES: list[dict[str, Any]] = [{}, {}, {}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"do_sample": True}]


@dataclass(frozen=True, eq=False)
class Call:
    """budget: `max_cache_bytes`, as a share of what a dynamic cache takes. share: of the longest prompt."""

    cache: str
    cache_config: dict[str, Any]
    budget: float | None
    over_budget: str
    chunk_tokens: int | None
    on_oom: tuple[str, ...]
    strategy: dict[str, Any]
    rows: int
    share: float
    new: int

    @staticmethod
    @cache
    def drawn(number: int) -> Call:
        draw = Random(f"call {number}")
        name, cache_config = PLACES[number % len(PLACES)]
        every = ("release", "chunk", "offload", "split")
        return Call(
            cache=name,
            cache_config=cache_config,
            budget=draw.uniform(0.5, 1.5) if draw.random() < 0.4 and name in WITH_BUDGET else None,
            over_budget=draw.choice(["offload", "offload", "slide", "error"]),
            chunk_tokens=draw.choice([None, None, 256]) if name != "none" else None,
            on_oom=draw.choice([every, every, every, ("offload", "chunk"), (*every, "quantize"), ("release",)]),
            strategy=draw.choice(STRATEGIES) if name != "none" else {},
            rows=draw.choice([1, 1, 2]),
            share=draw.random(),
            new=8 if name == "none" else draw.choice([16, 40]),
        )


@dataclass(frozen=True)
class Limit:
    counted: str  # a key of LIMITS
    more_bytes: int

    @staticmethod
    def drawn(seed: int) -> Limit:
        draw = Random(f"limit {seed}")
        share = draw.random()  # as many small ones as large ones
        return Limit(draw.choice(list(LIMITS)), int(LEAST_BYTES * (MOST_BYTES / LEAST_BYTES) ** share))


@dataclass
class Result:
    """Of a run. error: of which kind and which words; None where it came to its end. ours: whether the error is."""

    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0  # of the processor
    fallbacks: list[str] = field(default_factory=list)
    error: str | None = None
    ours: bool = True


class Bench:
    """A model and the text of its prompts. warm: whether there was a call before the limits."""

    def __init__(self, folder: str | Path, warm: bool):
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.model.generation_config.eos_token_id, self.model.generation_config.pad_token_id = None, 0
        text = README.read_text() + Path(engine.__file__).read_text()
        self._ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text * 4).input_ids)
        self._last: Call | None = None
        self._whole = Result()  # of the last call, without a limit
        for operators in (kernels.KERNELS, fused.KERNELS):
            operators.or_none()  # loaded once per process
        if warm:
            for name in ("dynamic", "offloaded", "quantized"):
                engine.Generator(self.model).generate(self._ids[None, :40], cache=name, max_new_tokens=2)

    @cached_property
    def most_tokens(self) -> int:
        return min(MOST_TOKENS, self.model.config.max_position_embeddings - 48)

    def prompt(self, call: Call) -> torch.Tensor:
        tokens = LEAST_TOKENS + int(call.share * (self.most_tokens - LEAST_TOKENS))
        return torch.stack([self._ids[row * tokens : (row + 1) * tokens] for row in range(call.rows)])

    def generated(self, call: Call) -> Result:
        """In this process. An error is part of the result."""
        prompt, begun = self.prompt(call), time.process_time()
        config = engine.EngineConfig(prefill_chunk_tokens=call.chunk_tokens)
        if call.budget is not None:
            rows = call.rows * call.strategy.get("num_beams", 1)
            whole = sum(cache_bytes(self.model.config, "dynamic", rows=rows, tokens=prompt.shape[1]).values())
            config = replace(config, max_cache_bytes=int(call.budget * whole), over_budget=call.over_budget)
        options = {} if call.cache == "auto" or not call.cache_config else {"cache_config": call.cache_config}
        result = Result()
        try:
            out = engine.Generator(self.model, config=config).generate(
                prompt, cache=call.cache, on_oom=list(call.on_oom), max_new_tokens=call.new, seed=5, **call.strategy,
                **options,
            )  # fmt: skip
        except BaseException as error:
            out = getattr(error, "partial", None)
            result.error = f"{type(error).__name__}: {error}"
            result.ours = isinstance(error, engine.EngineError) or (isinstance(error, MemoryError) and bool(str(error)))
        result.seconds = time.process_time() - begun
        if out is not None:
            result.tokens, result.fallbacks = out.tokens, [str(one) for one in out.stats.fallbacks]
        return result

    def generated_in_a_fork(self, call: Call, limit: Limit | None = None) -> Result:
        found = in_a_fork(lambda: vars(self.generated(call)), limit)
        return Result(error=found["died"], seconds=TIMEOUT_S, ours=False) if "died" in found else Result(**found)

    def free(self, call: Call) -> Result:
        """Without a limit."""
        if self._last is not call:
            self._last, self._whole = call, self.generated_in_a_fork(call)
        return self._whole


def in_a_fork(work: Callable[[], dict[str, Any]], limit: Limit | None = None) -> dict[str, Any]:
    """What the work gives in a copy of this process with a limit; or how that ended, as "died"."""
    give_back_freed_memory()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        _work_in_child(work, limit, writes)
    os.close(writes)
    told, ends = b"", time.monotonic() + TIMEOUT_S
    with os.fdopen(reads, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, ends - time.monotonic()))[0]:
            part = pipe.read(2**16)
            if not part:
                break
            told += part
        else:
            os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0 and told:
        return json.loads(told)
    return {"died": f"no end after {TIMEOUT_S} s" if status == -signal.SIGKILL else f"the process ended with {status}"}


def _work_in_child(work: Callable[[], dict[str, Any]], limit: Limit | None, writes: int) -> None:
    code = 1
    try:
        kind = None if limit is None else LIMITS[limit.counted]
        if limit is not None and kind is not None:
            before = resource.getrlimit(kind)
            resource.setrlimit(kind, (counted_bytes(limit.counted) + limit.more_bytes, before[1]))
        try:
            result = work()
        except BaseException as error:
            result = {"died": f"{type(error).__name__}: {error}"}
        if kind is not None:
            resource.setrlimit(kind, before)
        with os.fdopen(writes, "w") as out:
            json.dump(result, out)
        code = 0
    finally:
        os._exit(code)


def counted_bytes(name: str) -> int:
    """What this process has of it, as /proc/self/status names it."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return 1024 * int(line.split()[1])


def verdict(found: Result, whole: Result, is_search: bool, start_s: float) -> tuple[str, bool]:
    """What came of it, and whether that is allowed. is_search: whether the best text so far may begin otherwise."""
    if found.seconds > TIMES * whole.seconds + start_s:
        return "too slow" if found.error is None else f"too slow: {found.error}", False
    changes = [one for one in found.fallbacks if one.startswith(CHANGING)]
    if found.error is None:
        if changes:
            return "another text, as its fallback says", True
        return ("the text", True) if found.tokens == whole.tokens else ("ANOTHER TEXT", False)
    if not found.ours:
        return found.error, False
    if whole.error is not None and found.error.split(":")[0] == whole.error.split(":")[0]:
        return f"{found.error.split(':')[0]}, as without a limit", True
    begins = [ids == all_ids[: len(ids)] for ids, all_ids in zip(found.tokens, whole.tokens, strict=False)]
    return found.error.split(":")[0], is_search or bool(changes) or all(begins)


def judged(bench: Bench, seeds: Iterable[int], start_s: float) -> Iterator[tuple[int, str, bool, str]]:
    """Of each seed what came of it, whether that is allowed, and the particulars."""
    for seed in seeds:
        call, limit = Call.drawn(seed // PER_CALL), Limit.drawn(seed)
        whole = bench.free(call)
        assert whole.ours, f"without a limit, seed {seed}: {call}: {whole.error}"
        found = bench.generated_in_a_fork(call, limit)
        told, is_allowed = verdict(found, whole, "num_beams" in call.strategy, start_s)
        particulars = f"{call}, {limit}: {found.seconds:.1f} s, without a limit {whole.seconds:.1f} s; "
        yield seed, told, is_allowed, particulars + "; ".join([*found.fallbacks, found.error or ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="?", type=int, default=300)
    parser.add_argument("--seed", type=int, nargs="+")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--model", default=engine.SHIPPED_MODEL)
    parser.add_argument("--start-s", type=float, default=START_S, help="seconds that a run may need to start")
    parser.add_argument("--cold", action="store_true", help="no call before the limit")
    parser.add_argument("--all", action="store_true", help="print the particulars of all runs")
    given = parser.parse_args()
    logging.getLogger("engine").setLevel(logging.ERROR)  # every fallback that is taken is a warning
    seeds = range(given.first, given.seeds) if given.seed is None else given.seed
    counts: Counter[str] = Counter()
    failed = 0
    bench = Bench(given.model, not given.cold)
    for seed, told, is_allowed, particulars in judged(bench, seeds, given.start_s):
        counts[told] += 1
        failed += not is_allowed
        if given.all or given.seed is not None or not is_allowed:
            print(f"{'' if is_allowed else 'NOT ALLOWED: '}seed {seed}: {told}: {particulars}", flush=True)
    print(*(f"{count:5} {told}" for told, count in counts.most_common()), sep="\n")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
