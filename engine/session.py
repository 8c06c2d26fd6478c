"""What each cache was fed, so that a conversation never continues on a cache that belongs to another one."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from engine.errors import InputError

_fed: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()


def remember(cache: Any, ids: torch.Tensor) -> None:
    """Note that `cache` (the object the model gets) holds the keys and values of `ids` [rows, tokens]."""
    _fed[cache] = ids.clone()


def check_prefix(cache: Any, ids: torch.Tensor, seen: int) -> None:
    """Raise `InputError` unless the tokens in `cache` begin the prompt `ids`. A cache we never fed passes."""
    fed = _fed.get(cache)
    if fed is None:
        return
    if fed.shape[0] != ids.shape[0]:
        raise InputError(f"the cache holds {fed.shape[0]} rows, but the prompt has {ids.shape[0]}")
    fed = fed[:, :seen].to(ids.device)
    if fed.shape[1] < seen:
        return  # somebody else fed it further
    different = (fed != ids[:, :seen]).any(dim=0)
    if bool(different.any()):
        first = int(different.nonzero()[0])
        raise InputError(
            f"the cache holds {seen} tokens that do not begin this prompt: they differ from token {first} on. "
            "Give the whole conversation as it was generated, or start with an empty cache"
        )
