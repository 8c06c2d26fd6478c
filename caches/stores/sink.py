"""Sinks, a row's first tokens (StreamingLLM), laid over a store whose window has moved past them.

The window itself is that of `KeepRecent`. Once a row has evicted tokens, copies of its sinks take the first slots kept:
before a step of one token they are written there, or into what the store decodes; in longer steps they are put in
front. The keys of a copy are rotated, from their originals, to where the window begins. Nothing else ever moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from caches.attention.kv_view import KeyValueView, plain, rows_of
from caches.attention.rotation import RotatedSegment, rotated
from caches.attention.segments import CacheRows, DenseSegment, Segment
from caches.errors import StepError
from caches.layers.rope import RopeRotation
from caches.platform.as_tensor import as_tensor
from caches.platform.torch_api import always_writable
from caches.stores.dense import FixedStore, GrowingStore
from caches.stores.store import Store
from caches.timeline.retention import KeepSinks
from caches.timeline.timeline import Timeline


class LeftPadding:
    """How many padding tokens every row begins with; none until they are set.

    least, most: bounds, which can be read without waiting for the device.
    """

    def __init__(self) -> None:
        self.least = self.most = 0
        self._counts: torch.Tensor | None = None

    def take(self, counts: torch.Tensor | Sequence[int] | None) -> None:
        """Set the padding of every row; None: there is none."""
        self._counts = None if counts is None else as_tensor(counts).long()
        values = [0] if self._counts is None else self._counts.tolist()
        self.least, self.most = min(values), max(values)

    def select_rows(self, index: torch.Tensor) -> None:
        self._counts = None if self._counts is None else self._counts[index.to(self._counts.device)]

    def check(self, rows: int) -> None:
        if self._counts is not None and len(self._counts) != rows:
            raise StepError(
                f"padding was set for {len(self._counts)} rows, but the step has {rows}: give one count for each row"
            )

    def of(self, rows: int, device: torch.device) -> torch.Tensor:
        """LongTensor [rows]."""
        if self._counts is None:
            return torch.zeros(rows, dtype=torch.long, device=device)
        self._counts = self._counts.to(device)
        return self._counts


class Sinks:
    """The first tokens of every row in one tensor of one layer, and how far they are from where they have to be.

    rotation: how their keys are rotated to get there; None where that is not known.
    """

    def __init__(self, timeline: Timeline, padding: LeftPadding, rotation: RopeRotation | None):
        assert isinstance(timeline.retention, KeepSinks)
        self.timeline, self.padding, self.rotation = timeline, padding, rotation
        self.count, self._window = timeline.retention.sinks, timeline.retention.size + 1
        self._originals: torch.Tensor | None = None  # [rows or more, heads, count, head_dim]

    @property
    def originals(self) -> torch.Tensor:
        """As they were fed: [rows, heads, count, head_dim]."""
        assert self._originals is not None
        return self._originals[: self.timeline.rows]

    def are_left_behind(self, tokens: int) -> bool:
        """Whether one of the next `tokens` can no longer see all of its row."""
        return self.count > 0 and self.timeline.total_tokens + tokens - self._window > self.padding.least

    def delta(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Tokens of its row that each of the next `tokens` can no longer attend to: LongTensor [rows, tokens]."""
        assert self.timeline.rows is not None
        first_token = self.timeline.total_tokens + 1 - self._window
        evicted = torch.arange(first_token, first_token + tokens, device=device)
        return (evicted - self.padding.of(self.timeline.rows, device)[:, None]).clamp(min=0)

    def rotated(self, tokens: int) -> torch.Tensor:
        """The sinks as each of the next `tokens` has to see them: [rows, heads, tokens * count, head_dim]."""
        if self.rotation is None:
            raise StepError(
                "the window is full, so the keys of the first tokens have to be rotated now, and this sink cache does "
                "not know how the model rotates keys: build it with config=model.config"
            )
        return self.rotation.rotated(self.originals, self.delta(tokens, self.originals.device))

    def is_behind(self, device: torch.device) -> torch.Tensor:
        """Whether the next token can no longer see all of its row: bool [rows, 1, 1, 1]."""
        return self.delta(1, device)[:, :, None, None] > 0

    def may_follow(self, begin: int) -> bool:
        """Whether some of them may come after `begin` tokens of a text."""
        return self.count > 0 and begin < self.padding.most + self.count

    def note(self, added: torch.Tensor, begin: int) -> None:
        """Keep the sinks among `added` [rows, heads, tokens, width], which come after `begin` tokens of a text."""
        if self.count == 0:
            return
        self.make_room(added)
        if not self.may_follow(begin):
            return
        rows, heads, tokens, width = added.shape
        places = self.padding.of(rows, added.device)[:, None] - begin
        places = places + torch.arange(self.count, device=added.device)
        is_sink = ((places >= 0) & (places < tokens))[:, None, :, None]
        places = places.clamp(0, tokens - 1)[:, None, :, None].expand(-1, heads, -1, width)
        self.originals.copy_(torch.where(is_sink, added.gather(2, places), self.originals))

    def make_room(self, like: torch.Tensor) -> None:
        """Memory for the originals of as many rows as `like` [rows, heads, tokens, width] has, or may get."""
        rows, heads, _, width = like.shape
        if self._originals is None or len(self._originals) < rows:
            with always_writable():
                self._originals = like.new_zeros((self.timeline.max_rows or rows, heads, self.count, width))

    def replace(self, originals: torch.Tensor | None, in_place: bool) -> None:
        """Have other originals. in_place: their memory has room for all rows and does not move."""
        if in_place and originals is not None and self._originals is not None:
            self._originals[: len(originals)] = originals
        else:
            self._originals = originals

    def tensors(self) -> Iterator[torch.Tensor]:
        return iter(() if self._originals is None else (self._originals,))

    @property
    def are_shown(self) -> bool:
        """Whether a row has evicted tokens, so that its sinks are in the first slots kept, or belong there."""
        return self.count > 0 and self.timeline.evicted_tokens > self.padding.least

    def have_evicted(self, device: torch.device) -> torch.Tensor:
        """Which rows have: bool [rows, 1, 1, 1]."""
        assert self.timeline.rows is not None
        return (self.padding.of(self.timeline.rows, device) < self.timeline.evicted_tokens)[:, None, None, None]


class SinkStore:
    """A store with sinks laid over it. See `Store`.

    tensor: the store itself where it shows its own memory, into which the copies are written; None where it shows
    copies or segments, which get them after each step.
    """

    def __init__(self, store: Store, sinks: Sinks):
        self.store, self.sinks, self.timeline = store, sinks, sinks.timeline
        self.tensor = store if isinstance(store, GrowingStore) else None
        self._is_fixed = isinstance(store, FixedStore)  # its memory has room for all rows, and does not move
        self.is_quantized, self.storage_format = store.is_quantized, ("sinks", store.storage_format)
        # What a step does to the window.
        self.read, self.reserve, self.compact = store.read, store.reserve, store.compact
        self.commit, self.abort = store.commit, store.abort
        self.offloaded_buffers = store.offloaded_buffers

    def append(self, new: torch.Tensor) -> torch.Tensor:
        sinks, tokens = self.sinks, self.timeline.pending
        sinks.padding.check(new.shape[0])
        visible = self.store.append(new)
        if self.timeline.graph:  # see `note_compiled`
            return visible
        sinks.note(new, self.timeline.total_tokens)
        if not sinks.are_left_behind(tokens):
            return visible
        if tokens > 1:
            return torch.cat([sinks.rotated(tokens), visible], dim=-2)
        return visible if self.tensor is not None else self._with_front(visible)

    def add(self, new: torch.Tensor) -> None:
        self.append(new)

    def front(self) -> torch.Tensor | None:
        """The first slots kept, as the next token has to read them; None where they can stay. Changes nothing."""
        sinks = self.sinks
        if self.tensor is None or not sinks.are_left_behind(1):
            return None
        stored = self.tensor.memory(self.timeline.start, sinks.count)
        return torch.where(sinks.is_behind(stored.device), sinks.rotated(1), stored)

    def write_front(self, front: torch.Tensor) -> None:
        assert self.tensor is not None
        self.tensor.memory(self.timeline.start, self.sinks.count)[:] = front
        self.timeline.rewritten = self.timeline.evicted_tokens

    def _with_front(self, visible: torch.Tensor) -> torch.Tensor:
        rotated, behind = self.sinks.rotated(1), self.sinks.is_behind(visible.device)
        if isinstance(visible, KeyValueView):
            rows = rows_of(visible)
            fronted = CacheRows(rows.shape, make_segments=lambda: _fronted(rows.segments(), rotated, behind))
            return KeyValueView([fronted], visible)
        front = visible[:, :, : self.sinks.count]
        front.copy_(torch.where(behind, rotated, front))
        return visible

    def note_compiled(self) -> None:
        """After a compiled step, before its commit: keep the sinks among the tokens that it wrote."""
        timeline = self.timeline
        if timeline.graph and self.tensor is not None and self.sinks.may_follow(timeline.total_tokens):
            self.sinks.note(self.tensor.memory(timeline.end, timeline.pending), timeline.total_tokens)

    def note_again(self) -> None:
        """After the padding was set: keep the sinks among the kept tokens, of which none were evicted."""
        committed = self.store.committed()
        if committed is not None and committed.shape[2]:
            self.sinks.note(plain(committed), 0)

    def committed(self) -> torch.Tensor | None:
        """As they were fed: copies are of use to one step only."""
        committed, sinks = self.store.committed(), self.sinks
        if committed is None or self.timeline.graph or not sinks.are_shown:
            return committed
        committed = committed if self.tensor is None else committed.clone()
        front = committed[:, :, : sinks.count]
        front.copy_(torch.where(sinks.have_evicted(front.device), sinks.originals, front))
        return committed

    def load_dense(self, dense: torch.Tensor) -> None:
        sinks = self.sinks
        self.store.load_dense(dense)
        sinks.note(dense, self.timeline.evicted_tokens)
        if sinks.are_shown:
            front = torch.where(sinks.have_evicted(dense.device), dense[:, :, : sinks.count], sinks.originals)
            sinks.originals.copy_(front)

    def state_dict(self) -> dict[str, Any]:
        state = self.store.state_dict()
        return state | ({"sinks": self.sinks.originals} if state and self.sinks.count else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.store.load_state_dict({name: tensor for name, tensor in state.items() if name != "sinks"})
        if "sinks" in state:
            self.sinks.make_room(state["sinks"])
            self.sinks.originals.copy_(state["sinks"])

    def select_rows(self, index: torch.Tensor) -> None:
        chosen = [tensor.index_select(0, index.to(tensor.device)) for tensor in self.sinks.tensors()]
        self.store.select_rows(index)
        for originals in chosen:
            self.sinks.replace(originals, in_place=self._is_fixed)

    def reset(self) -> None:
        self.store.reset()
        if not self._is_fixed:
            self.sinks.replace(None, in_place=False)

    def release(self) -> None:
        self.store.release()
        self.sinks.replace(None, in_place=False)

    def tensors(self) -> Iterator[torch.Tensor]:
        return chain(self.store.tensors(), self.sinks.tensors())


def _fronted(segments: Iterable[Segment], front: torch.Tensor, behind: torch.Tensor) -> Iterator[Segment]:
    """The segments, with `front` first in the rows that are behind."""
    begin = 0
    for segment in segments:
        replaced = front[:, :, begin : begin + segment.slots]
        begin += segment.slots
        if replaced.shape[2] and isinstance(segment, RotatedSegment):  # rotating the few is cheaper than the segment
            yield from map(RotatedSegment, _fronted([segment.segment], rotated(replaced), behind))
            continue
        if replaced.shape[2]:
            values, count = segment.materialize(), replaced.shape[2]
            yield DenseSegment(torch.where(behind, replaced, values[:, :, :count]))
            segment = DenseSegment(values[:, :, count:])
        yield segment
