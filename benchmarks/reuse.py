"""Conversations, prefixes and files: how much sooner the first token comes when nothing is read twice.

    python benchmarks/reuse.py --out reuse-cpu.json

transformers reads every prompt whole, by `model.generate`, and takes turns with ours on the same token ids. A chat of 8
turns of about 100 + 100 tokens; a second prompt that has 1,000 tokens in common with the first one; 32 prompts over one
prefix, as a batch; a cache of 4,096 tokens from a file; and what a store costs where no prompt begins like another one.
Prints a table, and at the end one JSON line.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import SHAPES, full_bytes_per_token, llama, report, spread, timed
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

import caches
import engine

TURNS, TOKENS, COMMON, OWN, ROWS, LONG = 8, 100, 1000, 20, 32, 4096
_console = Console()


class FirstToken:
    """A streamer that notes when the first new token came. transformers puts the prompt before it."""

    def __init__(self) -> None:
        self.begun, self.pieces, self.seconds = time.perf_counter(), 0, 0.0

    def put(self, value: Any) -> None:
        self.pieces += 1
        if self.pieces == 2:
            self.seconds = time.perf_counter() - self.begun

    def end(self) -> None:
        pass


class Scenarios:
    """model, tokenizer: of all scenarios. runs: of each side. Every method returns the seconds of ours and of the peer,
    or of two things of ours."""

    def __init__(self, model: Any, tokenizer: Any, runs: int):
        self.model, self.tokenizer, self.runs = model, tokenizer, runs
        self.draw = torch.Generator().manual_seed(0)
        self.generator = engine.Generator(model, tokenizer)

    def ids(self, tokens: int) -> torch.Tensor:
        return torch.randint(300, len(self.tokenizer), (1, tokens), generator=self.draw)

    def peer(self, ids: torch.Tensor, tokens: int) -> tuple[float, torch.Tensor]:
        """Seconds to the first token of transformers, and what it generated."""
        first = FirstToken() if len(ids) == 1 else None
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), streamer=first, **options)
        return 0.0 if first is None else first.seconds, out[:, ids.shape[1] :]

    def first_token(self, generator: engine.Generator, ids: torch.Tensor) -> float:
        out = generator.generate(ids, max_new_tokens=2)
        return out.stats.ttft_s or 0.0

    def conversation(self) -> dict[str, Any]:
        return self.conversation_of("", self.generator)

    def compiled_conversation(self) -> dict[str, Any]:
        """Once the layers are compiled, which a server waits for when it starts."""
        generator = engine.Generator(self.model, self.tokenizer, engine.EngineConfig(compile="auto"))
        backend = {"cache": "static", "cache_config": {"max_cache_len": 2 * TURNS * (TOKENS + 20)}}
        generator.warmup(self.ids(2 * TOKENS), **backend)
        return self.conversation_of(", compiled layers", generator, **backend)

    def conversation_of(self, kind: str, generator: engine.Generator, **backend: Any) -> dict[str, Any]:
        messages = [self.tokenizer.decode(self.ids(TOKENS - 10)[0]) for _ in range(TURNS)]
        options = backend | {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
        ours, peers, first, peer_first = [], [], [], []
        is_same = True
        for number in range(self.runs + 1):
            chat, prompts, begun = generator.chat(**options), [], time.perf_counter()
            for message in messages:
                out = chat.send(message)
                prompts.append(out.sequences[:, : -len(out.tokens[0])])
                last = out.stats.ttft_s
            taken, begun = time.perf_counter() - begun, time.perf_counter()
            for prompt in prompts:
                peer_last, tokens = self.peer(prompt, TOKENS)
            peer_taken = time.perf_counter() - begun
            is_same &= tokens[0].tolist() == out.tokens[0]
            if number:
                ours.append(taken), peers.append(peer_taken), first.append(last), peer_first.append(peer_last)
        text = f"{TURNS} turns, {prompts[-1].shape[1]} tokens at the last prompt"
        return {
            f"chat{kind}: {text}": compared(ours, peers, same_text=is_same),
            f"chat{kind}: first token of the last turn": compared(first, peer_first, same_text=is_same),
        }

    def second_prompt(self) -> dict[str, Any]:
        ours, peers, copied, is_same = [], [], [], True
        own_bytes = 4 * OWN * full_bytes_per_token(self.model.config, 4)  # of its tokens, with room for more
        store = engine.Generator(self.model, config=engine.EngineConfig(prefix_store_bytes=2**31))
        for _ in range(self.runs + 1):
            common = self.ids(COMMON)
            first = store.generate(torch.cat([common, self.ids(OWN)], 1), max_new_tokens=8)
            prompt = torch.cat([common, self.ids(OWN)], 1)
            held = storages(first.cache)
            out = store.generate(prompt, max_new_tokens=2)
            ours.append(out.stats.ttft_s)
            assert out.stats.cached_tokens == COMMON
            new = sum(size for place, size in storages(out.cache).items() if place not in held)
            copied.append(new if new > own_bytes or not held.keys() <= storages(out.cache).keys() else 0)
            seconds, tokens = self.peer(prompt, 2)
            peers.append(seconds)
            is_same &= tokens[0].tolist() == out.tokens[0]
        name = f"first token of a second prompt, {COMMON} tokens in common"
        return {name: compared(ours[1:], peers[1:], same_text=is_same, bytes_copied=max(copied))}

    def batch(self) -> dict[str, Any]:
        common = self.ids(COMMON)
        prefix = self.generator.prefill(common)
        rows = torch.cat([self.ids(OWN) for _ in range(ROWS)])
        prompts = torch.cat([common.expand(ROWS, -1), rows], 1)
        ours, peers, is_same = [], [], True
        for number in range(self.runs + 1):
            begun = time.perf_counter()
            out = prefix.generate(rows, max_new_tokens=16)
            taken, begun = time.perf_counter() - begun, time.perf_counter()
            _, tokens = self.peer(prompts, 16)
            if number:
                ours.append(taken), peers.append(time.perf_counter() - begun)
            is_same &= tokens.tolist() == out.tokens
        return {f"{ROWS} prompts over one prefix of {COMMON} tokens": compared(ours, peers, same_text=is_same)}

    def file(self) -> dict[str, Any]:
        """Loading beside reading the tokens, by the engine."""
        ids = self.ids(LONG)
        with tempfile.TemporaryDirectory() as folder:
            path, loads, reads = Path(folder) / "cache", [], []
            for number in range(self.runs + 1):
                out = self.generator.generate(ids, max_new_tokens=1)
                out.cache.save(path, self.model)
                taken = timed(lambda: caches.load(path, self.model))
                if number:
                    loads.append(taken), reads.append(out.stats.ttft_s)
            overhead = path.stat().st_size / sum(layer.keys.nbytes + layer.values.nbytes for layer in out.cache.layers)
        return {f"{LONG} tokens from a file, beside reading them": compared(loads, reads, file_over_cache=overhead)}

    def nothing_in_common(self) -> dict[str, Any]:
        """A store beside none: calls whose prompts begin in different ways. More runs: the difference is small."""
        config = engine.EngineConfig(prefix_store_bytes=2**31)
        generators = {"with": engine.Generator(self.model, config=config), "without": self.generator}
        taken: dict[str, list[float]] = {name: [] for name in generators}
        for number in range(4 * self.runs + 1):
            ids = self.ids(200)
            turns = list(generators.items())
            for name, generator in turns if number % 2 else turns[::-1]:
                seconds = timed(lambda: generator.generate(ids, max_new_tokens=32))  # noqa: B023
                if number:
                    taken[name].append(seconds)
        return {"a store where nothing repeats, beside none": compared(taken["with"], taken["without"])}


def storages(cache: Any) -> dict[int, int]:
    """Bytes of every piece of memory of a cache."""
    tensors = [tensor.untyped_storage() for layer in cache.layers for tensor in layer.tensors()]
    return {storage.data_ptr(): storage.nbytes() for storage in tensors}


def compared(ours: list[float], peers: list[float], **more: Any) -> dict[str, Any]:
    """times: how often ours fits into the peer's time, by medians."""
    found = {"ours_s": spread(ours), "peer_s": spread(peers)}
    return found | {"times": found["peer_s"]["median"] / found["ours_s"]["median"]} | more


def table_of(cases: dict[str, Any]) -> Table:
    table = Table("", "ours, s", "beside, s", "times")
    for name, case in cases.items():
        row = (f"{case[side]['median']:.3f}" for side in ("ours_s", "peer_s"))
        table.add_row(name, *row, f"{case['times']:.2f}")
    return table


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "small",
    runs: Annotated[int, typer.Option(help="Of each side, after one that is not counted.", min=1)] = 3,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option(help="Write the JSON line to this file too.")] = None,
) -> None:
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)
    scenarios = Scenarios(llama(**(SHAPES[shape] | {"vocab_size": len(tokenizer)})), tokenizer, runs)
    cases: dict[str, Any] = {}
    steps: list[Callable[[], dict[str, Any]]] = [
        scenarios.conversation, scenarios.compiled_conversation, scenarios.second_prompt, scenarios.batch,
        scenarios.file, scenarios.nothing_in_common,
    ]  # fmt: skip
    with _console.status("running") as status:
        for step in steps:
            status.update(step.__name__.replace("_", " "))
            cases |= step()
    _console.print(table_of(cases))
    report("reuse", out, shape=shape, runs=runs, cases=cases)


if __name__ == "__main__":
    typer.run(main)
