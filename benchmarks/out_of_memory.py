"""Runs for which there is not enough memory, next to transformers' `generate`: who finishes, and by which fallbacks.

    python benchmarks/out_of_memory.py --out out-of-memory-cpu.json
    python benchmarks/out_of_memory.py --model smollm2 --threads 1

Every run has a process of its own. Once the model is there and warm, the process is allowed so many more bytes of
memory (RLIMIT_DATA: files that are mapped do not count). A real model answers chats about this project's guides. Prints
what the engine logs, then whether the text is that of a run with all memory, and at the end one JSON line. Linux only.
"""

from __future__ import annotations

import logging
import resource
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from common import SHAPES, llama, picked, report
from memory import in_a_process_of_its_own, status_bytes
from rich.console import Console

import engine

_console = Console(highlight=False)


@dataclass(frozen=True)
class Scenario:
    """more_mb: memory that a run gets beyond the model. ours: options that only we have."""

    prompt: int
    new: int
    more_mb: int
    rows: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)


_FORTY = {"num_beams": 40, "num_return_sequences": 20, "early_stopping": True, "do_sample": False}
SCENARIOS = {
    "a long text": Scenario(3000, 48, 80),
    "a long text, in few bits allowed": Scenario(3000, 48, 80, ours={"on_oom": ["chunk", "quantize"]}),
    "40 beams, 20 texts": Scenario(1000, 23, 250, options=_FORTY),
    "a batch of 8": Scenario(500, 32, 100, rows=8),
}
CHATS = {
    "a long chat": Scenario(2000, 48, 80),
    "8 chats": Scenario(300, 32, 90, rows=8),
}
_ROOT = Path(__file__).parents[1]


def subject_of(model: str, scenario: Scenario) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A model, the prompts and their mask: of a shape with random weights random tokens, of a real model chats."""
    if model in SHAPES:
        subject, seeded = llama(**SHAPES[model]), torch.Generator().manual_seed(0)
        ids = torch.randint(3, subject.config.vocab_size, (scenario.rows, scenario.prompt), generator=seeded)
        return subject, ids, torch.ones_like(ids)
    generator = engine.Generator(model, config=engine.EngineConfig(weights="full"))
    tokenizer: Any = generator.tokenizer
    text = "".join(file.read_text() for file in sorted((_ROOT / "docs" / "guide").glob("*.md")))
    words = torch.tensor(tokenizer(text).input_ids).split(scenario.prompt)[: scenario.rows]
    chats = [[{"role": "user", "content": "Say what this is about.\n" + tokenizer.decode(piece)}] for piece in words]
    read = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, padding_side="left", return_dict=True, return_tensors="pt"
    )
    return generator.model, read["input_ids"], read["attention_mask"]


def limited(scenario: Scenario, model: str, name: str, limit: bool, threads: int) -> dict[str, Any]:
    """One run of one engine. For a process of its own."""
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("engine").addHandler(handler)
    subject, ids, mask = subject_of(model, scenario)
    works = {
        "transformers": lambda columns, new: subject.generate(
            ids[:, -columns:], attention_mask=mask[:, -columns:], max_new_tokens=new, **scenario.options
        ),
        "ours": lambda columns, new: engine.generate(
            subject, ids[:, -columns:], attention_mask=mask[:, -columns:], max_new_tokens=new, **scenario.options,
            **scenario.ours,
        ),
    }  # fmt: skip
    works[name](64, 4)  # loads libraries, chooses kernels
    if limit:
        used = status_bytes("VmData:")
        resource.setrlimit(resource.RLIMIT_DATA, (used + scenario.more_mb * 10**6, resource.RLIM_INFINITY))
    begun, text, error, fallbacks = time.perf_counter(), None, None, []
    try:
        out = works[name](ids.shape[1], scenario.new)
        text = (out if isinstance(out, torch.Tensor) else out.sequences).tolist()
        fallbacks = [] if isinstance(out, torch.Tensor) else [asdict(one) for one in out.stats.fallbacks]
    except Exception as raised:
        error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    taken = time.perf_counter() - begun
    return {"text": text, "error": error, "seconds": taken, "fallbacks": fallbacks, "log": lines}


def main(
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    scenarios: Annotated[str, typer.Option(help="names with ; between, or 'all'")] = "all",
    model: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}, or a path, name or hub id")] = "small",
    threads: Annotated[int, typer.Option(help="threads of torch")] = 2,
) -> None:
    cases: dict[str, Any] = {}
    for name, scenario in picked(SCENARIOS if model in SHAPES else CHATS, scenarios).items():
        what = f"{scenario.rows} x {scenario.prompt} + {scenario.new} tokens"
        _console.print(f"\n{name}: {what}, {scenario.more_mb} MB beyond the model")
        whole = in_a_process_of_its_own(limited, scenario, model, "transformers", False, threads)
        found: dict[str, Any] = {}
        for engine_name in ("transformers", "ours"):
            run = in_a_process_of_its_own(limited, scenario, model, engine_name, True, threads)
            for line in run["log"]:
                _console.print(f"  {line}", markup=False)
            same = None if run["text"] is None else run["text"] == whole["text"]
            outcome = run["error"] if same is None else f"finished in {run['seconds']:.1f} s, the whole text: {same}"
            _console.print(f"{engine_name}: {outcome}", markup=False)
            found[engine_name] = {key: value for key, value in run.items() if key != "text"} | {"same_text": same}
        cases[name] = {**asdict(scenario), "unlimited_s": whole["seconds"], "engines": found}
    report("out_of_memory", out, model=SHAPES.get(model, model), dtype="float32", cases=cases)


if __name__ == "__main__":
    typer.run(main)
