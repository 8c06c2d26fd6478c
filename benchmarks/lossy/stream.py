"""Caches that forget: one long text is read token by token, and compared with the model itself where it is given, for
every token anew, only the tokens of one window."""

from __future__ import annotations

from typing import Any

import torch
from common import kept_bytes
from rich.console import Console
from rich.progress import track

import caches

_progress = Console(stderr=True)


def nats(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")


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
