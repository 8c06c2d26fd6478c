"""Random histories of a batch: prompts arrive, are cancelled, fail, and memory is out in random layers and steps."""

from __future__ import annotations

import functools
import gc
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from architectures import ids_of, tiny_model
from injection import failing_at_random

import caches
import engine
from engine.serving.batch_request import BatchRequest

KINDS = ("llama", "gemma2", "lfm2", "jamba", "gpt2", "llama4_text")
BACKENDS: dict[str, dict[str, Any]] = {
    "dynamic": {}, "static": {}, "offloaded": {}, "offloaded_static": {}, "sliding_window": {"window_length": 12},
    "sink": {"window_length": 12, "num_sink_tokens": 2}, "quantized": {"residual_length": 8},
}  # fmt: skip
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"do_sample": True},
    "three samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "guided": {"guidance_scale": 1.5},
}


class Broken:
    """A logits processor that raises, or says NaN, when the text has `columns` columns."""

    def __init__(self, columns: int, raises: bool):
        self.columns, self.raises = columns, raises

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] < self.columns:
            return scores
        if self.raises:
            raise ZeroDivisionError("a processor failed")
        return scores * float("nan")


@functools.cache
def generator(kind: str) -> engine.Generator:
    return engine.Generator(tiny_model(kind))


@functools.cache
def alone(kind: str, backend: str, strategy: str, tokens: int, seed: int, new: int) -> list[list[int]] | str:
    """The texts of `generate`, or why it refuses."""
    try:
        return generator(kind).generate(**request_of(kind, backend, strategy, tokens, seed, new)).tokens
    except (caches.CacheError, engine.EngineError) as refused:
        return str(refused)


def request_of(kind: str, backend: str, strategy: str, tokens: int, seed: int, new: int) -> dict[str, Any]:
    options = BACKENDS[backend] | ({"max_cache_len": 128} if backend in ("static", "offloaded_static") else {})
    return {
        "inputs": ids_of(tokens, seed),
        "cache": backend, "cache_config": options, "max_new_tokens": new, "seed": seed, **STRATEGIES[strategy],
    }  # fmt: skip


def run(seeds: Iterable[int]) -> Counter[str]:
    """Run a history per seed; counts of what happened in them."""
    happened: Counter[str] = Counter()
    gc.freeze()  # a recovery collects garbage, and nothing that was there before is any
    for seed in seeds:
        happened += history(random.Random(seed))
    return happened


def history(dice: random.Random) -> Counter[str]:
    kind, happened = dice.choice(KINDS), Counter[str]()
    gen = generator(kind)
    names = dice.sample(list(BACKENDS), 2)
    plans = []
    for _ in range(dice.randint(3, 8)):
        plan = (dice.choice(names), dice.choice(list(STRATEGIES)), dice.randint(1, 40), dice.randint(0, 3), 8)
        expected = alone(kind, *plan)  # before anything fails
        fate = dice.choices(("ends", "cancelled", "raises", "nan", "bad"), (12, 2, 1, 1, 1))[0]
        plans.append((plan, expected, fate, dice.randint(0, 12)))
    gc.collect()
    before = caches_alive()
    scheduler = gen._scheduler(
        dice.randint(1, 10), dice.choice((None, 200_000)), reads_first=dice.random() < 0.3,
        piece_tokens=dice.choice((None, 3, 8)),
    )  # fmt: skip
    arriving = [(dice.randint(0, 20), index) for index in range(len(plans))]
    requests: dict[int, BatchRequest] = {}
    begun, turns = {}, 0
    chance = dice.choice((0.0, 0.0, 0.002, 0.02))
    with failing_at_random(gen.model, chance, dice, most=10) as failures:
        while arriving or scheduler.is_busy:
            for when, index in sorted(arriving):
                if when <= turns:
                    arriving.remove((when, index))
                    requests[index] = submitted(index, kind, plans[index])
                    scheduler.add(requests[index])
                    begun[index] = turns
            for index, request in requests.items():
                if plans[index][2] == "cancelled" and turns >= begun[index] + plans[index][3]:
                    request.cancel()
            scheduler.turn()
            turns += 1
            # Everything that was submitted, one after the other, does not take more turns.
            assert turns < 30 + sum(plan[2] + 4 * plan[4] for plan, *_ in plans), "a request waits for too many turns"
    for index, request in requests.items():
        check(request, *plans[index][:3], happened)
    happened += failures
    happened["joined steps"] += scheduler.counts.steps
    happened["alone"] += scheduler.counts.alone_steps
    happened["parked"] += scheduler.counts.parked
    del scheduler, requests, request
    gc.collect()
    assert caches_alive() <= before, "memory is not back at its base"
    return happened


def submitted(index: int, kind: str, planned: Any) -> BatchRequest:
    plan, _, fate, when = planned
    parameters = request_of(kind, *plan)
    inputs = parameters.pop("inputs")
    if fate in ("raises", "nan"):
        parameters["logits_processor"] = [Broken(inputs.shape[1] + when, fate == "raises")]
    if fate == "bad":
        parameters["max_new_tokens"] = -1
    return BatchRequest(index, inputs, parameters)


def check(request: BatchRequest, plan: Any, expected: list[list[int]] | str, fate: str, happened: Counter[str]) -> None:
    """The text is that of the request alone; after a failure it is the beginning of it."""
    assert request.done, "a request has not ended"
    error = request.error
    if fate == "bad" or isinstance(expected, str):
        assert isinstance(error, (engine.EngineError, caches.CacheError))
        happened["refused"] += 1
        return
    if error is None:
        happened["ended"] += 1
        assert request.result().tokens == expected, (plan, request.result().tokens, expected)
        chunks: dict[int, list[int]] = {}
        for chunk in request.stream():
            chunks.setdefault(chunk.row, []).extend(chunk.tokens)
        assert [chunks.get(row, []) for row in range(len(expected))] == expected
        return
    assert isinstance(error, engine.GenerationInterrupted), error
    assert error.partial.cache is None
    is_planned = {
        "cancelled": isinstance(error, engine.GenerationCancelled),
        "raises": "a processor failed" in str(error),
        "nan": isinstance(error, engine.InvalidLogitsError),
    }
    assert is_planned.get(fate, False) or isinstance(error, engine.OutOfMemoryError), (fate, error)
    happened["failed as planned" if is_planned.get(fate) else "memory was out at last"] += 1
    if plan[1] not in ("beams",):  # whose best text so far may be another one
        for begun, whole in zip(error.partial.tokens, expected, strict=False):
            assert begun == whole[: len(begun)], (plan, fate, error, begun, whole)


def caches_alive() -> int:
    # `isinstance` would ask objects for their class, which some answer with a warning.
    return sum(issubclass(type(one), caches.Cache) for one in gc.get_objects())
