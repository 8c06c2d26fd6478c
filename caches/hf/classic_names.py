"""`ClassicNames`: names of transformers' cache classes, of this release and of earlier ones, on caches of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch

from caches.attention.kv_view import plain
from caches.core.layer import Layer
from caches.core.row_transfer import select_rows
from caches.core.wrapped_layer import WrappedLayer
from caches.errors import StepError, UnsupportedLayerError
from caches.hf.shared_methods import SharedMethods
from caches.layers.layer_spec import KV, STATE

C = TypeVar("C", bound="ClassicNames")


class ClassicNames(SharedMethods):
    """What transformers' loops and code for its caches call. The engine itself needs none of it."""

    # Sizes.

    @property
    def seen_tokens(self) -> int:
        return self.total_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens it can hold per row, or shows to a token; -1 without a limit, as in transformers."""
        window = self.stacks[0].hook.window
        limit = self.max_tokens if window is None else window
        return -1 if limit is None else limit

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        return self.get_max_length(layer_idx)

    def get_usable_length(self, new_seq_length: int, layer_idx: int = 0) -> int:
        """Tokens that are left of those in the cache once `new_seq_length` more have come."""
        limit = self.get_max_length(layer_idx)
        return self.total_tokens if limit < 0 else min(self.total_tokens, limit - new_seq_length)

    # transformers' names for selecting rows.

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.batch_size > 0:
            self.select_rows(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """indices: the rows that stay, as integers or as a bool mask of all rows."""
        self.select_rows(indices)

    def batch_split(self: C, full_batch_size: int, split_size: int, num_hidden_layers: int | None = None) -> list[C]:
        """Caches of `split_size` rows each, the last one of what is left. The layers count themselves."""
        if full_batch_size != self.batch_size:
            raise StepError(f"batch_split({full_batch_size}, ...), but the cache holds {self.batch_size} rows")
        return [select_rows(self, rows) for rows in torch.arange(full_batch_size, device="cpu").split(split_size)]

    # Layers, as the tensors they hold. A step of another loop that is complete counts as committed.

    def __len__(self) -> int:
        return len(self.stacks[0].layers)

    def __getitem__(self, layer_idx: int) -> tuple[torch.Tensor | None, ...]:
        layer = self._committed_layers()[layer_idx]
        return _plain(layer.committed("keys")), _plain(layer.committed("values"))

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, ...]]:
        return (self[index] for index in range(len(self)))

    @property
    def key_cache(self) -> list[torch.Tensor | None]:
        """Committed keys of every layer [rows, kv_heads, tokens, head_dim]; None before the first step."""
        return [_plain(layer.committed("keys")) for layer in self._committed_layers()]

    @property
    def value_cache(self) -> list[torch.Tensor | None]:
        """Committed values of every layer [rows, kv_heads, tokens, head_dim]; None before the first step."""
        return [_plain(layer.committed("values")) for layer in self._committed_layers()]

    @property
    def conv_states(self) -> list[torch.Tensor | None]:
        """The first conv state of every layer [rows, channels, kernel]; None where there is none."""
        return [layer.conv_states.get(0) for layer in self._committed_layers()]

    @property
    def ssm_states(self) -> list[torch.Tensor | None]:
        """The first recurrent state of every layer [rows, ...]; None where there is none."""
        return [layer.recurrent_states.get(0) for layer in self._committed_layers()]

    @property
    def intermediate_size(self) -> int | None:
        """Channels of the first conv state; None before the first step, and without one."""
        return next((state.shape[1] for state in self.conv_states if state is not None), None)

    @property
    def conv_kernel_size(self) -> int | None:
        """Width of the first conv state's kernel; None before the first step, and without one."""
        return next((state.shape[-1] for state in self.conv_states if state is not None), None)

    @property
    def ssm_state_size(self) -> int | None:
        """Width of the first recurrent state; None before the first step, and without one."""
        return next((state.shape[-1] for state in self.ssm_states if state is not None), None)

    def to_legacy_cache(self) -> tuple[tuple[torch.Tensor | None, ...], ...]:
        """Keys and values of every layer, as transformers had them before there were caches.

        Raises `UnsupportedLayerError` where they are not the whole content: states, windows that evicted tokens.
        """
        for index, layer in enumerate(self._committed_layers()):
            keys = layer.committed("keys")
            stored = 0 if keys is None else keys.shape[-2]
            if stored != self.total_tokens or layer.spec.components != {KV}:
                raise UnsupportedLayerError(
                    f"layer {index} ({layer.spec.layer_type}) holds keys and values of {stored} of {self.total_tokens} "
                    f"tokens{' and more' if layer.spec.components - {KV} else ''}: tuples of them cannot say "
                    "everything. Keep the cache object"
                )
        return tuple(tuple(None if tensor is None else tensor.clone() for tensor in layer) for layer in self)

    def _committed_layers(self) -> list[Layer | WrappedLayer]:
        self.finish_step()
        return self.stacks[0].layers

    # What transformers reads about its kind.

    @property
    def is_initialized(self) -> bool:
        return self.batch_size > 0

    @property
    def is_sliding(self) -> list[bool]:
        return [layer.is_sliding for layer in self.stacks[0].layers]

    @property
    def is_linear(self) -> list[bool]:
        return [STATE in spec.components and not spec.keeps_kv for spec in self.specs]

    @property
    def is_dummy(self) -> list[bool]:
        return [not spec.components for spec in self.specs]

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: a step can be taken back because the states before it are copied."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a layer's state was ever written; without `layer_idx`, that of the last layer with a state."""
        layers = self.stacks[0].layers
        layers = layers if layer_idx is None else layers[layer_idx : layer_idx + 1]
        states = [layer for layer in layers if STATE in layer.spec.components]
        if not states:
            raise UnsupportedLayerError("no layer that was asked about keeps a state")
        numbered = states[-1].conv_states | states[-1].recurrent_states
        return bool(numbered) if state_idx is None else state_idx in numbered


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else plain(tensor)
