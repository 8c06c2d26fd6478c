"""One GGUF file here and in llama.cpp: the same answers, ms per token, bytes of weights.

    python benchmarks/beside_llama_cpp.py FILE.gguf --out beside-llama-cpp-cpu.json

The file is also written in other types whose codes are kept. Twenty questions of a chat are answered greedily. Answers
are compared up to the first near tie of our two best logits: llama.cpp rounds inputs of products to 8 bits, so that its
logits are off by some. Steps are timed in turns, a long call minus
a call for one token. Prints a table, and one JSON line.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import transformers
import typer
from common import decode_ms, report, weight_bytes
from llama_cpp_peer import LlamaCpp, quantize
from rich.console import Console
from rich.progress import track
from rich.table import Table
from weights import Unnoted

import engine

TYPES = ("Q8_0", "Q4_0", "Q4_1")
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "Name three planets and say one thing about each.",
    "How do I boil an egg?",
    "What is the difference between a frog and a toad?",
    "Give me three tips for learning a language.",
    "Who wrote Romeo and Juliet?",
    "What is photosynthesis?",
    "Write a polite email that declines an invitation.",
    "How many days are in a leap year, and why?",
    "Suggest a name for a small bakery.",
    "What should I pack for a weekend in the mountains?",
    "Explain what a variable is to a beginner in programming.",
    "Translate 'good morning' into Spanish.",
    "What are the primary colors?",
    "Describe a cat in one sentence.",
    "Why do we have seasons?",
    "Write a Python function that adds two numbers.",
    "What is a good way to fall asleep faster?",
)
_console = Console(stderr=True)


def answers(generator: engine.Generator, peer: LlamaCpp, new: int) -> dict[str, Any]:
    """How many tokens of the answers come before the first near tie of our two best logits, and how many of these are
    the same. A near tie is nearer than three times the deviation of llama.cpp's logits from ours."""
    wanted = [_answer(generator, peer, question, new) for question in track(QUESTIONS, "answers", console=_console)]
    deviation = torch.cat([answer.deviations for answer in wanted]).square().mean().sqrt().item()
    counts = [_same_before(answer, 3 * deviation) for answer in wanted]
    return {
        "tokens": sum(len(answer.ours) for answer in wanted),
        "same_answers": sum(answer.ours == answer.theirs for answer in wanted),
        "deviation": deviation,
        "tokens_before_near_ties": sum(tokens for tokens, _ in counts),
        "same_before_near_ties": sum(same for _, same in counts),
    }


class _Answer(NamedTuple):
    ours: list[int]
    theirs: list[int]
    margins: list[float]  # of our best logit to the second one
    deviations: torch.Tensor  # [tokens], of the difference of the two in llama.cpp, given our tokens


def _answer(generator: engine.Generator, peer: LlamaCpp, question: str, new: int) -> _Answer:
    ids = prompt(generator, question)
    out = generator.generate(ids, max_new_tokens=new, do_sample=False, output_logits=True)
    ours = out.sequences[0, ids.shape[1] :].tolist()
    best = torch.cat(out.logits).float().topk(2)
    theirs = torch.cat([logits.clone() for _, logits in peer.read(out.sequences[0, :-1], 16, "F32")])
    pairs = theirs[ids.shape[1] - 1 :].gather(1, best.indices)
    margins = best.values[:, 0] - best.values[:, 1]
    return _Answer(
        ours, peer.generate(ids, len(ours), Unnoted()), margins.tolist(), pairs[:, 0] - pairs[:, 1] - margins
    )


def _same_before(answer: _Answer, near: float) -> tuple[int, int]:
    """The tokens before the first margin that is smaller than `near`, and how many of them are the same."""
    tokens = next((place for place, margin in enumerate(answer.margins) if margin < near), len(answer.margins))
    pairs = list(zip(answer.ours, answer.theirs, strict=True))
    return tokens, next((place for place, (one, other) in enumerate(pairs[:tokens]) if one != other), tokens)


def prompt(generator: engine.Generator, question: str) -> torch.Tensor:
    """Ids [1, tokens] of a chat that asks."""
    chat = [{"role": "user", "content": question}]
    encoded = generator.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    return encoded["input_ids"]


def steps_ms(generators: dict[str, engine.Generator], peer: LlamaCpp, ids: torch.Tensor, new: int, runs: int) -> Any:
    # Without a mask the padding token, which ends each message too, would be taken for padding.
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    without_end = dict(do_sample=False, eos_token_id=-1)
    engines = {
        name: lambda new, one=generator: one.generate(inputs, max_new_tokens=new, **without_end)
        for name, generator in generators.items()
    }
    return decode_ms(engines | {"llama.cpp": lambda new: peer.generate(ids, new, Unnoted())}, new, runs)


def main(
    file: Annotated[Path, typer.Argument(help="a Llama with a vocabulary and a chat template")],
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    runs: Annotated[int, typer.Option(help="runs per engine")] = 7,
    new: Annotated[int, typer.Option(help="tokens of an answer, and of a timed call")] = 64,
    threads: Annotated[int, typer.Option(help="threads of torch and llama.cpp")] = 2,
) -> None:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results = {}
    table = Table("type", "ms, compiled (least to most)", "ms, eager", "ms, llama.cpp", "bytes, of file", "same tokens")
    with tempfile.TemporaryDirectory() as folder:
        for kind in TYPES:
            written = quantize(file, kind, out=Path(folder) / f"{kind}.gguf")
            peer = LlamaCpp(written, threads)
            generators = {
                name: engine.Generator(str(written), config=engine.EngineConfig(compile=compile))
                for name, compile in (("compiled", "auto"), ("eager", "off"))
            }
            ids = prompt(generators["eager"], QUESTIONS[0])
            generators["compiled"].warmup(ids)
            steps = steps_ms(generators, peer, ids, new, runs)
            row = {
                "steps_ms": steps,
                "file_bytes": written.stat().st_size,
                "weight_bytes": weight_bytes(generators["eager"].model),
                **answers(generators["eager"], peer, new),
            }
            peer.release()
            results[kind] = row
            cells = [f"{ms['median']:.2f} ({ms['least']:.2f} to {ms['most']:.2f})" for ms in steps.values()]
            sizes = f"{row['weight_bytes']:,}, {row['file_bytes']:,}"
            same = f"{row['same_before_near_ties']} of {row['tokens_before_near_ties']}"
            table.add_row(kind, *cells, sizes, same)
    _console.print(table)
    report("beside_llama_cpp", out, file=file.name, runs=runs, new=new, types=results)


if __name__ == "__main__":
    typer.run(main)
