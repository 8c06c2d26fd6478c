"""`SessionOptions`: what a run asks of the session of its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from caches.layers.read_by import ReadBy
from engine.decoding.pauses import Pause
from engine.parallel.ranks import OneProcess


@dataclass(frozen=True)
class SessionOptions:
    """chunk_tokens: see `ForwardOptions`. check: called before every forward; it raises to stop the run. recover:
    called with the session and the error, without its frames, when memory is out; it makes room or raises, and the
    session repeats the step. ranks: those that run the same session.

    shares_prefixes: whether rows that come from one row share it in the cache, which compiled steps cannot read.
    rolls_back: whether the flow rolls back tokens. make_room: called with the session and the number of tokens that are
    about to be fed. pauses: in the order of their columns; a prompt whose last hidden states or logits are all wanted
    is read without them, and so is one whose keys depend on how much is read at once. compiled: see `ForwardOptions`.
    read_by: the model as it was when the call began; None for a draft, whose caches end with the run.
    """

    chunk_tokens: int | None
    check: Callable[[], None]
    recover: Callable[[Any, BaseException], None]
    ranks: OneProcess
    shares_prefixes: bool = False
    rolls_back: bool = False
    make_room: Callable[[Any, int], None] | None = None
    pauses: Sequence[Pause] = ()
    compiled: bool = True
    read_by: ReadBy | None = None
