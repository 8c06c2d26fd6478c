"""Layer kinds of one model family, kept by transformers' own layer in a cache of ours.

Methods that only its model knows (compressed entries, an index of blocks) are passed on to it. Its growing layers write
nothing in place, so restoring their attributes undoes a step; a part of a step cannot be rolled back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from caches.errors import StepError
from caches.layers.layer_spec import LayerSpec
from caches.memory.buffers import Buffer
from caches.stores.store import chosen_rows
from caches.timeline.timeline import Timeline


class WrappedLayer:
    """One of transformers' layers that takes part in steps and row selection. See `Layer` for the methods."""

    is_quantized = False
    storage_format = None

    def __init__(self, spec: LayerSpec, timeline: Timeline):
        assert spec.new_layer is not None
        self.spec, self.timeline = spec, timeline
        self._layer = spec.new_layer()
        self._before: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_layer" not in vars(self):  # asked by copy and pickle before there is one
            raise AttributeError(name)
        return getattr(self._layer, name)

    def committed(self, name: str) -> torch.Tensor | None:
        """Its "keys" or "values", which are committed between steps."""
        tensor: torch.Tensor | None = getattr(self._layer, name)
        return tensor

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        """Those of transformers' layer, by their number."""
        return dict(vars(self._layer).get("conv_states", {}))

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        """Those of transformers' layer, by their number."""
        return dict(vars(self._layer).get("recurrent_states", {}))

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layer.update(keys, values)

    def append_index(self, keys: torch.Tensor) -> torch.Tensor:
        positions, tokens = self.indexer_position_ids, self.timeline.total_tokens + keys.shape[1]
        if positions is not None and positions.shape[-1] != tokens:
            raise StepError(
                f"the model has left positions of {positions.shape[-1]} tokens here, but there are {tokens}: a forward "
                "died half-way, and its positions were not taken back. Reset the cache"
            )
        return self._layer.update_indexer(keys)

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions of all tokens [kinds, rows, tokens], which qwen4_exp keeps on its first indexed layer.

        None before the first step. They are kept with the rows first, like everything that follows rows.
        """
        positions = vars(self._layer).get("indexer_position_ids")
        return None if positions is None else positions.transpose(0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        self._layer.indexer_position_ids = positions.transpose(0, 1)

    def begin(self) -> None:
        self._before = self.dense_state()

    def _does_by_itself(self, *arguments: int) -> None:
        """transformers' layer makes its own room and evicts by itself; no committed token can be rolled back."""

    prepare = reserve = compact = roll_back = _does_by_itself

    def can_reject(self, rejected: int) -> bool:
        return rejected in (0, self.timeline.pending)

    def commit(self, rejected: int) -> None:
        if rejected:
            self.abort()
        self._before = None

    def can_roll_back(self, tokens: int) -> bool:
        return tokens == 0

    def abort(self) -> None:
        if self._before is not None:
            vars(self._layer).clear()
            vars(self._layer).update(self._before)
            self._before = None

    def select_rows(self, index: torch.Tensor) -> None:
        vars(self._layer).update(chosen_rows(vars(self._layer), index))

    def reset(self) -> None:
        assert self.spec.new_layer is not None
        self._layer = self.spec.new_layer()

    def dense_state(self) -> dict[str, Any]:
        """The attributes of transformers' layer; of dicts, which the model writes into, copies."""
        attributes = vars(self._layer).items()
        return {name: copy.copy(value) if isinstance(value, dict) else value for name, value in attributes}

    def load_dense(self, content: dict[str, Any]) -> None:
        self.reset()
        vars(self._layer).update(content)

    state_dict, load_state_dict = dense_state, load_dense
    release = reset

    def mask_sizes(self, tokens: int, uncommitted: int = 0) -> tuple[int, int]:
        return self._layer.get_mask_sizes(tokens)

    def tensors(self) -> Iterator[torch.Tensor]:
        for value in vars(self._layer).values():
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if _is_data(tensor):
                    yield tensor

    def offloaded_buffers(self) -> Iterator[Buffer]:
        return iter(())

    @property
    def growing_bytes(self) -> int:
        """See `Layer.growing_bytes`."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def row_holders(self) -> Iterator[WrappedLayer]:
        yield self

    @property
    def is_initialized(self) -> bool:
        return next(self.tensors(), None) is not None

    @property
    def is_sliding(self) -> bool:
        return bool(getattr(self._layer, "is_sliding", False))

    def __repr__(self) -> str:
        return f"WrappedLayer({self.spec.layer_type}, {type(self._layer).__name__})"


def _is_data(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.numel() > 0
