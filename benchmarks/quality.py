"""What lossy caches cost in quality: perplexity of the shipped model on Python modules that it was not trained on.

    python benchmarks/quality.py --out quality-cpu.json
    python benchmarks/plot.py quality-cpu.json

Quantized caches read texts of 1024 tokens in small pieces, so that nearly all that a token looks at has been encoded.
Caches that forget read one long text token by token, and are compared with the model itself where it is given, for
every token anew, only the tokens of one window. Prints two tables and one JSON line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from common import encoded_bytes_per_token, full_bytes_per_token, kept_bytes, report
from rich.console import Console
from rich.progress import track
from rich.table import Table
from train_shipped_model import STDLIB, corpus, encode
from transformers import AutoModelForCausalLM, AutoTokenizer, QuantizedCache

import caches
import configs
import engine

FIRST, PIECE = 64, 16  # tokens of a text that are read at once, and then
RESIDUAL = 32  # tokens that stay in full
_console, _progress = Console(), Console(stderr=True)


@dataclass(frozen=True)
class Variant:
    """A quantized cache; cache "dynamic" is the reference. theirs: transformers' own."""

    options: dict[str, Any] = field(default_factory=dict)
    cache: str = "quantized"
    theirs: bool = False

    def build(self, config: Any) -> Any:
        if self.theirs:
            return QuantizedCache(config=config, **self.options)
        return caches.build(self.cache, config, **self.options)

    def bytes_per_token(self, config: Any) -> float:
        """Of a token that is encoded, by arithmetic."""
        if self.cache != "quantized":
            return full_bytes_per_token(config, 4)
        return encoded_bytes_per_token(config, 4, configs.QuantizedCacheConfig.from_dict(self.options))


def variants() -> dict[str, Variant]:
    """All that can be chosen of every codec, and transformers' quantized cache where it has the same."""
    found = {"dynamic": Variant(cache="dynamic")}
    for backend, facts in configs.CODECS.items():
        for bits in sorted(facts.bits, reverse=True):
            options = {"backend": backend, "nbits": bits, "residual_length": RESIDUAL}
            name = backend if len(facts.bits) == 1 else f"{backend}, {bits} bit{'s' if bits > 1 else ''}"
            for axis, per_channel in facts.axes.items():
                groups = "per channel" if per_channel else "per token"
                found[f"{name}, {groups}"] = Variant(options | {"axis_key": axis, "axis_value": axis})
            if not facts.axes:
                found[name] = Variant(options)
    for name in ("quanto, 4 bits", "quanto, 2 bits", "hqq, 4 bits", "hqq, 2 bits"):
        found[f"transformers {name}"] = Variant(found[f"{name}, per token"].options, theirs=True)
    return found


def pieces_of(tokenizer: Any, texts: list[str], length: int, limit: int) -> torch.Tensor:
    """[at most limit, length]: the first piece of every text, then the second of those that have one, ..."""
    whole = [encode(tokenizer, [text]) for text in texts]
    pieces = [ids.unfold(0, length, length) for ids in whole if len(ids) >= length]
    order = sorted((number, text) for text, those in enumerate(pieces) for number in range(len(those)))
    return torch.stack([pieces[text][number] for number, text in order[:limit]])


@torch.inference_mode()
def nats_after_first(model: Any, rows: torch.Tensor, cache: Any) -> torch.Tensor:
    """Per row and token, without those that saw nothing encoded."""
    found = []
    for begin in [0, *range(FIRST, rows.shape[1], PIECE)]:
        ids = rows[:, begin : begin + (PIECE if begin else FIRST)]
        logits = model(ids, past_key_values=cache).logits
        if begin:
            targets = rows[:, begin + 1 : begin + 1 + ids.shape[1]]
            found.append(nats(logits[:, : targets.shape[1]], targets))
    return torch.cat(found, dim=1)


def nats(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")


def measure_codecs(model: Any, tokenizer: Any, rows: torch.Tensor) -> dict[str, dict[str, float]]:
    # In a byte-level vocabulary a token is written with one character per byte.
    words = [tokenizer.convert_ids_to_tokens(row) for row in rows[:, FIRST + 1 :].tolist()]
    text_bytes = sum(len(word) for row in words for word in row)
    found: dict[str, dict[str, float]] = {}
    for name, variant in track(variants().items(), "codecs", console=_progress):
        taken, held = [], 0
        for some in rows.split(16):
            cache = variant.build(model.config)
            taken.append(nats_after_first(model, some, cache))
            held += kept_bytes(cache)[0]
        total = torch.cat(taken)
        bits_per_byte = total.sum().item() / math.log(2) / text_bytes
        found[name] = {
            "bits_per_byte": bits_per_byte,
            "perplexity": total.mean().exp().item(),
            "bytes_per_token": variant.bytes_per_token(model.config),
            "measured_bytes_per_token": held / rows.numel(),
        }
    return found


def show_codecs(found: dict[str, dict[str, float]], rows: torch.Tensor) -> None:
    _console.print(f"\n{len(rows)} texts of {rows.shape[1]} tokens, the last {RESIDUAL} or a block more in full")
    table = Table("cache", "bits per byte", "perplexity", "to dynamic", "bytes per encoded token", "of all, measured")
    for name, taken in found.items():
        change = taken["perplexity"] / found["dynamic"]["perplexity"] - 1
        table.add_row(name, f"{taken['bits_per_byte']:.4f}", f"{taken['perplexity']:.3f}", f"{change:+.2%}",
                      f"{taken['bytes_per_token']:,.0f}", f"{taken['measured_bytes_per_token']:,.0f}")  # fmt: skip
    _console.print(table)


@torch.inference_mode()
def stream(model: Any, ids: torch.Tensor, cache: Any, window: int, name: str) -> tuple[torch.Tensor, list[int]]:
    """Nats of every token but the first, read one by one, and the bytes that the cache holds after each window."""
    found, held = [], []
    for begin in track(range(len(ids) - 1), name, console=_progress):
        logits = model(ids[None, begin : begin + 1], past_key_values=cache).logits
        found.append(nats(logits, ids[None, begin + 1 : begin + 2])[0])
        if (begin + 1) % window == 0:
            held.append(kept_bytes(cache)[0])
    return torch.cat(found), held


@torch.inference_mode()
def inside_window(model: Any, ids: torch.Tensor, window: int) -> torch.Tensor:
    """Nats of every token but the first, given the `window` tokens before it and nothing else."""
    found = [nats(model(ids[None, :window]).logits[:, :-1], ids[None, 1:window])[0]]
    contexts, targets = ids[:-1].unfold(0, window, 1), ids[window:]
    for begin in track(range(0, len(targets), 64), "inside the window", console=_progress):
        logits = model(contexts[begin : begin + 64], logits_to_keep=1, use_cache=False).logits
        found.append(nats(logits, targets[begin : begin + 64, None])[:, 0])
    return torch.cat(found)


def measure_stream(model: Any, ids: torch.Tensor, window: int, sinks: int, most_full: int) -> dict[str, Any]:
    of_window = {"window_length": window}
    wanted: dict[str, dict[str, Any]] = {
        "sink": of_window | {"num_sink_tokens": sinks},
        "sliding_window": of_window,
        "dynamic": {},
    }
    taken = {"inside the window": inside_window(model, ids, window)}
    bytes_held: dict[str, list[int]] = {}
    for name, options in wanted.items():
        if name not in caches.names():
            _console.print(f"left out: {name!r} is no registered backend")
            continue
        read = ids[: most_full + 1] if name == "dynamic" else ids
        taken[name], held = stream(model, read, caches.build(name, model.config, **options), window, name)
        bytes_held[name] = [min(held[1:]), max(held[1:])]  # the first window may still be filling up
    reference = taken["inside the window"].mean()
    return {
        "window": window,
        "sinks": sinks,
        "windows": len(ids) // window,
        "trained_positions": model.config.max_position_embeddings,
        "perplexity": {name: [part.mean().exp().item() for part in nats.split(window)] for name, nats in taken.items()},
        "to_inside_the_window": {
            name: (nats.mean() - reference).exp().item() for name, nats in taken.items() if len(nats) == len(ids) - 1
        },
        "least_and_most_bytes": bytes_held,
    }


def fifths(per_window: list[float], windows: int) -> Iterator[str]:
    """Perplexity in each fifth of the text; none where it was not read to its end."""
    for begin, end in ((windows * part // 5, windows * (part + 1) // 5) for part in range(5)):
        part = per_window[begin:end] if len(per_window) >= end else []
        yield f"{math.exp(sum(map(math.log, part)) / len(part)):.2f}" if part else "-"


def show_stream(found: dict[str, Any]) -> None:
    windows = found["windows"]
    _console.print(f"\none text of {windows} windows of {found['window']} tokens, perplexity in each fifth of it")
    table = Table("cache", *(f"fifth {number}" for number in range(1, 6)), "to inside the window", "bytes")
    for name, per_window in found["perplexity"].items():
        ratio, held = found["to_inside_the_window"].get(name), found["least_and_most_bytes"].get(name)
        table.add_row(
            name, *fifths(per_window, windows), "-" if ratio is None else f"{ratio:.3f}",
            "-" if held is None else " to ".join(f"{size:,}" for size in sorted(set(held))),
        )  # fmt: skip
    _console.print(table)


def main(
    out: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    texts: Annotated[int, typer.Option(help="for the codecs, at most")] = 32,
    length: Annotated[int, typer.Option(help="tokens of each")] = 1024,
    windows: Annotated[int, typer.Option(help="that the stream is long")] = 50,
    window: Annotated[int, typer.Option(help="tokens in one")] = 128,
    sinks: Annotated[int, typer.Option(help="tokens of a window that are the first ones")] = 4,
    most_full: Annotated[int, typer.Option(help="tokens of the stream that are read with everything kept")] = 4096,
    threads: Annotated[int, typer.Option(help="threads of torch")] = 2,
) -> None:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(engine.SHIPPED_MODEL).eval()
    tokenizer = AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)
    held_out = corpus(STDLIB)[1]
    rows = pieces_of(tokenizer, held_out, length, texts)
    codecs = measure_codecs(model, tokenizer, rows)
    show_codecs(codecs, rows)
    longest = max((encode(tokenizer, [text]) for text in held_out), key=len)
    if len(longest) <= windows * window:
        raise typer.BadParameter(
            f"the longest text has {len(longest)} tokens, fewer than {windows} windows of {window}"
        )
    streamed = measure_stream(model, longest[: windows * window + 1], window, sinks, most_full)
    show_stream(streamed)
    report("quality", out, texts=len(rows), text_tokens=length, residual_length=RESIDUAL,
           codecs=codecs, stream=streamed)  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
