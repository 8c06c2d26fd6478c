"""The tensors of a preallocated cache as buffers of a module, for `torch.export`, which cannot look into a cache."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from caches.core.layer import Layer
from caches.errors import StepError
from caches.hf.cache import Cache
from caches.stores.in_place import own_memory

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
        pairs: list[tuple[_Place, torch.Tensor]] = [(slot, self.get_buffer(name)) for name, slot in self._slots.items()]
        for group, timeline in enumerate(self._cache.stack.timelines):
            pairs.append(((vars(timeline), "clock"), seen))
            index = timeline._decode_index
            pairs += [((index, device), write_index[group : group + 1]) for device in index]
        with _exchanged(pairs):
            yield self._cache


@contextmanager
def _exchanged(pairs: Sequence[tuple[_Place, Any]]) -> Iterator[None]:
    """Other values at these places."""
    previous = [kept_in[key] for (kept_in, key), _ in pairs]
    try:
        for (kept_in, key), value in pairs:
            kept_in[key] = value
        yield
    finally:
        for ((kept_in, key), _), value in zip(pairs, previous, strict=True):
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
            tensor = own_memory(store)
            if tensor is not None and tensor.buffer is not None:
                yield f"layer_{index}_{name}", (vars(tensor), "buffer")
        if layer.state is not None:
            for state_type, number in layer.state._states:
                yield f"layer_{index}_{state_type}_{number}", (layer.state._states, (state_type, number))
