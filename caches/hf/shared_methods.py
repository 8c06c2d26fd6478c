"""What caches of one and of two stacks share: row selection, sizes, and names of transformers' classes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers.cache_utils import Cache as TransformersCache

from caches.attention.segmented_tensor import plain
from caches.core.implicit_steps import ImplicitSteps
from caches.core.layer import Layer
from caches.core.layer_stack import LayerStack
from caches.core.row_selection import Choice, RowSelection
from caches.core.row_transfer import select_rows
from caches.core.wrapped_layer import WrappedLayer
from caches.errors import StepError, UnsupportedLayerError
from caches.files import save
from caches.layers.layer_spec import KV, STATE, LayerSpec
from caches.protocol import TokenLog

L = TypeVar("L", bound="SharedMethods")


class SharedMethods:
    """What users and transformers' loops call. Stateless: a cache class has these next to its own methods.

    stacks, implicit_steps: of the decoder's tokens, and of the encoder's where there are such. Most is read from the
    first.
    """

    stacks: tuple[LayerStack, ...]
    implicit_steps: tuple[ImplicitSteps, ...]

    # Everything here is written in terms of these.

    @abstractmethod
    def empty_like(self: L, max_rows: int | None = None) -> L: ...

    @property
    @abstractmethod
    def total_tokens(self) -> int: ...

    @abstractmethod
    def commit(self, rejected: int = 0) -> None: ...

    @abstractmethod
    def crop(self, tokens: int) -> None: ...

    @abstractmethod
    def set_padding(self, padding: torch.Tensor | Sequence[int] | None) -> None: ...

    @property
    def handle(self) -> TransformersCache:
        return self

    # Of its stacks.

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.stacks[0].layout.name

    @name.setter
    def name(self, name: str) -> None:
        self.stacks[0].layout = replace(self.stacks[0].layout, name=name)

    @property
    def layers(self) -> list[Layer | WrappedLayer]:
        """Its layers, with the tokens of another loop's step that is complete."""
        if self.implicit_steps[0].is_complete:
            self.implicit_steps[0].end_step()
        return self.stacks[0].layers

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return self.stacks[0].specs

    @property
    def log(self) -> TokenLog | None:
        """The tokens it holds, where they are known."""
        return self.stacks[0].log

    @log.setter
    def log(self, log: TokenLog | None) -> None:
        self.stacks[0].log = log

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first step."""
        return self.stacks[0].batch_size

    @property
    def max_tokens(self) -> int | None:
        """Tokens it can hold per row; None without limit."""
        return self.stacks[0].max_tokens

    @property
    def max_rows(self) -> int | None:
        """Rows it has room for; None without limit."""
        return self.stacks[0].max_rows

    @property
    def is_quantized(self) -> bool:
        """Whether some of it is kept in fewer bits than it came in."""
        return self.stacks[0].is_quantized

    @property
    def fixed(self) -> bool:
        """Whether buffers are made once and never move."""
        return all(stack.layout.preallocated for stack in self.stacks)

    @property
    def why_not_compiled(self) -> str | None:
        """Why a compiled step cannot use it; None where it can."""
        return next((reason for stack in self.stacks if (reason := stack.why_not_compiled) is not None), None)

    def can_reject(self, rejected: int) -> bool:
        """Whether `commit(rejected)` is possible."""
        return self.stacks[0].can_reject(rejected)

    def growth(self, tokens: int) -> int:
        """How many bytes more it will take of the device when there is room for `tokens` more."""
        return self.stacks[0].growth(tokens)

    def save(self, path: str | Path, model: torch.nn.Module | None = None, notes: dict[str, Any] | None = None) -> None:
        """Write it to a safetensors file, from which `caches.load` makes it again.

        model: whose forwards filled it; by default the one that the engine ran. notes: in types of JSON, for
        `caches.inspect`. What could take back the last step of states is left out. A file of that name is replaced.
        Raises `CacheFileError` where the model is not known, `UnsupportedLayerError` where a file cannot hold a layer.
        """
        save(self, path, model, notes)

    # Sizes.

    @property
    def bytes(self) -> int:
        """Bytes of everything it keeps, room for tokens to come included."""
        return sum(self.bytes_by_place.values())

    @property
    def bytes_by_place(self) -> dict[str, int]:
        """`bytes` by where they are: "device", "host", "disk", and "staging", on the device too.

        The device is where the model computes, also where that is the host. "staging" is memory that all layers share.
        """
        layers = [layer for stack in self.stacks for layer in stack.layers]
        by_place = {"device": sum(tensor.nbytes for layer in layers for tensor in layer.tensors())}
        for buffer in (buffer for layer in layers for buffer in layer.offloaded_buffers()):
            by_place[buffer.tier] = by_place.get(buffer.tier, 0) + buffer.bytes
            by_place["device"] -= buffer.bytes
        staging = sum(tensor.nbytes for stack in self.stacks for tensor in stack.scratch.tensors())
        return by_place | ({"staging": staging} if staging else {})

    @property
    def device_bytes(self) -> int:
        """Those of `bytes` that are on the device that computes; where that is the host, all that are not in files."""
        offloaded = (buffer for stack in self.stacks for layer in stack.layers for buffer in layer.offloaded_buffers())
        return self.bytes - sum(buffer.bytes for buffer in offloaded if buffer.is_off_device)

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

    # Rows.

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes a copy of row `index[i]`. See `EngineCache.unfinished` for what is there when memory is out."""
        self._select(lambda selection: selection.plan_rows(index))

    def fork(self, times: int) -> None:
        self._select(lambda selection: selection.plan_fork(times))

    def unshare(self) -> None:
        """Every row gets all its tokens for itself. What was encoded since a fork stays in a suffix."""
        self._select(RowSelection.plan_unshare)

    def _select(self, plan: Callable[[RowSelection], Choice | None]) -> None:
        """All stacks select rows, or can be finished, whichever fails."""
        self.check_finished()
        for steps in self.implicit_steps:
            steps.end()
        choices = [plan(steps.selection) for steps in self.implicit_steps]
        for steps, choice in zip(self.implicit_steps, choices, strict=True):
            steps.selection.start(choice)
        self.finish()

    @property
    def unfinished(self) -> bool:
        return any(steps.selection.unfinished for steps in self.implicit_steps)

    def finish(self) -> None:
        for steps in self.implicit_steps:
            steps.selection.finish()

    def check_finished(self) -> None:
        """Raise `StepError` while rows are half selected."""
        for steps in self.implicit_steps:
            steps.selection.check_finished()

    # Steps.

    def finish_step(self, is_over: bool = False) -> None:
        """Commit another loop's step once it has reached every layer: see `ImplicitSteps.end_if_complete`."""
        for steps in self.implicit_steps:
            steps.end_if_complete(is_over)

    def reset(self) -> None:
        for steps in self.implicit_steps:
            steps.selection.discard()
            steps.stack.reset()

    def release(self) -> None:
        """Reset, and free all memory: the next step allocates it anew."""
        for steps in self.implicit_steps:
            steps.selection.discard()
            steps.stack.release()

    # transformers' names for selecting rows.

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.batch_size > 0:
            self.select_rows(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """indices: the rows that stay, as integers or as a bool mask of all rows."""
        self.select_rows(indices)

    def batch_split(self: L, full_batch_size: int, split_size: int, num_hidden_layers: int | None = None) -> list[L]:
        """Caches of `split_size` rows each, the last one of what is left. The layers count themselves."""
        if full_batch_size != self.batch_size:
            raise StepError(f"batch_split({full_batch_size}, ...), but the cache holds {self.batch_size} rows")
        return [select_rows(self, rows) for rows in torch.arange(full_batch_size, device="cpu").split(split_size)]

    # Layers, as the tensors they hold. A step of another loop that is complete counts as committed.

    def _committed_layers(self) -> list[Layer | WrappedLayer]:
        self.finish_step()
        return self.stacks[0].layers

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

    def check_finite(self) -> None:
        """Raise `StepError`, with the first layer and row, where keys, values or states are not finite."""
        self.finish_step()
        for index, layer in chain.from_iterable(enumerate(stack.layers) for stack in self.stacks):
            for name, content in layer.dense_state().items():
                if not isinstance(content, torch.Tensor) or not content.is_floating_point():
                    continue
                wrong = ~plain(content).isfinite().flatten(1)
                if bool(wrong.any()):
                    row = int(wrong.any(dim=1).nonzero()[0])
                    raise StepError(
                        f"layer {index}: {int(wrong[row].sum())} elements of {name} in row {row} are NaN or infinite, "
                        "so is what is computed from them. Look at the inputs, or compute in a wider data type"
                    )

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

    def __repr__(self) -> str:
        class_and_name, layers = f"{type(self).__name__}({getattr(self, 'name', '')!r}", len(self)
        return f"{class_and_name}, layers={layers}, total_tokens={self.total_tokens}, bytes={self.bytes})"


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else plain(tensor)
