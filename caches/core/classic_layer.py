"""`ClassicLayer`: what code reads that knows the layers of transformers' caches, in one of ours."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch

from caches.errors import StepError
from caches.stores.in_place import own_memory
from caches.stores.recurrent_state import CONV, RECURRENT, RecurrentState
from caches.stores.store import Store


class ClassicLayer:
    """Names of transformers' layers. stores: by "keys" and "values"; state: None without one."""

    supports_early_init = False  # transformers asks: shapes are learned from the first step
    record_past = False  # models of transformers 5.17 ask the layer: see `ClassicNames.is_recording_past`
    stores: dict[str, Store]
    state: RecurrentState | None
    _is_reached: bool  # by the open step

    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]: ...

    def committed(self, name: str) -> torch.Tensor | None:
        """Committed "keys" or "values" [rows, kv_heads, tokens, head_dim]; None before the first step."""
        return self.stores[name].committed() if name in self.stores else None

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys [rows, kv_heads, tokens, head_dim], with those of an open step that has come here; None before any.

        Raises `StepError` where these are not in one tensor, and when other keys are assigned.
        """
        return self._shown("keys")

    @keys.setter
    def keys(self, keys: torch.Tensor) -> None:
        self._refuse_assignment("keys")

    @property
    def values(self) -> torch.Tensor | None:
        """Values, as `keys`."""
        return self._shown("values")

    @values.setter
    def values(self, values: torch.Tensor) -> None:
        self._refuse_assignment("values")

    def _shown(self, name: str) -> torch.Tensor | None:
        store = self.stores.get(name)
        if not self._is_reached or store is None:
            return self.committed(name)
        tensor = own_memory(store)
        if tensor is None:
            raise StepError(
                f"{name} of a layer were read in the middle of a step, when this cache does not have them in one "
                "tensor: read them after the forward, or use cache='dynamic'"
            )
        return tensor.shown()

    def _refuse_assignment(self, name: str) -> None:
        raise StepError(
            f"{name} were assigned to a layer whose cache counts on the tokens that it has read, so others would be "
            "taken for them: code that shortens caches needs transformers' own, which it can shorten here too, as "
            "engine.generate(model, prompt, cache=transformers.DynamicCache(config=model.config))"
        )

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        """Conv states [rows, channels, kernel] by number; empty before the first step."""
        return {} if self.state is None else self.state.numbered(CONV)

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        """Recurrent states [rows, ...] by number; empty before the first step."""
        return {} if self.state is None else self.state.numbered(RECURRENT)

    @property
    def is_initialized(self) -> bool:
        return next(self.tensors(), None) is not None
