"""What lossy caches and weights in few bits cost in quality, for any model, beside llama.cpp's.

    python benchmarks/quality.py --model smollm2 --facts 1000,2000 --twin --out smollm2.json
    python benchmarks/plot.py smollm2.json

All variants read the same texts in small pieces, so that nearly all that a token looks at went through the cache.
Each is compared, token by token, with the model in full: perplexity, divergence of the probabilities (KL), and how
often the most probable token is the same. Then facts are looked for in long texts, and questions of a chat answered.
Prints tables and one JSON line; writes the tables next to `--out` in Markdown too.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import transformers
import typer
from common import full_bytes_per_token, kept_bytes, picked, report, weight_bytes
from lossy import texts as sources
from lossy.facts import FACTS, facts_found, text_with_facts
from lossy.markdown import document
from lossy.results import Results
from lossy.stream import measure_stream
from lossy.twin import twin_of
from lossy.variants import CACHES, PEER_CACHES, PEER_WEIGHTS, RESIDUAL, WEIGHTS, CacheVariant
from rich.console import Console
from rich.progress import track
from train_shipped_model import encode

import engine
from engine.measuring.quality import PIECE, Record, Reference, engine_reader

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "Name three planets and say one thing about each.",
)
ANSWER = 40  # tokens of an answer
Row: TypeAlias = dict[str, Any]
_progress = Console(stderr=True)


def measure_caches(
    generator: engine.Generator, reference: Reference, chosen: dict[str, CacheVariant], long_texts: dict[int, str]
) -> Iterator[tuple[str, Row]]:
    config, (rows, length) = generator.model.config, reference.ids.shape
    values = full_bytes_per_token(config, 1) * rows * length
    for name, variant in track(chosen.items(), "caches", console=_progress):
        sizes: list[int] = []
        read = engine_reader(partial(_generate, generator, variant, length, sizes))
        row = asdict(reference.compare(read))
        row |= {"bits": 8 * sum(sizes) / values, "encoded_bits": variant.encoded_bits(config)}
        row["facts"] = {
            tokens: None if variant.theirs else facts_found(generator, text, **variant.parameters(config, tokens))
            for tokens, text in long_texts.items()
        }
        yield name, row


def _generate(
    generator: engine.Generator,
    variant: CacheVariant,
    length: int,
    sizes: list[int],
    ids: torch.Tensor,
    **parameters: Any,
) -> engine.Generation:
    """`Generator.generate` with a new cache, whose bytes are added to `sizes`."""
    out = generator.generate(ids, **parameters, **variant.parameters(generator.model.config, length))
    sizes.append(kept_bytes(out.cache)[0])
    return out


def measure_weights(
    model: Any, tokenizer: Any, reference: Reference, chosen: dict[str, dict[str, Any]], long_texts: dict[int, str]
) -> Iterator[tuple[str, Row]]:
    elements = sum(weight.numel() for weight in model.parameters())
    for name, options in track(chosen.items(), "weights", console=_progress):
        generator = engine.Generator(copy.deepcopy(model), tokenizer, engine.EngineConfig(**options))
        yield (
            name,
            asdict(reference.compare(engine_reader(generator.generate)))
            | {
                "bits": 8 * weight_bytes(generator.model) / elements,
                "facts": {tokens: facts_found(generator, text) for tokens, text in long_texts.items()},
                "answers": answers_of(generator),
            },
        )


def answers_of(generator: engine.Generator) -> list[str]:
    """To `QUESTIONS`; none of a model without chats."""
    if generator.tokenizer.chat_template is None:
        return []
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [generator.generate(chat, max_new_tokens=ANSWER, do_sample=False).text[0].strip() for chat in chats]


def measure_peer(
    model: Any, reference: Reference, cache_types: tuple[str, ...], weight_types: tuple[str, ...]
) -> Iterator[tuple[str, str, Row]]:
    """llama.cpp by types of keys and values ("caches") and of weights, compared with our reference."""
    from llama_cpp_peer import LlamaCpp, cache_bits, quantize, write_gguf

    elements = sum(weight.numel() for weight in model.parameters())

    def compared(file: Path, cache_type: str) -> Row:
        peer = LlamaCpp(file, torch.get_num_threads())

        def read(ids: torch.Tensor, record: Record) -> None:
            for row, text in enumerate(ids):
                for before, logits in peer.read(text[:-1], PIECE, cache_type):
                    record(slice(row, row + 1), before, logits[None])

        measured = asdict(reference.compare(read))
        peer.release()
        return measured

    with tempfile.TemporaryDirectory() as folder:
        full = Path(folder) / "full.gguf"
        write_gguf(model, full)
        for cache_type in track(cache_types, "llama.cpp's caches", console=_progress):
            yield "caches", cache_type, compared(full, cache_type) | {"bits": cache_bits(cache_type)}
        for weight_type in track(weight_types, "llama.cpp's weights", console=_progress):
            file = quantize(full, weight_type, pure=False)
            bits = 8 * file.stat().st_size / elements
            yield "weights", weight_type, compared(file, "F32") | {"bits": bits}
            file.unlink()


def has_peer() -> bool:
    return all(importlib.util.find_spec(name) for name in ("llama_cpp", "gguf"))


def main(
    model: Annotated[str, typer.Option(help="path, name or hub id; 'shipped': the model in the package")] = "shipped",
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    folder: Annotated[Path | None, typer.Option(help="of texts, *.txt; else essays, or held-out modules")] = None,
    texts: Annotated[int, typer.Option(help="that are read, at most")] = 4,
    length: Annotated[int, typer.Option(help="tokens of each")] = 1024,
    caches: Annotated[str, typer.Option(help=f"names with ; between, or all: {'; '.join(CACHES)}")] = "all",
    weights: Annotated[str, typer.Option(help=f"the same: {'; '.join(WEIGHTS)}")] = "all",
    facts: Annotated[str, typer.Option(help="lengths of the texts with facts, as 1000,2000,4000")] = "",
    twin: Annotated[bool, typer.Option(help="weights of a twin that lie on no grid, too (Llamas)")] = False,
    peer: Annotated[bool, typer.Option(help="llama.cpp, where it is installed (Llamas)")] = False,
    windows: Annotated[int, typer.Option(help="that a stream is long, which is read token by token")] = 0,
    window: Annotated[int, typer.Option(help="tokens in one window of the stream")] = 128,
    most_full: Annotated[int, typer.Option(help="tokens of the stream that are read with everything kept")] = 4096,
    threads: Annotated[int, typer.Option(help="threads of torch")] = 2,
) -> None:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    chosen, chosen_weights = picked(CACHES, caches), picked(WEIGHTS, weights)
    if peer and not has_peer():
        raise typer.BadParameter("llama.cpp is not installed: pip install -e '.[peers]', or leave --peer out")
    is_shipped = model == "shipped"
    in_full = engine.EngineConfig(weights="full")  # also of a file with codes
    generator = engine.Generator(engine.SHIPPED_MODEL if is_shipped else model, config=in_full)
    tokenizer, llm = generator.tokenizer, generator.model
    all_texts = sources.read(folder, is_shipped)
    ids = sources.pieces_of(tokenizer, all_texts, length, texts)
    long_texts = {int(size): text_with_facts(all_texts, tokenizer, int(size)) for size in facts.split(",") if size}
    results = Results(out, {
        "model": model, "parameters": sum(weight.numel() for weight in llm.parameters()), "texts": len(ids),
        "text_tokens": length, "residual_length": RESIDUAL, "questions": QUESTIONS, "facts": len(FACTS),
    })  # fmt: skip
    reference = Reference(ids, engine_reader(generator.generate))
    results.add(full=asdict(reference.full), caches={}, weights={}, peer={})
    for name, row in measure_caches(generator, reference, chosen, long_texts):
        results.add(caches={name: row})
    for of, of_model in ({"model": llm} | ({"twin": twin_of(llm)} if twin else {})).items():
        for name, row in measure_weights(of_model, tokenizer, reference, chosen_weights, long_texts):
            results.add(weights={of: {name: row}})
        cache_types = ("F32", *PEER_CACHES) if of_model is llm else ("F32",)
        for of_what, name, row in measure_peer(of_model, reference, cache_types, PEER_WEIGHTS) if peer else ():
            results.add(peer={of: {of_what: {name: row}}})
    if windows:
        longest = max((encode(tokenizer, [text]) for text in all_texts), key=len)
        results.add(stream=measure_stream(llm, longest[: windows * window + 1], window, 4, most_full))
    print(document(results.rows))
    if out is not None:
        out.with_suffix(".md").write_text(document(results.rows))
    report("quality", out, **results.rows)


if __name__ == "__main__":
    typer.run(main)
