"""What a constraint costs and saves: greedy decoding with a schema beside decoding without, in turns.

    python benchmarks/structured.py --out structured-cpu.json

The model is "small" with random weights and a vocabulary of 32,000 or 128,000 tokens; the tokenizers are trained here
on the source of Python's standard library. "free": a schema of one long text, where each step needs the mask of all
tokens and nothing is certain. "keys": an object whose long keys are certain, and read at once.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from common import SHAPES, llama, picked, report, spread, timed
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import engine

NEW, END = 96, "<|end|>"
FREE = {"type": "string", "minLength": 4000}
KEYS = {
    "type": "object",
    "properties": {
        f"{name}_of_the_measurement_in_the_last_period": {"type": "integer", "minimum": 0, "maximum": 99}
        for name in ("minimum", "maximum", "median", "average", "deviation", "number", "first_value", "last_value")
    },
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # else blanks and line breaks are not certain
}
KEYS["required"] = list(KEYS["properties"])  # type: ignore[call-overload]
_console = Console()


def _sources() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="ignore")


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    made.train_from_iterator(_sources(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)


def measure(vocabulary: int, runs: int) -> dict[str, Any]:
    tokenizer = tokenizer_of(vocabulary)
    model = llama(**SHAPES["small"] | {"vocab_size": vocabulary})
    gen = engine.Generator(model, tokenizer)
    ids = torch.randint(3, len(tokenizer), (1, 64), generator=torch.Generator().manual_seed(0))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}

    def work(**asked: Any) -> Callable[[int], Any]:
        return lambda new: gen.generate(ids, max_new_tokens=new, **ends, **asked)

    works = {"unconstrained": work(min_new_tokens=NEW), "free": work(json_schema=FREE), "keys": work(json_schema=KEYS)}
    samples: dict[str, list[float]] = {name: [] for name in works}
    tokens: dict[str, int] = {}
    for run in range(runs + 1):  # the first is a warm-up
        for name, one in works.items():
            most = 400 if name == "keys" else NEW
            outs: list[Any] = []
            complete = timed(lambda: outs.append(one(most)))  # noqa: B023
            tokens[name] = outs[0].stats.new_tokens
            first = timed(lambda: gen.generate(ids, max_new_tokens=1))
            if run:
                samples[name].append(1000 * (complete - first) / (tokens[name] - 1))
    text = work(json_schema=KEYS)(400)
    return {
        "vocabulary": vocabulary,
        "tokenizer_tokens": len(tokenizer),
        "ms_per_token": {name: spread(taken) for name, taken in samples.items()},
        "new_tokens": tokens,
        "certain_tokens_of_keys": text.stats.accepted_tokens,
        "ended": text.finish_reasons[0],
    }


def main(
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    runs: Annotated[int, typer.Option(help="runs per case")] = 5,
    only: Annotated[str, typer.Option(help="32000; 128000, or 'all'")] = "all",
    threads: Annotated[int, typer.Option(help="threads of torch")] = 2,
) -> None:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    cases = [measure(size, runs) for size in picked({"32000": 32_000, "128000": 128_000}, only).values()]
    table = Table("vocabulary", "case", "ms per token", "least", "most", "x unconstrained")
    for case in cases:
        base = case["ms_per_token"]["unconstrained"]["median"]
        for name, taken in case["ms_per_token"].items():
            table.add_row(f"{case['vocabulary']:,}", name, *(f"{value:.2f}" for value in taken.values()),
                          f"{base / taken['median']:.2f}")  # fmt: skip
    _console.print(table)
    report("structured", out, model=SHAPES["small"], dtype="float32", cases=cases)


if __name__ == "__main__":
    typer.run(main)
