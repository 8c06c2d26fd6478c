"""Continuing on a cache that is not empty: what is in it has to begin the prompt, pads included."""

from __future__ import annotations

import torch

from caches import Driven
from engine.encoder import source_of
from engine.errors import InputError
from engine.inputs import Prompt


def known_mask(cache: Driven | None, ids: torch.Tensor) -> torch.Tensor:
    """The mask [rows, n] of the first columns of `ids` that the cache's log also begins with; n may be 0."""
    log = None if cache is None else cache.log
    if log is None or log.ids.shape[0] != ids.shape[0]:
        return ids[:, :0]
    columns = min(log.ids.shape[1], ids.shape[1])
    same = (log.ids[:, :columns].to(ids.device) == ids[:, :columns]).all(dim=0)
    agreed = int(same.long().cumprod(dim=0).sum())
    return log.mask[:, :agreed].to(ids.device)


def check_continues(cache: Driven, prompt: Prompt, mask: torch.Tensor, before: int) -> None:
    """Raise `InputError` unless what is in `cache` begins the prompt; an unknown content passes.

    prompt: what comes after the first `before` columns; mask: of all columns.
    """
    ids = prompt.ids
    log, seen = cache.log, cache.seen
    if cache.batch_size not in (-1, ids.shape[0]):
        raise InputError(f"the cache holds {cache.batch_size} rows, but the prompt has {ids.shape[0]}")
    if cache.max_rows is not None and len(ids) > cache.max_rows:
        raise InputError(f"the cache has room for {cache.max_rows} rows, but the prompt has {len(ids)}")
    if seen == 0:
        return
    ended = (mask[:, 1:seen] < mask[:, : seen - 1]).any(dim=1).nonzero().flatten().tolist()
    if ended and _remembers_pads(cache):
        raise InputError(
            f"row {ended[0]} of the cache ended early and was filled up with pads, which take places in the model's "
            "sliding window or went into its state: go on with that row alone, from its own tokens"
        )
    if log is None or log.ids.shape[1] < seen or prompt.unnamed > 0:
        return
    source = source_of(prompt.extras)
    if source is not None and log.source is not None and not torch.equal(source, log.source.to(source.device)):
        raise InputError(
            "the cache holds what the decoder kept of another source: give the same one again, or start with an empty "
            "cache"
        )
    known = log.first(seen)
    given = ids[:, : seen - before]
    different = (known.ids[:, before:].to(ids.device) != given).any(dim=0)
    if bool(different.any()):
        first = before + int(different.nonzero()[0])
        raise InputError(
            f"the cache holds {seen} tokens that do not begin this prompt: they differ from token {first} on. "
            "Give the whole conversation as it was generated, or start with an empty cache"
        )
    if not torch.equal(known.mask.to(mask.device), mask[:, :seen]):
        raise InputError(
            f"attention_mask says something else about the {seen} tokens in the cache than when they were read or "
            "generated (rows that ended early were filled up with pads): leave it out, and it is remembered"
        )


def _remembers_pads(cache: Driven) -> bool:
    """Whether pads after a row's end leave something behind that no mask can hide."""
    kinds = (getattr(cache.handle, name, ()) for name in ("is_sliding", "is_linear"))
    if getattr(cache.handle, "imposes_windows", False):
        return True
    return any(any(kind) for kind in kinds) or any(spec.keeps_state for spec in getattr(cache.handle, "specs", ()))
