"""What a recipe decides about a cache, as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from caches.core.step_hook import StepHook
from caches.layers.layer_spec import LayerSpec
from caches.memory.expected_device import ExpectedDevice
from caches.stores.slot import StoreFactory
from caches.timeline.retention import KeepAll, KeepRecent, Retention
from caches.timeline.timeline import Timeline
from configs import CacheConfig

MOVES = "a graph needs static addresses, and here tensors move as room is made"
QUANTIZES = "a graph has no branches, and here each step decides how many blocks it quantizes"


class TimelineFactory(Protocol):
    """Makes the timeline of a group of layers. See `Timeline` for the arguments."""

    def __call__(
        self, retention: Retention, max_tokens: int | None, max_rows: int | None, *, all_room: bool
    ) -> Timeline: ...


def needed_by_attention(spec: LayerSpec) -> Retention:
    """Keep exactly the tokens that the layer may still attend to."""
    return KeepAll() if spec.attention_span.past_tokens is None else KeepRecent(spec.attention_span.past_tokens)


@dataclass(frozen=True)
class CacheLayout:
    """The parts that a cache is made of.

    name: the recipe's. specs: one per layer; None adds a layer of full attention whenever one is first used.
    make_store: makes the store of each tensor of a layer. config: the recipe's options. max_rows, max_tokens: what the
    cache has room for, None without limit (a preallocated one: the rows of its first step). preallocated: buffers are
    made once and never move. retention: which tokens a layer keeps. compile_blocker: why a compiled step cannot use the
    cache, None where it can; by default because buffers move, unless they are preallocated. make_hook: makes what is
    done around every step, see `StepHook`. expected: device and data type that keys and values have to come in, where
    the options name them.
    """

    name: str
    specs: Sequence[LayerSpec] | None
    make_store: StoreFactory
    config: CacheConfig | None = None
    max_rows: int | None = None
    max_tokens: int | None = None
    preallocated: bool = False
    retention: Callable[[LayerSpec], Retention] = needed_by_attention
    make_timeline: TimelineFactory = Timeline
    compile_blocker: str | None = MOVES
    make_hook: Callable[[], StepHook] = StepHook
    expected: ExpectedDevice | None = None

    def __post_init__(self) -> None:
        if self.preallocated and self.compile_blocker == MOVES:
            object.__setattr__(self, "compile_blocker", None)
