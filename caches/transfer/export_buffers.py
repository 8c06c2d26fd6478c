"""The tensors of a preallocated cache as buffers of a module, for `torch.export`, which cannot look into a cache."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from caches.core.layer import Layer
from caches.errors import StepError
from caches.hf.cache import Cache
from caches.stores.dense import FixedStore

_Place: TypeAlias = tuple[MutableMapping[Any, Any], Any]  # where a tensor is kept: in which mapping, under which key


class Buffers(torch.nn.Module):
    """Keys, values and states of `cache`: its own tensors, not copies, as "layer_0_keys", "layer_3_conv_0", ..."""

    def __init__(self, cache: Cache):
        if cache.why_not_compiled is not None or cache.total_tokens == 0:
            raise StepError(
                f"the tensors of this {cache.name} cache are not there to stay: it needs a fixed cache that has read a "
                "prompt, such as cache='static' after its first step"
            )
        super().__init__()
        self._cache = cache
        self._slots = dict(_slots(cache))
        for name, (kept_in, key) in self._slots.items():
            self.register_buffer(name, kept_in[key])

    @contextmanager
    def in_use(self, write_index: torch.Tensor, seen: torch.Tensor) -> Iterator[Cache]:
        """The cache, on what the buffers and these arguments are now: while a step is traced, no real tensors.

        See `places` for the arguments.
        """
        given: list[tuple[_Place, torch.Tensor]] = [(slot, self.get_buffer(name)) for name, slot in self._slots.items()]
        for group, timeline in enumerate(self._cache.stack.timelines):
            given.append(((vars(timeline), "clock"), seen))
            index = timeline._decode_index
            given += [((index, device), write_index[group : group + 1]) for device in index]
        with _exchanged(given):
            yield self._cache


class LayerBuffers:
    """The tensors of one layer of a preallocated cache, for compiled code of that layer alone.

    Raises `StepError` for a layer that keeps anything but keys and values in tensors that stay.
    """

    def __init__(self, cache: Cache, index: int):
        layer = cache.stack.layers[index]
        stores = list(layer.stores.values()) if isinstance(layer, Layer) and layer.state is None else []
        if not stores or not all(isinstance(store, FixedStore) and store.buffer is not None for store in stores):
            raise StepError(f"layer {index} of this {cache.name} cache keeps more than keys and values of fixed size")
        self._stores: list[FixedStore] = stores  # type: ignore[assignment]
        self.timeline = stores[0].timeline

    @property
    def slots(self) -> int | None:
        """The slots that attention reads in the open step, where the number changes from step to step."""
        return None if self.timeline.retention.bound is not None else self.timeline.graph_slots

    def tensors(self, rows: int) -> list[torch.Tensor]:
        """What a step of `rows` rows takes: each store [rows, heads, slots, head_dim], then the slot that it writes
        [1] and the number of tokens before []."""
        buffers = [store.buffer for store in self._stores if store.buffer is not None]
        write_index = self.timeline.write_index(buffers[0].device)  # makes the clock of a timeline that has none yet
        clock = self.timeline.clock
        assert clock is not None
        return [*(buffer if buffer.shape[0] == rows else buffer[:rows] for buffer in buffers), write_index, clock]

    @contextmanager
    def in_use(self, tensors: Sequence[torch.Tensor], slots: int | None) -> Iterator[None]:
        """The open step reads and writes these tensors, see `tensors`, in place of the layer's own."""
        *buffers, write_index, clock = tensors
        place = vars(self.timeline)
        given: list[tuple[_Place, Any]] = [((vars(store), "buffer"), buffer)
                                           for store, buffer in zip(self._stores, buffers, strict=True)]  # fmt: skip
        rows = buffers[0].shape[0]
        given += [((place, "clock"), clock), ((place, "rows"), rows), ((place, "max_rows"), rows)]
        given += [((self.timeline._step_index, device), write_index) for device in self.timeline._step_index]
        if slots is not None:
            given.append(((place, "graph_slots"), slots))
        with _exchanged(given):
            yield


@contextmanager
def _exchanged(given: Sequence[tuple[_Place, Any]]) -> Iterator[None]:
    """Other values at these places."""
    kept = [kept_in[key] for (kept_in, key), _ in given]
    try:
        for (kept_in, key), value in given:
            kept_in[key] = value
        yield
    finally:
        for ((kept_in, key), _), value in zip(given, kept, strict=True):
            kept_in[key] = value


def places(cache: Cache) -> dict[str, torch.Tensor]:
    """Where the open step writes: write_index [groups], the slot in each group of layers; seen [], tokens before."""
    device = next(tensor.device for layer in cache.layers for tensor in layer.tensors())
    slots = [timeline.end for timeline in cache.stack.timelines]
    return {"write_index": torch.tensor(slots, device=device), "seen": torch.tensor(cache.total_tokens, device=device)}


def _slots(cache: Cache) -> Iterator[tuple[str, _Place]]:
    for index, layer in enumerate(cache.layers):
        assert isinstance(layer, Layer)  # others keep nothing that never moves
        for name, store in layer.stores.items():
            if isinstance(store, FixedStore) and store.buffer is not None:
                yield f"layer_{index}_{name}", (vars(store), "buffer")
        if layer.state is not None:
            for kind, number in layer.state._states:
                yield f"layer_{index}_{kind}_{number}", (layer.state._states, (kind, number))
