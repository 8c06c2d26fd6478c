"""Random operations on a cache, each compared with the oracle."""

from __future__ import annotations

import copy
import random

import torch
from contract import SIZE
from trial import refused

import caches

OPERATIONS = [
    *("step", "step", "step", "step", "drop", "abort", "rows", "crop"),
    *("feed", "died", "copy", "join", "graph", "reset", "reserve", "fork", "fork", "rows_per_prefix", "whole"),
]


def walk(trial, seed, operations=30):
    """Random operations, each compared with the oracle; yields what was done."""
    draw = random.Random(seed)
    rows = len(trial.tokens)
    for _ in range(operations):
        operation = draw.choice(OPERATIONS)
        count = draw.choice([1, 1, 1, 2, 3, 5, 12, 30])
        yield operation, count
        if trial.limit is not None and trial.total_tokens + count > trial.limit:
            refused(trial, trial.step, count, error=caches.CapacityError, match="cannot take")
            operation = "reset"
        if operation == "step":
            trial.step(count)
        elif operation == "drop":
            rejected = draw.randint(0, count)
            trial.step(count, rejected if trial.can_reject(rejected, count) else draw.choice([0, count]))
        elif operation == "abort":
            trial.cache.begin(count)
            trial.forward(trial.fresh(count), range(draw.randint(0, len(trial.kind.specs))))
            trial.cache.abort()
            trial.last_step = 0
        elif operation == "rows" and trial.total_tokens:
            most = trial.room_for_rows or 4
            trial.select_rows([draw.randrange(len(trial.tokens)) for _ in range(draw.randint(1, most))])
        elif operation == "fork" and trial.total_tokens:
            most = trial.room_for_rows or 12
            trial.fork(draw.randint(1, max(1, most // len(trial.tokens))))
        elif operation == "rows_per_prefix" and trial.total_tokens:  # rows change places with those beside them
            count = draw.choice([size for size in (1, 2, 3, 4) if len(trial.tokens) % size == 0])
            trial.select_rows([row - row % count + draw.randrange(count) for row in range(len(trial.tokens))])
        elif operation == "whole" and (trial.limit is None or trial.total_tokens < trial.limit):
            trial.step_whole(1)
        elif operation == "crop" and trial.total_tokens:
            removed = draw.choice([0, 1, trial.last_step, draw.randint(0, trial.total_tokens), trial.total_tokens + 1])
            possible = trial.can_crop(removed)
            try:
                trial.crop(-removed)
            except caches.StepError:
                assert not possible
            else:
                assert possible is not False
        elif operation in ("feed", "died"):
            count = 1 if trial.narrow is not None else count
            if operation == "feed":
                trial.feed(count)
            else:
                reached = draw.randint(0, trial.last_layer)
                trial.forward(trial.fresh(count), range(reached))
                trial.cache.crop(0)
                trial.last_step = 0 if reached else trial.last_step
        elif operation == "copy":
            trial = copy.deepcopy(trial)
        elif operation == "join" and trial.total_tokens:
            index = [draw.randrange(len(trial.tokens)) for _ in range(draw.randint(2, 4))]
            parts = [caches.select_rows(trial.cache, torch.tensor(part)) for part in (index[:1], index[1:])]
            trial = trial.holding(caches.join_rows(parts), index)
        elif operation == "graph" and trial.cache.why_not_compiled is None:
            trial.step(1, draw.randint(0, 1), graph=True)
        elif operation == "reset" and trial.total_tokens and draw.random() < 0.5:
            trial.cache.reset()
            trial.forget(draw.randint(1, min(rows, trial.room_for_rows or rows)))
        elif operation == "reserve":
            trial.cache.reserve(draw.randint(1, SIZE))
        trial.check()
