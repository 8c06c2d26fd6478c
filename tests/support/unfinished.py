"""A choice of rows that fails half-way, at every moment that memory is asked for."""

from __future__ import annotations

import copy

import torch
from failing_memory import memory
from trial import Trial, with_room

import caches

OUT = (torch.OutOfMemoryError, caches.CapacityError)


def prepared(backend: str, kind: str) -> Trial:
    """Two rows, with room for eight, that have come past the windows."""
    trial = with_room(backend, kind, 8)
    for count in (9, 1, 4):
        trial.step(count)
    return trial


def forked(trial: Trial) -> Trial:
    trial.fork(3)
    trial.step(2)
    return trial


CHOICES = {
    "rows": (lambda trial: trial, lambda trial: trial.select_rows([1, 1, 0])),
    "fork": (lambda trial: trial, lambda trial: trial.fork(3)),
    "rows of forked ones": (forked, lambda trial: trial.select_rows([4, 4, 5, 1, 0, 0])),
    "one of each": (forked, lambda trial: trial.select_rows([5, 1])),
    "unshare": (forked, lambda trial: trial.cache.unshare()),
}


def asked(trial: Trial, operation) -> int:
    """How often memory is asked for."""
    other = copy.deepcopy(trial)
    with memory() as counted:
        operation(other)
    return counted.count


def chosen(trial: Trial, choose) -> Trial:
    """What must be there once it has been done."""
    must = copy.deepcopy(trial)
    choose(must)
    return must


def goes_on(trial: Trial) -> None:
    trial.check()
    for count in (1, 3):
        trial.step(count)
        trial.check()
    trial.select_rows([len(trial.tokens) - 1, 0])
    trial.step(1)
    trial.check()
