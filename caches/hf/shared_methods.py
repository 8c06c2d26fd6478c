"""What caches of one and of two stacks share: row selection and sizes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
from transformers.cache_utils import Cache as TransformersCache

from caches.attention.segmented_tensor import plain
from caches.core.implicit_steps import ImplicitSteps
from caches.core.layer import Layer
from caches.core.layer_stack import LayerStack
from caches.core.row_selection import Choice, RowSelection
from caches.core.wrapped_layer import WrappedLayer
from caches.errors import StepError
from caches.files import save
from caches.layers.layer_spec import LayerSpec
from caches.protocol import TokenLog

L = TypeVar("L", bound="SharedMethods")


class SharedMethods:
    """What users and the engine's loop call. Stateless: a cache class has these next to its own methods.

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

    def save(
        self, path: str | Path, model: torch.nn.Module | None = None, notes: dict[str, object] | None = None
    ) -> None:
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

    def __repr__(self) -> str:
        class_and_name, layers = f"{type(self).__name__}({getattr(self, 'name', '')!r}", len(self.stacks[0].layers)
        return f"{class_and_name}, layers={layers}, total_tokens={self.total_tokens}, bytes={self.bytes})"
