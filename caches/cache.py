"""A cache as transformers' models see it. The only file that speaks transformers' cache protocol.

Our own loop drives it with `begin / settle / abort`. In a foreign loop (`model.generate`, or plain `model(...)`) nobody
calls those: there the first `update` of a step opens it and settles the one before, and what is asked in between is
answered as if that had already happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache as TransformersCache

from caches.errors import StepError
from caches.layer import Layer
from caches.retention import KeepAll, KeepRecent
from caches.spec import LayerSpec, Reach
from caches.store import GrowingStore
from caches.timeline import Timeline


class Driven(Protocol):
    """What the engine's loop asks of a cache, whoever wrote it."""

    name: str

    @property
    def handle(self) -> TransformersCache | None:
        """What the model gets as its cache argument."""

    @property
    def seen(self) -> int:
        """Tokens committed: the loop feeds what comes after them."""

    @property
    def max_tokens(self) -> int | None:
        """Tokens it can hold; None when it has no limit."""

    @property
    def fixed(self) -> bool:
        """Whether its tensors never move, so that a compiled step can use it."""

    @property
    def bytes(self) -> int: ...

    def begin(self, tokens: int, graph: bool = False) -> None: ...

    def settle(self, drop: int = 0) -> None: ...

    def abort(self) -> None: ...

    def rows(self, index: torch.Tensor) -> None: ...

    def reserve(self, tokens: int) -> None: ...

    def reset(self) -> None: ...


class Cache(TransformersCache):
    """Keys and values of a model's layers, kept as its recipe says.

    name: the recipe's name. specs: one per layer. store: how room is made.
    max_tokens: tokens it may hold (fixed stores), or None.
    """

    def __init__(self, name: str, specs: Sequence[LayerSpec], store: type[GrowingStore], max_tokens: int | None = None):
        self.name = name
        self.max_tokens = max_tokens
        self._groups: dict[Reach, tuple[Timeline, list[Layer]]] = {}
        layers = []
        for spec in specs:
            if spec.reach not in self._groups:
                bound = spec.reach.columns
                retention = KeepAll() if bound is None else KeepRecent(bound)
                self._groups[spec.reach] = Timeline(retention, max_tokens), []
            timeline, members = self._groups[spec.reach]
            layers.append(Layer(spec, timeline, store))
            if spec.keeps_kv:
                members.append(layers[-1])
        self._groups = {reach: group for reach, group in self._groups.items() if group[1]}
        self._open = False  # a step was begun and neither settled nor aborted
        self._driven = False  # ... by our loop, which will also close it
        self._written: set[int] = set()  # layers that a foreign loop's open step has reached
        self._required = {i for i, spec in enumerate(specs) if spec.keeps_kv}
        super().__init__(layers=layers)

    # One step is a transaction.

    def begin(self, tokens: int, graph: bool = False) -> None:
        """Make room for `tokens` more columns and decide where they go. When this raises, nothing has changed.

        graph: the forward runs compiled: attention reads whole buffers and needs a mask made with `get_mask_sizes`.
        """
        self._finish_foreign_step()
        placements = [timeline.place(tokens) for timeline, _ in self._groups.values()]
        for (timeline, layers), placement in zip(self._groups.values(), placements, strict=True):
            if placement.room != timeline.room:
                for store in _stores(layers):
                    store.reserve(placement.room)
        for (timeline, layers), placement in zip(self._groups.values(), placements, strict=True):
            if placement.compact:
                for store in _stores(layers):
                    store.compact()
            timeline.begin(tokens, placement, graph)
        self._open = self._driven = True

    def settle(self, drop: int = 0) -> None:
        """Commit the open step without its last `drop` tokens, then forget what is out of reach."""
        if not self._open:
            raise StepError("settle() without begin()")
        for timeline, layers in self._groups.values():
            if not 0 <= drop <= timeline.pending:
                raise StepError(f"settle(drop={drop}), but the open step has {timeline.pending} tokens")
            if timeline.overflow:
                committed = timeline.held + timeline.pending - drop
                for store in _stores(layers):
                    store.settle_overflow(committed, timeline.retention.surviving(committed))
            timeline.settle(drop)
        if self._driven:  # the whole forward ran: layers it did not reach never take part
            self._required = {i for i in self._required if self.layers[i].is_initialized}
        self._close()

    def abort(self) -> None:
        """Forget the open step on every layer, whichever of them it had reached. Without one: nothing to do."""
        if not self._open:
            return
        for timeline, layers in self._groups.values():
            for store in _stores(layers):
                store.abort()
            timeline.abort()
        self._close()

    def _close(self) -> None:
        self._open = self._driven = False
        self._written.clear()

    def rows(self, index: torch.Tensor) -> None:
        """Row i becomes row `index[i]` in everything every layer holds."""
        self._finish_foreign_step()
        for _, layers in self._groups.values():
            for store in _stores(layers):
                store.rows(index)

    def reserve(self, tokens: int) -> None:
        """Say that `tokens` tokens will come in all, so that room for them is made at once."""
        for timeline, _ in self._groups.values():
            timeline.reserve(tokens)

    def reset(self) -> None:
        """Forget everything. Fixed buffers stay where they are."""
        self._close()
        for timeline, layers in self._groups.values():
            timeline.reset()
            for store in _stores(layers):
                store.reset()

    @property
    def handle(self) -> TransformersCache:
        return self

    @property
    def fixed(self) -> bool:
        return self.max_tokens is not None

    @property
    def seen(self) -> int:
        """Tokens committed, per row, pads included."""
        return self._timeline.seen + self._unsettled

    @property
    def bytes(self) -> int:
        """Bytes of all buffers, free columns included."""
        return sum(store.bytes for _, layers in self._groups.values() for store in _stores(layers))

    # Foreign loops.

    @property
    def _timeline(self) -> Timeline:
        return next(iter(self._groups.values()))[0]

    @property
    def _unsettled(self) -> int:
        """Tokens of a foreign loop's step that is complete but not settled yet."""
        complete = self._open and not self._driven and self._written >= self._required
        return self._timeline.pending if complete else 0

    def _finish_foreign_step(self) -> None:
        if not self._open:
            return
        if self._driven:
            raise StepError("a step is open: settle() or abort() it first")
        # A forward that died half-way left some layers one step ahead: as if it had never been.
        self.settle() if self._written >= self._required else self.abort()

    def _open_foreign_step(self, layer_idx: int, tokens: int) -> None:
        if layer_idx in self._written:
            self._finish_foreign_step()
        if not self._open:
            self.begin(tokens)
            self._driven = False
        self._written.add(layer_idx)

    # transformers' protocol.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one layer's keys and values [rows, kv_heads, tokens, head_dim]; returns what attention reads.

        Further arguments (`cache_kwargs` of older releases) are accepted: nothing in them is needed.
        """
        if not self._driven:
            self._open_foreign_step(layer_idx, key_states.shape[-2])
        return self.layers[layer_idx].append(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        """Tokens committed; a tensor while a compiled step is open."""
        timeline = self._timeline
        return timeline.clock if timeline.graph and timeline.clock is not None else self.seen

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        layer = self.layers[layer_idx] if self.layers[layer_idx].spec.keeps_kv else None
        timeline = layer.timeline if layer is not None else self._timeline
        return timeline.mask_sizes(query_length, self._unsettled)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens it can hold, -1 when it has no limit (transformers' convention)."""
        return -1 if self.max_tokens is None else self.max_tokens

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.batch_size > 0:
            self.rows(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.rows(indices)

    def crop(self, tokens: int) -> None:
        """Positive: the new size. Negative: how many of the last tokens to remove. 0 removes nothing."""
        self._finish_foreign_step()
        remove = max(0, self.seen - tokens) if tokens > 0 else -tokens
        timelines = [timeline for timeline, _ in self._groups.values()]
        for timeline in timelines:
            if not timeline.can_forget(remove):
                raise StepError(
                    f"crop({tokens}) of {self.seen} tokens: a sliding layer keeps {timeline.held} of them and the ones "
                    "before are gone. Reset the cache and feed the tokens to keep again."
                )
        for timeline in timelines:
            timeline.forget(remove)

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first step."""
        for layer in self.layers:
            if layer.is_initialized:
                return layer.keys.shape[0]
        return -1

    @property
    def is_compileable(self) -> bool:
        # transformers would compile around our bookkeeping; only our loop knows how to keep that out of the graph.
        return self._driven and self._timeline.graph

    @property
    def is_initialized(self) -> bool:
        return self.batch_size > 0

    @property
    def is_croppable(self) -> bool:
        return all(isinstance(timeline.retention, KeepAll) for timeline, _ in self._groups.values())

    @property
    def is_sliding(self) -> list[bool]:
        return [layer.is_sliding for layer in self.layers]

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self.layers)

    @property
    def is_dummy(self) -> list[bool]:
        return [not layer.spec.keeps_kv for layer in self.layers]

    def __repr__(self) -> str:
        return f"Cache({self.name!r}, layers={len(self.layers)}, seen={self.seen}, bytes={self.bytes})"


def _stores(layers: list[Layer]) -> Iterator[GrowingStore]:
    for layer in layers:
        yield from layer.stores()
