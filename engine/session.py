"""Continuing on a cache that is not empty."""

from __future__ import annotations

import torch

from caches import Driven
from engine.errors import InputError


def check_prefix(cache: Driven, ids: torch.Tensor) -> None:
    """Raise `InputError` unless the tokens in `cache` begin the prompt `ids`. Passes when its content is unknown."""
    log, seen = cache.log, cache.seen
    if log is None or log.shape[1] != seen:
        return
    if log.shape[0] != ids.shape[0]:
        raise InputError(f"the cache holds {log.shape[0]} rows, but the prompt has {ids.shape[0]}")
    different = (log.to(ids.device) != ids[:, :seen]).any(dim=0)
    if bool(different.any()):
        first = int(different.nonzero()[0])
        raise InputError(
            f"the cache holds {seen} tokens that do not begin this prompt: they differ from token {first} on. "
            "Give the whole conversation as it was generated, or start with an empty cache"
        )
