"""One layer of a cache: the components its spec names, each in stores, and its states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import torch

from caches.attention.kv_view import plain
from caches.attention.segments import OpenRows
from caches.core.classic_layer import ClassicLayer
from caches.core.wrapped_layer import WrappedLayer
from caches.errors import UnsupportedLayerError
from caches.layers.layer_spec import INDEX, KV, STATE, LayerSpec
from caches.memory.buffers import Buffer
from caches.memory.scratch import Scratch
from caches.stores.in_place import open_slots
from caches.stores.recurrent_state import CONV, RECURRENT, RecurrentState
from caches.stores.shared_prefix import ForkedStore
from caches.stores.slot import Slot, StoreFactory
from caches.stores.store import Store
from caches.timeline.timeline import Timeline

TensorHolder: TypeAlias = Store | RecurrentState | WrappedLayer  # what is moved as one to another cache
_STORES_OF = {KV: ("keys", "values"), INDEX: ("index",)}


class RowHolder(Protocol):
    """Something that keeps rows of its own."""

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes a copy of row `index[i]`. When this raises, nothing has changed."""


class Layer(ClassicLayer):
    """Keys and values of one layer, the keys of its index, its states, or nothing. Its group shares `timeline`.

    make_store: makes the store of each tensor. preallocated: its states never move.
    """

    def __init__(
        self, spec: LayerSpec, timeline: Timeline, scratch: Scratch, make_store: StoreFactory, preallocated: bool
    ):
        self.spec = spec
        self.is_sliding = spec.attention_span.size is not None
        self.timeline = timeline
        names = [name for component, names in _STORES_OF.items() if component in spec.components for name in names]
        self.stores: dict[str, Store] = {name: make_store(Slot(spec, name, timeline, scratch)) for name in names}
        self.state = RecurrentState(timeline, preallocated) if STATE in spec.components else None
        self._is_reached = False  # by the open step

    def follow(self, timeline: Timeline, stores: dict[str, Store]) -> None:
        """Use these stores, and this timeline, from here on."""
        self.timeline, self.stores = timeline, stores
        if self.state is not None:
            self.state.timeline = timeline

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one step's keys and values [rows, kv_heads, tokens, head_dim]; returns what attention reads."""
        if keys.shape[-2] != self.timeline.pending:
            raise UnsupportedLayerError(
                f"a {self.spec.layer_type} layer wrote {keys.shape[-2]} tokens in a step of {self.timeline.pending} "
                "tokens: this model keeps more than the tokens it is fed. Use cache='none'"
            )
        self._is_reached = True
        return self.stores["keys"].append(keys), self.stores["values"].append(values)

    def open_slots(self) -> OpenRows | None:
        """Of its keys and values."""
        return open_slots(self.stores["keys"], self.stores["values"])

    def append_index(self, keys: torch.Tensor) -> torch.Tensor:
        """Add one step's index keys [rows, tokens, index_dim]; returns all that are kept."""
        return self.stores["index"].append(keys[:, None])[:, 0]

    def reserve(self, room: int) -> None:
        for store in self.stores.values():
            store.reserve(room)

    def compact(self) -> None:
        for store in self.stores.values():
            store.compact()

    def commit(self, rejected: int) -> None:
        self._is_reached = False
        for store in self.stores.values():
            store.commit(rejected)
        if self.state is not None:
            self.state.commit(rejected)

    def abort(self) -> None:
        self._is_reached = False
        for holder in self.holders():
            holder.abort()

    def reset(self) -> None:
        self._is_reached = False
        for holder in self.holders():
            holder.reset()

    def release(self) -> None:
        """Reset, and free all memory."""
        for holder in self.holders():
            holder.release()

    def mask_sizes(self, tokens: int, uncommitted: int = 0) -> tuple[int, int | torch.Tensor]:
        """See `Timeline.mask_sizes`."""
        return self.timeline.mask_sizes(tokens, uncommitted)

    def dense_state(self) -> dict[str, torch.Tensor]:
        """What is committed, by name: [rows, heads, tokens, width] of the stores, states [rows, ...]."""
        stores = {name: store.committed() for name, store in self.stores.items()}
        states = {} if self.state is None else self.state.dense_state()
        return {name: tensor for name, tensor in stores.items() if tensor is not None} | states

    def load_dense(self, content: dict[str, torch.Tensor]) -> None:
        """Hold exactly this content, to which the timeline is set already."""
        for name, store in self.stores.items():
            if name in content:
                store.load_dense(plain(content[name]))
        self._load_states(content)

    def state_dict(self) -> dict[str, Any]:
        """What is committed as it is encoded, for a layer of the same kind: a dict of each store, states."""
        stores = {name: store.state_dict() for name, store in self.stores.items()}
        states = {} if self.state is None else self.state.dense_state()
        return {name: state for name, state in stores.items() if state} | states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold exactly this, to which the timeline is set already."""
        for name, store in self.stores.items():
            if name in state:
                store.load_state_dict(state[name])
        self._load_states(state)

    def _load_states(self, content: dict[str, Any]) -> None:
        if self.state is not None:
            states = {name: state for name, state in content.items() if name.split()[0] in (CONV, RECURRENT)}
            self.state.load_dense(states)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors that the layer keeps."""
        for holder in self.holders():
            yield from holder.tensors()

    def offloaded_buffers(self) -> Iterator[Buffer]:
        """Buffers that are not on the device that computes."""
        for store in self.stores.values():
            yield from store.offloaded_buffers()

    @property
    def growing_bytes(self) -> int:
        """Bytes, on the device that computes, of buffers that grow with the timeline's room."""
        stores = [store.suffix if isinstance(store, ForkedStore) else store for store in self.stores.values()]
        away = sum(buffer.bytes for store in stores for buffer in store.offloaded_buffers() if buffer.is_off_device)
        return sum(tensor.nbytes for store in stores for tensor in store.tensors()) - away

    def holders(self) -> Iterator[Store | RecurrentState]:
        """Its stores and its states."""
        yield from self.stores.values()
        if self.state is not None:
            yield self.state

    def row_holders(self) -> Iterator[TensorHolder]:
        """Stores and states that keep rows of their own: of a store whose rows share a prefix its two parts."""
        for holder in self.holders():
            if isinstance(holder, ForkedStore):
                yield from holder.row_holders
            else:
                yield holder

    def remove_suffix(self, prefix: Timeline) -> None:
        """Where rows shared a prefix: keep what is in the prefix alone, whose timeline is given."""
        stores = {}
        for name, store in self.stores.items():
            if isinstance(store, ForkedStore):
                store.suffix.reset()
                store = store.prefix
            stores[name] = store
        self.follow(prefix, stores)

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are kept in fewer bits than they come in."""
        return any(store.is_quantized for store in self.stores.values())

    def __repr__(self) -> str:
        return f"Layer({self.spec.layer_type}, kept_tokens={self.timeline.kept_tokens})"
