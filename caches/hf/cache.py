"""`Cache`: layers of ours as one cache, whose steps are transactions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache as TransformersCache

from caches.core.cache_layout import CacheLayout
from caches.core.implicit_steps import ImplicitSteps
from caches.core.layer_stack import LayerStack
from caches.core.prefix_sharing import PrefixSharing
from caches.core.row_selection import RowSelection
from caches.hf.model_calls import ModelCalls, StackView
from caches.layers.layer_spec import LayerSpec, read_specs
from caches.memory.scratch import Scratch
from caches.protocol import Capabilities
from caches.stores.slot import StoreFactory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Cache(ModelCalls, TransformersCache):
    """Keys, values and states of a model's layers, kept as its layout says. For a step see `EngineCache`.

    layout: a `CacheLayout`; a name, `specs` (None: layers are added as they are used), `make_store` and further fields
    of a `CacheLayout` stand for one. `commit` and `abort` are no hooks: steps of another loop end without them.
    """

    layer_class_to_replicate, offloading = None, False  # of transformers' own cache: layers and buffers are ours

    def __init__(
        self,
        layout: CacheLayout | str | None = None,
        specs: Sequence[LayerSpec] | None = None,
        make_store: StoreFactory | None = None,
        **fields: Any,
    ):
        if layout is None:
            raise TypeError(
                "a Cache needs a CacheLayout: caches.build gives it one. T5Gemma's own generate does not, where it "
                "makes the encoder's part: use engine.generate"
            )
        if isinstance(layout, str):
            if make_store is None:
                raise TypeError("a Cache needs make_store, a function from a Slot to a Store")
            layout = CacheLayout(layout, specs, make_store, **fields)
        self.stack = LayerStack(layout)
        self.stacks = (self.stack,)
        self.sharing = PrefixSharing(self.stack)
        self.selection = RowSelection(self.stack, self.sharing)
        self.implicit = ImplicitSteps(self.stack, self.selection)
        self.implicit_steps = (self.implicit,)
        self.view = StackView(self.stack, self.implicit)

    def empty_like(self, max_rows: int | None = None) -> Cache:
        """An empty cache of the same layout; a preallocated one with room for the rows of its first step."""
        return type(self)(self.stack.empty_layout(max_rows))

    def check_fits(self, model_config: PreTrainedConfig) -> None:
        specs = read_specs(model_config)
        if self.stack.finds_layers and self.total_tokens == 0:
            self.stack.bind_layers(specs)
            self.implicit.require_all()
        self.stack.check_specs(specs)

    def load_keys_and_values(self, pairs: Sequence[Sequence[torch.Tensor]]) -> None:
        """Hold these keys and values [rows, kv_heads, tokens, head_dim] of all tokens, one pair per layer."""
        self.selection.discard()
        self.stack.load_keys_and_values(pairs)
        self.implicit.require_all()

    # One step is a transaction: see `EngineCache`.

    def begin(self, tokens: int, graph: bool = False) -> None:
        if graph and self.implicit.is_open:
            self.stack.check_compiles()  # before the end of that step changes anything
        self.implicit.end()
        self.stack.begin(tokens, graph)

    def commit(self, rejected: int = 0) -> None:
        tokens, is_first = self.stack.pending, self.stack.is_announced and self.stack.total_tokens == 0
        used = self.implicit.required_and_used() if is_first else self.implicit.required
        self.stack.commit(rejected)
        self.implicit.required = used
        if tokens == 1:
            self.selection.unshare_if_materialized()

    def abort(self) -> None:
        self.stack.abort()

    def crop(self, tokens: int) -> None:
        if self.implicit.take_back(tokens):
            return
        self.implicit.end_step()
        if -tokens >= self.stack.total_tokens:
            self.selection.discard_deferred()
        self.selection.check_finished()
        self.stack.crop(tokens)

    def reserve(self, tokens: int) -> None:
        self.implicit.end()
        self.stack.reserve(tokens)

    @property
    def is_open(self) -> bool:
        """Whether a step was begun and neither committed nor aborted."""
        return self.stack.is_open

    @property
    def shares(self) -> bool:
        """Whether rows share a prefix at present."""
        return self.sharing.is_shared

    def set_padding(self, padding: torch.Tensor | Sequence[int] | None) -> None:
        """How many padding tokens each row begins with; None for none. Only sinks need to know."""
        self.view.set_padding(padding)

    # What it is made of.

    @property
    def capabilities(self) -> Capabilities:
        able = Capabilities(can_migrate=True, can_split=True, can_predict=True)
        return replace(able, is_quantized=self.is_quantized, imposes_windows=self.view.imposes_windows)

    @property
    def parts(self) -> tuple[Cache, ...]:
        """The caches of layers it consists of."""
        return (self,)

    @property
    def scratch(self) -> Scratch:
        return self.stack.scratch

    @property
    def total_tokens(self) -> int:
        """Tokens committed per row, or of another loop's step that is complete."""
        return self.stack.total_tokens + (self.implicit.uncommitted if self.stack.is_open else 0)
