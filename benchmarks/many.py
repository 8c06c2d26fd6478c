"""Many ragged prompts on model "small": `generate_many`, transformers' padded batch and `generate_batch`, one by one.

Every prompt asks for a number of new tokens of its own and never ends by itself. A padded batch generates as many for
all as the longest text needs; what is counted is what was asked for. Also: how soon a prompt has its first token that
arrives while eight others decode, and how long the others wait for theirs meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import transformers
import typer
from common import SHAPES, llama, picked, report

import engine

Prompt = tuple[torch.Tensor, int]
"""Ids [tokens], and how many new ones are wanted."""


def prompts_of(count: int, vocabulary: int, seed: int = 0) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)

    def between(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    lengths = [(between(8, 512), between(8, 128)) for _ in range(count)]
    # 0 is padding.
    return [(torch.randint(1, vocabulary, (tokens,), generator=generator), new) for tokens, new in lengths]


def ours(gen: engine.Generator, prompts: list[Prompt], slots: int) -> tuple[list[list[int]], dict[str, float]]:
    found: list[list[int]] = [[] for _ in prompts]
    asked = [{"prompt": ids[None], "max_new_tokens": new} for ids, new in prompts]
    with gen.batch(slots=slots, reads_first=True) as batch:
        requests = [batch.submit(one.pop("prompt"), **one) for one in asked]
    for request in requests:
        found[request.index] = request.result().tokens[0]
    least_rows = sum(new - 1 for _, new in prompts)
    least_slots = sum(sum(range(len(ids) + 1, len(ids) + new)) for ids, new in prompts)
    counts = batch.counts
    return found, {
        "row_steps": counts.row_steps / least_rows,
        "slots_read": counts.slots_read / least_slots,
        "rows_per_step": counts.row_steps / counts.steps,
    }


def padded(model: Any, prompts: list[Prompt]) -> list[list[int]]:
    longest = max(len(ids) for ids, _ in prompts)
    ids = torch.stack([torch.nn.functional.pad(one, (longest - len(one), 0)) for one, _ in prompts])
    mask = torch.stack([(torch.arange(longest) >= longest - len(one)).long() for one, _ in prompts])
    most = max(new for _, new in prompts)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False)
    return [row[longest : longest + new].tolist() for row, (_, new) in zip(out, prompts, strict=True)]


def one_by_one(model: Any, prompts: list[Prompt]) -> list[list[int]]:
    return [
        model.generate(ids[None], attention_mask=torch.ones_like(ids[None]), max_new_tokens=new, do_sample=False)[
            0, len(ids) :
        ].tolist()
        for ids, new in prompts
    ]


def continuous(model: Any, prompts: list[Prompt]) -> list[list[int]]:
    """transformers' continuous batching, with a number of new tokens for each prompt."""
    config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=128)
    found: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        for number, (ids, new) in enumerate(prompts):
            manager.add_request(ids.tolist(), request_id=str(number), max_new_tokens=new)
        while len(found) < len(prompts):
            done = manager.get_result(timeout=1)
            if done is not None and done.is_finished():
                found[done.request_id] = list(done.generated_tokens)
    return [found[str(number)] for number in range(len(prompts))]


def _chunks(request: engine.BatchRequest) -> Iterator[Any]:
    with suppress(engine.GenerationCancelled):
        yield from request.stream()


def latency(gen: engine.Generator, decoding: int, prompt: int) -> dict[str, float]:
    """A prompt arrives while `decoding` others decode: seconds to its first token, and between tokens of the others."""
    vocabulary = gen.model.config.vocab_size
    ids = torch.randint(1, vocabulary, (1, 256))
    with gen.batch(slots=decoding + 1) as batch:
        others = [batch.submit(ids, max_new_tokens=2000) for _ in range(decoding)]
        for other in others:
            next(iter(other.stream()))  # now all decode
        times: list[float] = []
        watcher = threading.Thread(target=lambda: times.extend(time.perf_counter() for _ in _chunks(others[-1])))
        watcher.start()
        time.sleep(3)  # while nothing arrives
        begun, pieces = time.perf_counter(), batch.counts.pieces
        new = batch.submit(torch.randint(1, vocabulary, (1, prompt)), max_new_tokens=2)
        next(iter(new.stream()))
        first_s, pieces = time.perf_counter() - begun, batch.counts.pieces - pieces
        for other in others:
            other.cancel()
        watcher.join()
    gaps = [(end, end - start) for start, end in pairwise(times)]
    before = [gap for end, gap in gaps if begun - 2 < end < begun]
    during = [gap for end, gap in gaps if begun < end < begun + first_s + 0.05]
    return {
        "prompt_tokens": prompt, "first_token_s": first_s, "pieces": pieces, "between_tokens_s": median(before),
        "between_tokens_meanwhile_s": median(during), "most_meanwhile_s": max(during),
    }  # fmt: skip


def main(
    model: str = "small",
    count: int = 200,
    slots: str = "4,16,32,64",
    only: Annotated[str, typer.Option(help="names with ; between, or 'all'")] = "all",
    threads: int = 2,
    dtype: str = "float32",
    out: Path | None = None,
) -> None:
    torch.set_num_threads(threads)
    llm, vocabulary = llama(dtype=getattr(torch, dtype), **SHAPES[model]), SHAPES[model]["vocab_size"]
    gen, prompts = engine.Generator(llm), prompts_of(count, vocabulary)
    ours(gen, prompts_of(4, vocabulary, seed=1), 4)  # warm-up
    counted: dict[str, dict[str, float]] = {}
    texts: dict[str, list[list[int]]] = {}

    def of_ours(rows: int) -> Callable[[], list[list[int]]]:
        def work() -> list[list[int]]:
            found, counted[f"{rows} slots"] = ours(gen, prompts, rows)
            return found

        return work

    works: dict[str, Callable[[], list[list[int]]]] = {f"{n} slots": of_ours(n) for n in map(int, slots.split(","))}
    works |= {
        "transformers, one padded batch": lambda: padded(llm, prompts),
        "transformers, generate_batch": lambda: continuous(llm, prompts),
        "transformers, one by one": lambda: one_by_one(llm, prompts),
    }
    asked, cases = sum(new for _, new in prompts), {}
    for name, work in picked(works, only).items():
        begun = time.perf_counter()
        texts[name] = work()
        seconds = time.perf_counter() - begun
        cases[name] = {"s": seconds, "tokens_per_s": asked / seconds, **counted.get(name, {})}
        print(f"{name:32} {seconds:7.1f} s {asked / seconds:7.1f} tokens/s {counted.get(name, '')}", flush=True)
    first: list[list[int]] = next(iter(texts.values()), [])
    for name, found in texts.items():
        cases[name]["same_texts"] = sum(a == b for a, b in zip(first, found, strict=True))
    waits = {str(tokens): latency(gen, 8, tokens) for tokens in (16, 200)}
    print(waits)
    tokens = sum(len(ids) for ids, _ in prompts)
    report(
        "many",
        out,
        model=model,
        dtype=dtype,
        prompts=count,
        prompt_tokens=tokens,
        new_tokens=asked,
        cases=cases,
        latency=waits,
    )


if __name__ == "__main__":
    typer.run(main)
