"""`ModelCalls`: what transformers' models call in a forward.

The engine's loop drives a cache with `begin / commit / abort`. Another loop (transformers' `generate`, your own) does
not call those: see `ImplicitSteps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from caches.attention.segments import OpenRows
from caches.core.implicit_steps import ImplicitSteps
from caches.core.layer import Layer
from caches.core.layer_stack import LayerStack
from caches.core.wrapped_layer import WrappedLayer
from caches.hf.classic_names import ClassicNames
from caches.layers.layer_spec import INDEX, KV, MODEL_SPECIFIC, STATE, LayerSpec
from caches.layers.rope import RopeRotation
from caches.protocol import AttentionView
from caches.stores.recurrent_state import CONV, RECURRENT, RecurrentState
from caches.timeline.retention import KeepAll


class StackView(AttentionView):
    """What attention over one stack of layers has to know."""

    def __init__(self, stack: LayerStack, implicit: ImplicitSteps):
        self._stack, self._implicit = stack, implicit

    @property
    def specs(self) -> Sequence[LayerSpec]:
        return self._stack.specs

    @property
    def rotations(self) -> Mapping[int, RopeRotation]:
        return self._stack.hook.rotations(self._stack.layers)

    @property
    def max_step_tokens(self) -> int | None:
        return self._stack.hook.window

    def positions_needed(self, tokens: int) -> int:
        return min(tokens, self.max_step_tokens or tokens)

    def extra_slots(self, layer_idx: int, tokens: int) -> int:
        layers = self._stack.layers
        is_found = layer_idx < len(layers)  # layers may be added as they are used
        return self._stack.hook.extra_slots(layers[layer_idx], tokens) if is_found else 0

    @property
    def imposes_windows(self) -> bool:
        return any(self.imposed_window(index) is not None for index in range(len(self._stack.layers)))

    def imposed_window(self, layer_idx: int) -> int | None:
        return self._stack.imposed_window(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int | torch.Tensor]:
        if layer_idx >= len(self._stack.layers):  # not added yet
            return query_length, 0
        return self._stack.layers[layer_idx].mask_sizes(query_length, self._implicit.uncommitted)

    def set_padding(self, padding: torch.Tensor | Sequence[int] | None) -> None:
        """Say how many padding tokens each row begins with; None for none. Only sinks need to know.

        Raises `StepError` for another padding than before once tokens were evicted.
        """
        self._implicit.end()
        self._stack.hook.set_padding(self._stack.layers, padding, self._stack.batch_size)


class ModelCalls(ClassicNames):
    """Calls of layers, by their index; sizes, masks and states.

    stack, implicit: of the layers, and the steps that no `begin` announces. view: what attention has to know of them.
    """

    stack: LayerStack
    implicit: ImplicitSteps
    view: StackView

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one layer's keys and values [rows, kv_heads, tokens, head_dim]; returns what attention reads.

        Further arguments (`cache_kwargs` of older releases) are accepted: nothing in them is needed.
        """
        stack = self.stack
        if stack.is_announced and stack.layout.expected is None:  # the usual case of `_used`: once per layer and token
            return stack.layer(layer_idx, KV).append(key_states, value_states)
        layer = self._used(layer_idx, KV, "update", key_states.shape[-2], key_states)
        keys_and_values = layer.append(key_states, value_states)
        self._reached(layer_idx, KV)
        return keys_and_values

    def open_slots(self, layers: Sequence[int]) -> list[Sequence[OpenRows]] | None:
        """What attention of these layers reads of each cache, here one, in a step of one token, after `begin`; None
        where `update` does more than write their last slots, or was replaced."""
        is_own = type(self).update is _OWN_UPDATE and "update" not in vars(self)
        if not (is_own and self.stack.is_announced and self.stack.pending == 1):
            return None
        rows = list[Sequence[OpenRows]]()
        for index in layers:
            layer = self.stack.layer(index, KV)
            of_layer = layer.open_slots() if isinstance(layer, Layer) else None
            if of_layer is None:
                return None
            rows.append((of_layer,))
        return rows

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Append the keys [rows, tokens, index_dim] by which a sparse layer chooses what to attend to; returns all."""
        layer = self._used(layer_idx, INDEX, "index", indexer_key_states.shape[1])
        keys = layer.append_index(indexer_key_states)
        self._reached(layer_idx, INDEX)
        return keys

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Conv state `state_idx` [rows, channels, kernel], to be written in place; None before the first step."""
        return self._get_state(layer_idx, (CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Recurrent state `state_idx` [rows, ...], to be written in place; None before the first step."""
        return self._get_state(layer_idx, (RECURRENT, state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a layer's state was ever written; without `layer_idx`, that of the last layer with a state."""
        if layer_idx is not None:  # in transformers 5.17 models call only this before they write a state in place
            self._used(layer_idx, STATE, f"has {state_idx}")
            self._reached(layer_idx, STATE)
        return super().has_previous_state(layer_idx, state_idx)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Add what a convolution reads [rows, channels, tokens]; returns it with the tokens before."""
        tokens = None if conv_kernel_size is None else conv_states.shape[-1]
        state = self._state(layer_idx, f"conv {state_idx}", tokens, conv_states)
        inputs = state.append_conv(conv_states, state_idx, conv_kernel_size)
        self._reached(layer_idx, STATE)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Set recurrent state `state_idx` [rows, ...]; returns it."""
        state = self._state(layer_idx, f"recurrent {state_idx}").set((RECURRENT, state_idx), recurrent_states)
        self._reached(layer_idx, STATE)
        return state

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """MiniMax's name for recurrent state 0 of its lightning attention, [rows, heads, head_dim, head_dim]."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """MiniMax's name for setting recurrent state 0, [rows, heads, head_dim, head_dim]."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def _get_state(self, layer_idx: int, key: tuple[str, int]) -> torch.Tensor | None:
        state = self._state(layer_idx, f"get {key[0]} {key[1]}").get(key)
        self._reached(layer_idx, STATE)
        return state

    def _state(
        self, layer_idx: int, call: str, tokens: int | None = None, added: torch.Tensor | None = None
    ) -> RecurrentState:
        state = self._used(layer_idx, STATE, call, tokens, added).state
        assert state is not None
        return state

    def _used(
        self, layer_idx: int, component: str, call: str, tokens: int | None = None, added: torch.Tensor | None = None
    ) -> Layer | WrappedLayer:
        """The layer that a model uses: that may begin another loop's step, and end the one before.

        tokens: of the step, where the call tells. added: what the layer is about to keep.
        """
        stack = self.stack
        if added is not None and stack.layout.expected is not None:
            stack.layout.expected.check(layer_idx, added)
        if stack.finds_layers and not stack.is_announced:
            self.implicit.find_layer(layer_idx, component)
        layer = stack.layer(layer_idx, component)
        if not stack.is_announced:
            self.implicit.use(layer_idx, call, tokens)
        return layer

    def _reached(self, layer_idx: int, component: str) -> None:
        """Another loop's step has reached this component of a layer."""
        if not self.stack.is_announced:
            self.implicit.reached.add((layer_idx, component))

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        """Tokens committed; a tensor while a compiled step is open."""
        timeline = self.stack.timelines[0]
        return timeline.clock if timeline.graph and timeline.clock is not None else self.total_tokens

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        """The position of the next token: tokens fed so far, evicted ones included."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int | torch.Tensor]:
        """The slots that a layer's mask covers in a step of `query_length` tokens, and the token in the first one."""
        return self.view.get_mask_sizes(query_length, layer_idx)

    @property
    def is_compileable(self) -> bool:
        # transformers would compile around our bookkeeping; the engine keeps it out of the graph.
        return self.stack.is_announced and self.stack.timelines[0].graph

    @property
    def is_croppable(self) -> bool:
        return all(isinstance(timeline.retention, KeepAll) for timeline in self.stack.timelines) and not any(
            spec.components & {STATE, MODEL_SPECIFIC} for spec in self.specs
        )


_OWN_UPDATE = ModelCalls.update  # what a class or a program puts in its place may do more
