"""One layer of a cache: the streams its spec names, each in a store, and its states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from caches.attention.segmented_tensor import plain
from caches.errors import UnsupportedLayerError
from caches.memory.buffers import Buffer
from caches.memory.scratch import Scratch
from caches.spec.layer_spec import INDEX, KV, STATE, LayerSpec
from caches.stores.dense import Store
from caches.stores.recurrent_state import CONV, RECURRENT, RecurrentState
from caches.timeline.timeline import Timeline

if TYPE_CHECKING:
    from caches.core.sink_hook import Sinks

_STORES_OF_STREAM = {KV: ("keys", "values"), INDEX: ("index",)}


@dataclass(frozen=True)
class Slot:
    """What a store is for: the tensor `name` ("keys", "values", "index") of a layer.

    timeline: its group's. scratch: what all layers of the cache take turns in. sinks: first tokens that have to stay.
    """

    spec: LayerSpec
    name: str
    timeline: Timeline
    scratch: Scratch
    sinks: Sinks | None = None


StoreFactory = Callable[[Slot], Store]


class Layer:
    """Keys and values of one layer, the keys of its index, its states, or nothing. Its group shares `timeline`.

    new_store: makes the store of each stream. fixed: whether its tensors never move.
    """

    supports_early_init = False  # transformers asks: shapes are learned from the first step
    record_past = False  # models of transformers 5.17 ask the layer: see `LegacyNames.is_recording_past`

    def __init__(self, spec: LayerSpec, timeline: Timeline, scratch: Scratch, new_store: StoreFactory, fixed: bool):
        self.spec = spec
        self.timeline = timeline
        names = [name for stream, names in _STORES_OF_STREAM.items() if stream in spec.components for name in names]
        self.stores: dict[str, Store] = {name: new_store(Slot(spec, name, timeline, scratch)) for name in names}
        self.state = RecurrentState(timeline, fixed) if STATE in spec.components else None

    def follow(self, timeline: Timeline, stores: dict[str, Store]) -> None:
        """Keep what it has in these stores from here on, in step with another clock."""
        self.timeline, self.stores = timeline, stores
        if self.state is not None:
            self.state.timeline = timeline

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one step's keys and values [rows, kv_heads, tokens, head_dim]; returns what attention reads."""
        if keys.shape[-2] != self.timeline.pending:
            raise UnsupportedLayerError(
                f"a {self.spec.layer_type} layer wrote {keys.shape[-2]} columns in a step of {self.timeline.pending} "
                "tokens: this model keeps more than the tokens it is fed. Use cache='none'"
            )
        return self.stores["keys"].append(keys), self.stores["values"].append(values)

    def append_index(self, keys: torch.Tensor) -> torch.Tensor:
        """Add one step's index keys [rows, tokens, index_dim]; returns all that are kept."""
        return self.stores["index"].append(keys[:, None])[:, 0]

    def prepare(self) -> None:
        """What `begin` needs memory for: it may fail, and changes nothing that is visible."""
        if self.state is not None:
            self.state.prepare()

    def begin(self) -> None:
        if self.state is not None:
            self.state.begin()

    def reserve(self, room: int) -> None:
        for store in self.stores.values():
            store.reserve(room)

    def compact(self) -> None:
        for store in self.stores.values():
            store.compact()

    def can_reject(self, rejected: int) -> bool:
        return self.state is None or self.state.can_reject(rejected)

    def commit(self, rejected: int) -> None:
        for part in self._parts():
            part.commit(rejected)

    def abort(self) -> None:
        for part in self._parts():
            part.abort()

    def can_roll_back(self, tokens: int) -> bool:
        return self.state is None or self.state.can_roll_back(tokens)

    def roll_back(self, tokens: int) -> None:
        """Take back the last `tokens` committed ones; the timeline does that for what is kept in columns."""
        if self.state is not None:
            self.state.roll_back(tokens)

    def reset(self) -> None:
        for part in self._parts():
            part.reset()

    def release(self) -> None:
        """A reset that keeps no memory."""
        for part in self._parts():
            part.release()

    def mask_sizes(self, tokens: int, unsettled: int = 0) -> tuple[int, Any]:
        """See `Timeline.mask_sizes`."""
        return self.timeline.mask_sizes(tokens, unsettled)

    def dense_state(self) -> dict[str, torch.Tensor]:
        """What is committed, by name: columns [rows, heads, held, width] of the stores, states [rows, ...]."""
        stores = {name: store.committed() for name, store in self.stores.items()}
        held = {name: columns for name, columns in stores.items() if columns is not None}
        return held | ({} if self.state is None else self.state.dense_state())

    def load_dense(self, content: dict[str, torch.Tensor]) -> None:
        """Hold exactly this content. The timeline has been told of it."""
        for name, store in self.stores.items():
            if name in content:
                store.load_dense(plain(content[name]))
        if self.state is not None:
            self._load_states(content)

    def state_dict(self) -> dict[str, Any]:
        """What is committed as it is written down, for a layer of the same kind: a dict of each store, states."""
        stores = {name: store.state_dict() for name, store in self.stores.items()}
        held = {name: written for name, written in stores.items() if written}
        return held | ({} if self.state is None else self.state.dense_state())

    def load_state_dict(self, written: dict[str, Any]) -> None:
        """Hold exactly this. The timeline has been told of it."""
        for name, store in self.stores.items():
            if name in written:
                store.load_state_dict(written[name])
        if self.state is not None:
            self._load_states(written)

    def _load_states(self, content: dict[str, Any]) -> None:
        assert self.state is not None
        self.state.load_dense({name: held for name, held in content.items() if name.split()[0] in (CONV, RECURRENT)})

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything the layer keeps."""
        for part in self._parts():
            yield from part.tensors()

    def offloaded_buffers(self) -> Iterator[Buffer]:
        """Where what of it is that does not live where layers compute."""
        for store in self.stores.values():
            yield from store.offloaded_buffers()

    def _parts(self) -> Iterator[Store | RecurrentState]:
        yield from self.stores.values()
        if self.state is not None:
            yield self.state

    def row_holders(self) -> Iterator[Any]:
        """Stores and states that hold rows each for itself: of a store whose rows share columns its two parts."""
        for part in self._parts():
            yield from getattr(part, "row_holders", (part,))

    @property
    def keys(self) -> torch.Tensor | None:
        """Committed keys [rows, kv_heads, held, head_dim], or None before the first step."""
        return self.stores["keys"].committed() if "keys" in self.stores else None

    @property
    def values(self) -> torch.Tensor | None:
        """Committed values [rows, kv_heads, held, head_dim], or None before the first step."""
        return self.stores["values"].committed() if "keys" in self.stores else None

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        """Conv states [rows, channels, kernel] by number; empty before the first step."""
        return {} if self.state is None else self.state.numbered(CONV)

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        """Recurrent states [rows, ...] by number; empty before the first step."""
        return {} if self.state is None else self.state.numbered(RECURRENT)

    @property
    def is_quantized(self) -> bool:
        """Whether its keys and values are kept in fewer bits than they come in."""
        return any(store.is_quantized for store in self.stores.values())

    @property
    def is_initialized(self) -> bool:
        return next(self.tensors(), None) is not None

    @property
    def is_sliding(self) -> bool:
        return self.spec.attention_span.size is not None

    def __repr__(self) -> str:
        return f"Layer({self.spec.layer_type}, held={self.timeline.kept_tokens})"
