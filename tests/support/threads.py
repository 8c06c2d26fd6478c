"""Calls of several threads on one model give the texts of one thread. `python threads.py 200` makes 200 per thread."""

from __future__ import annotations

import copy
import random
import sys
import threading
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from architectures import prompt, tiny_model
from transformers import PreTrainedModel
from transformers.utils import logging

import engine
from engine.kernels import linear_backend

_ROUND = {"cache": "quantized", "cache_config": {"residual_length": 8}}
CALLS: list[dict[str, Any]] = [
    {},
    {"cache": "static"},
    {"cache": "auto"},
    {"cache": "offloaded"},
    {"cache": "none"},
    _ROUND,
    {"cache": "sink", "cache_config": {"window_length": 12, "num_sink_tokens": 2}},
    {"num_beams": 3, "num_return_sequences": 2},
    {"num_beams": 3, "cache": "static"},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"penalty_alpha": 0.6, "top_k": 3},
    {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
    {"prompt_lookup_num_tokens": 3},
    {"assistant_model": "draft"},
    {"assistant_model": "draft", "cache": "static"},
    {"guidance_scale": 1.5},
]
_NEW = 10


@cache
def draft_of(name: str) -> PreTrainedModel:
    """A model that often says what the one of this name says."""
    draft, noise = copy.deepcopy(tiny_model(name)), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=noise)
    return draft


def cells_of(name: str) -> list[dict[str, Any]]:
    """The calls that this model takes."""
    return [call for call in CALLS if name != "jamba" or call.get("cache") not in ("quantized", "sink")]


def arguments(call: dict[str, Any], name: str) -> dict[str, Any]:
    draft = {"assistant_model": draft_of(name)} if "assistant_model" in call else {}
    return call | draft | {"max_new_tokens": _NEW}


def generated(generator: engine.Generator, inputs: Any, options: dict[str, Any], streams: bool) -> list[list[int]]:
    if not streams:
        return generator.generate(inputs, **options).tokens
    tokens: dict[int, list[int]] = {}
    for piece in generator.stream(inputs, **options):
        tokens.setdefault(piece.row, []).extend(piece.tokens)
    return [tokens[row] for row in sorted(tokens)]


def texts_of_threads(
    generators: Sequence[engine.Generator], name: str, calls: int, seed: int, cells: Sequence[dict[str, Any]] = CALLS
) -> int:
    """One thread per generator makes this many calls, chosen at random from `cells`: how many there were.

    Raises the first error of a thread, an `AssertionError` where a text is not that of one thread.
    """
    inputs, errors = [prompt(rows=2, pads=3), prompt(rows=1, pads=0)], []
    alone = engine.Generator(generators[0].model, config=generators[0].config)
    expected = {
        (call, number): generated(alone, given, arguments(cells[call], name), False)
        for call in range(len(cells))
        for number, given in enumerate(inputs)
    }
    begin, made = threading.Barrier(len(generators)), []

    def work(generator: engine.Generator, chosen: random.Random) -> None:
        begin.wait()
        try:
            for _ in range(calls):
                call, number = chosen.choice(list(expected))
                found = generated(generator, inputs[number], arguments(cells[call], name), chosen.random() < 0.5)
                assert found == expected[call, number], (cells[call], number)
                if chosen.random() < 0.05:
                    generator.release()
                made.append(call)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(generator, random.Random(seed + number)))
        for number, generator in enumerate(generators)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return len(made)


def generators(name: str, several: bool, choice: str | None = None) -> list[engine.Generator]:
    """Of two threads: one for both, or one for each over the same model."""
    choice = choice or ("onednn" if linear_backend.has_onednn() else "default")
    config = engine.EngineConfig(linears=choice)
    first = engine.Generator(tiny_model(name), config=config)
    return [first, engine.Generator(tiny_model(name), config=config) if several else first]


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.set_verbosity_error()
    for several in (False, True):
        what = "two generators" if several else "one generator"
        for name in sys.argv[2:] or ["llama", "gemma2"]:
            made = texts_of_threads(generators(name, several), name, int(sys.argv[1]), seed=0, cells=cells_of(name))
            print(what, name, made, flush=True)
