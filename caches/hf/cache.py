"""A cache as transformers' models see it: what they call in a forward.

Our own loop drives it with `begin / settle / abort`. A foreign loop (`model.generate`, or plain `model(...)`) does
not call those: there the first use of a layer opens a step and settles the one before, and what is asked in between is
answered as if that had already happened.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from caches.core.prefix_sharing import Forking
from caches.errors import StepError, UnsupportedLayerError
from caches.spec.layer_spec import INDEX, KV, MODEL_SPECIFIC, PLAIN, STATE, LayerSpec
from caches.stores.recurrent_state import CONV, RECURRENT, RecurrentState
from caches.timeline.retention import KeepAll
from caches.torch_api import module_call_code

_logger = logging.getLogger("caches")
_IN_WORDS = {KV: "keys and values", INDEX: "index", STATE: "state"}


class Cache(Forking):
    """Keys, values and states of a model's layers, kept as its recipe says: see `Steps` for the arguments.

    For the methods of a step see `EngineCache`.
    """

    def _make_layers(self, specs: Sequence[LayerSpec]) -> None:
        super()._make_layers(specs)
        self._driven = False  # the open step was begun by our loop, which will also close it
        # Of a foreign loop's open step: the calls there were, and the streams of layers that they reached.
        self._calls: set[tuple[int, str]] = set()
        self._reached: set[tuple[int, str]] = set()
        self._required = {use for index, spec in enumerate(specs) for use in _uses(index, spec)}

    # Foreign loops.

    @property
    def _is_complete(self) -> bool:
        """Whether a foreign loop's open step has reached every layer."""
        return self.is_open and not self._driven and self._reached >= self._required

    @property
    def _unsettled(self) -> int:
        """Tokens of a foreign loop's step that is complete but not settled yet."""
        # A step of one token may pass a model without columns in silence: it writes its states in place.
        return (self._timelines[0].pending or 1) if self._is_complete else 0

    @property
    def total_tokens(self) -> int:
        return super().total_tokens + self._unsettled

    def begin(self, tokens: int, graph: bool = False) -> None:
        super().begin(tokens, graph)
        self._driven = True

    def commit(self, rejected: int = 0) -> None:
        required = self._required
        if self._driven and super().total_tokens == 0:  # the whole forward ran: layers it did not reach never take part
            required = self._required_and_held
        super().commit(rejected)
        self._required = required

    @property
    def _required_and_held(self) -> set[tuple[int, str]]:
        return {(index, stream) for index, stream in self._required if self.layers[index].is_initialized}

    def _close(self) -> None:
        super()._close()
        self._driven = False
        self._calls.clear()
        self._reached.clear()

    def _between_steps(self) -> None:
        """Finish a foreign loop's step, whole or half."""
        if self._driven or not self.is_open:
            super()._between_steps()
        elif not self._is_complete:
            self._give_up()
        else:
            if self._timelines[0].pending == 0:
                self._begin_columns(1)
            self.commit()

    def _give_up(self) -> None:
        """A forward failed half-way, as far as that can be known: the step has never been."""
        layers, needed = ({index for index, _ in uses} for uses in (self._reached, self._required | self._reached))
        _logger.warning(
            "a forward reached %d of the %d layers of this %s cache (up to layer %d) before the next one began: it "
            "counts as failed, and its %d tokens were not kept. If the model has only these layers, build the cache "
            "with a configuration that says so (num_hidden_layers)",
            *(len(layers), len(needed), self.name, max(layers, default=-1), self._timelines[0].pending),
        )
        self.abort()

    def _require_layers_of(self, model: Any) -> None:
        """Wait for the layers that a model uses, where those are fewer than the cache has. None: for all."""
        self._required = {use for index, spec in enumerate(self.specs) for use in _uses(index, spec)}
        if model is not None:
            found = {getattr(module, "layer_idx", None) for module in model.modules()}
            config = model.config.get_text_config(decoder=True)
            count = getattr(config, "num_decoder_layers", None) or getattr(config, "num_hidden_layers", None)
            used = {use for use in self._required if use[0] in found and (count is None or use[0] < count)}
            self._required = used or self._required

    def has_reached(self, layer_idx: int) -> bool:
        """Whether a foreign loop's open step has reached this layer."""
        return any(index == layer_idx for index, _ in self._reached)

    def finish_step(self, whole: bool = False) -> None:
        """Settle a foreign loop's step once it has reached every layer: then what layers hold can be looked at.

        whole: the forward is known to have come to its end, so what it did not reach never takes part.
        """
        if whole and self.is_open:
            self._required &= self._reached
        if self._is_complete or not self.is_open:
            self._between_steps()

    def _touch(self, layer_idx: int, stream: str, call: str, tokens: int | None = None) -> Any:
        """A model uses a layer: that may open a foreign loop's step, and finish the one before. Returns the layer."""
        if self.finds_layers and not self._driven and layer_idx is not None and layer_idx >= len(self.layers):
            self._find_layer(layer_idx, stream)
        if layer_idx is None or not 0 <= layer_idx < len(self.layers):
            raise UnsupportedLayerError(
                f"the cache has {len(self.layers)} layers, but layer {layer_idx} was asked for: the model's layers "
                "have to be numbered from 0 (`layer_idx`), and the cache built with its configuration"
            )
        spec = self.specs[layer_idx]
        if stream not in spec.components and not (stream in (KV, INDEX) and MODEL_SPECIFIC in spec.components):
            raise UnsupportedLayerError(
                f"layer {layer_idx} ({spec.layer_type}) keeps no {_IN_WORDS[stream]}: build the cache with the "
                "configuration of the model that uses it"
            )
        if not self._driven:
            if (layer_idx, call) in self._calls:
                self._between_steps()
            is_new = not self.is_open
            if is_new:
                self.check_whole()
                is_compiling = torch.compiler.is_compiling()
                if super().total_tokens > 0 and not is_compiling:
                    # Maybe steps of another cache, which have shown what layers take part.
                    self._required = self._required_and_held
                elif not self.finds_layers and not is_compiling:
                    self._require_layers_of(model_at_work())
            if tokens is not None and self._timelines[0].pending == 0:
                self._check_windows(tokens)
                self._begin_columns(tokens)
            elif is_new:
                self._prepare_layers()
                self._begin_layers()
            if is_new:
                self.is_open, self.log = True, None  # what a foreign loop feeds is not known
            if super().total_tokens == 0 and all(index != layer_idx for index, _ in self._required):
                self._require_layers_of(None)  # a model that numbers its layers while it computes
            self._calls.add((layer_idx, call))
        return self.layers[layer_idx]

    def _reach(self, layer_idx: int, stream: str) -> None:
        """A foreign loop's step has come so far: what a layer was given is there."""
        if not self._driven:
            self._reached.add((layer_idx, stream))

    def _check_windows(self, tokens: int) -> None:
        """Only our own loop hides from a token what is further back than a window that the cache imposes."""
        windows = [self.imposed_window(index) for index in range(len(self.layers))]
        narrow = min((window for window in windows if window is not None), default=None)
        if narrow is not None and tokens > 1 and self.total_tokens + tokens > narrow:
            raise StepError(
                f"a step of {tokens} tokens after {self.total_tokens} would look further back than the "
                f"window of {narrow} that the {self.name} cache imposes: generate with our engine, or feed the tokens "
                f"after the first {narrow} one by one"
            )

    def _find_layer(self, layer_idx: int, stream: str) -> None:
        if stream != KV or self._timelines[0].total_tokens > 0:
            raise StepError(
                f"layer {layer_idx} appears in a cache that was built without a configuration"
                + (" and keeps a state" if stream != KV else " after the first step, so that step died half-way")
                + ": build it with config=model.config"
            )
        while len(self.layers) <= layer_idx:
            self.specs += (PLAIN,)
            self._required |= set(_uses(len(self.layers), PLAIN))
            self.layers.append(self._new_layer(PLAIN, self._timelines[0]))

    # What models call.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one layer's keys and values [rows, kv_heads, tokens, head_dim]; returns what attention reads.

        Further arguments (`cache_kwargs` of older releases) are accepted: nothing in them is needed.
        """
        if self._place is not None:
            self._place.check(layer_idx, key_states)
        both = self._touch(layer_idx, KV, "update", key_states.shape[-2]).append(key_states, value_states)
        self._reach(layer_idx, KV)
        return both

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Append the keys [rows, tokens, index_dim] by which a sparse layer chooses what to attend to; returns all."""
        layer = self._touch(layer_idx, INDEX, "index", indexer_key_states.shape[1])
        keys = layer.append_index(indexer_key_states)
        self._reach(layer_idx, INDEX)
        return keys

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Conv state `state_idx` [rows, channels, kernel], to be written in place; None before the first step."""
        state = self._state(layer_idx, f"get conv {state_idx}").get((CONV, state_idx))
        self._reach(layer_idx, STATE)
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Recurrent state `state_idx` [rows, ...], to be written in place; None before the first step."""
        state = self._state(layer_idx, f"get recurrent {state_idx}").get((RECURRENT, state_idx))
        self._reach(layer_idx, STATE)
        return state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a layer's state was ever written; without `layer_idx`, that of the last layer with a state."""
        if layer_idx is not None:  # in transformers 5.17 this is all that models ask before they write a state in place
            self._touch(layer_idx, STATE, f"has {state_idx}")
            self._reach(layer_idx, STATE)
        return super().has_previous_state(layer_idx, state_idx)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Add what a convolution reads [rows, channels, tokens]; returns it with the columns before."""
        if self._place is not None:
            self._place.check(layer_idx, conv_states)
        tokens = None if conv_kernel_size is None else conv_states.shape[-1]
        state = self._state(layer_idx, f"conv {state_idx}", tokens)
        read = state.append_conv(conv_states, state_idx, conv_kernel_size)
        self._reach(layer_idx, STATE)
        return read

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Set recurrent state `state_idx` [rows, ...]; returns it."""
        state = self._state(layer_idx, f"recurrent {state_idx}").set((RECURRENT, state_idx), recurrent_states)
        self._reach(layer_idx, STATE)
        return state

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """MiniMax's name for recurrent state 0 of its lightning attention, [rows, heads, head_dim, head_dim]."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """MiniMax's name for setting recurrent state 0, [rows, heads, head_dim, head_dim]."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def _state(self, layer_idx: int, call: str, tokens: int | None = None) -> RecurrentState:
        return self._touch(layer_idx, STATE, call, tokens).state

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        """Tokens committed; a tensor while a compiled step is open."""
        timeline = self._timelines[0]
        return timeline.clock if timeline.graph and timeline.clock is not None else self.total_tokens

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if layer_idx >= len(self.layers):  # not found yet
            return query_length, 0
        return self.layers[layer_idx].mask_sizes(query_length, self._unsettled)

    @property
    def is_compileable(self) -> bool:
        # transformers would compile around our bookkeeping; only our loop knows how to keep that out of the graph.
        return self._driven and self._timelines[0].graph

    @property
    def is_croppable(self) -> bool:
        return all(isinstance(timeline.retention, KeepAll) for timeline in self._timelines) and not any(
            spec.components & {STATE, MODEL_SPECIFIC} for spec in self.specs
        )


def _uses(index: int, spec: LayerSpec) -> list[tuple[int, str]]:
    """The streams that every whole forward reaches in a layer."""
    return [(index, KV if stream == MODEL_SPECIFIC else stream) for stream in spec.components]


def model_at_work() -> PreTrainedModel | None:
    """The innermost model whose forward is running in this thread; None where there is none."""
    frame, code = sys._getframe(1), module_call_code()
    while frame is not None:
        # Their variables alone are looked at: what they hold lives as long as the call in any case.
        if frame.f_code is code:
            module = frame.f_locals.get("self")
            if isinstance(module, PreTrainedModel):
                return module
        frame = frame.f_back  # type: ignore[assignment]
    return None
