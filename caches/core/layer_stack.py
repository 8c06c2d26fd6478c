"""The layers of a cache, and the transaction that a step is on them.

`begin` makes room and decides where new tokens go, the forward appends, `commit` keeps them and evicts what no later
token attends to, `abort` undoes everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from caches.core.cache_layout import MOVES, QUANTIZES, CacheLayout
from caches.core.layer_groups import LayerGroups
from caches.errors import StepError
from caches.layers.layer_spec import PLAIN, LayerSpec
from caches.protocol import TokenLog


class LayerStack(LayerGroups):
    """Keys, values and states of a model's layers, kept as `layout` says.

    log: the tokens it holds, where they are known. is_open: a step was begun and neither committed nor aborted.
    is_announced: by `begin`, whose caller also ends it. finds_layers: layers are added as they are used.
    """

    def __init__(self, layout: CacheLayout):
        self.restart(layout)

    def restart(self, layout: CacheLayout) -> None:
        """Become an empty stack of this layout."""
        self.layout = layout
        self.hook = layout.make_hook()
        self.log: TokenLog | None = None
        self.is_open = self.is_announced = False
        self.finds_layers = layout.specs is None
        self._make_layers(layout.specs or ())

    def bind_layers(self, specs: Sequence[LayerSpec]) -> None:
        """Have these layers, in place of adding them as they are used. Only while it is empty."""
        self.hook.check_layers(specs)
        self.finds_layers = False
        self._make_layers(specs)

    def empty_layout(self, max_rows: int | None) -> CacheLayout:
        """For an empty cache with the same layers; a preallocated one with room for the rows of its first step."""
        specs = None if self.finds_layers and not self.layers else self.specs
        config = self.layout.config  # a file builds the cache from it
        config = None if config is None else config.update(max_batch_size=max_rows)[0]
        return replace(self.layout, specs=specs, config=config, max_rows=max_rows)

    # One step is a transaction.

    def begin(self, tokens: int, graph: bool = False) -> None:
        """See `EngineCache.begin`."""
        if graph:
            self.check_compiles()
        self.check_closed()
        self.place(tokens, graph)
        self.is_open = self.is_announced = True

    def check_compiles(self) -> None:
        """Raise `StepError` where a compiled step cannot use it."""
        if self.why_not_compiled is not None:
            raise StepError(f"cache={self.layout.name!r} cannot be in a compiled step: {self.why_not_compiled}")

    def check_closed(self) -> None:
        """Raise `StepError` while a step is open."""
        if self.is_open:
            raise StepError("a step is open: commit() or abort() it first")

    def place(self, tokens: int, graph: bool = False) -> None:
        """Make room for a step of `tokens` and decide where they go. When this raises, nothing has changed."""
        placements = {timeline: timeline.place(tokens) for timeline in self.timelines}
        finish = self.hook.before_begin(self.layers, tokens)
        if not self.is_open:
            for _, state in self._states:
                state.prepare()
        self._make_room({timeline: placement.room for timeline, placement in placements.items()})
        # Nothing below can fail.
        if not self.is_open:
            for _, state in self._states:
                state.begin()
        for timeline, placement in placements.items():
            if placement.compact:
                for layer in self.layers_of(timeline):
                    layer.compact()
            timeline.begin(tokens, placement, graph)
        finish()

    def open_states(self) -> None:
        """Begin a step of which the number of tokens is not known yet: states can be written."""
        for _, state in self._states:
            state.prepare()
        for _, state in self._states:
            state.begin()

    def can_reject(self, rejected: int) -> bool:
        return all(state.can_reject(rejected) for _, state in self._states)

    def commit(self, rejected: int = 0) -> None:
        """See `EngineCache.commit`."""
        if not self.is_open:
            raise StepError("commit() without begin()")
        if not 0 <= rejected <= self.pending:
            raise StepError(f"commit(rejected={rejected}), but the open step has {self.pending} tokens")
        if not self.can_reject(rejected):
            stateful = next(layer_type for layer_type, state in self._states if not state.can_reject(rejected))
            raise StepError(
                f"a {stateful} layer takes back whole steps only, not {rejected} of {self.pending} tokens: abort() the "
                "step and feed the tokens to keep again"
            )
        self.hook.before_commit(self.layers)
        for layer in self.layers:
            layer.commit(rejected)
        for timeline in self.timelines:
            timeline.commit(rejected)
        self._close()

    def abort(self) -> None:
        """See `EngineCache.abort`."""
        if not self.is_open:
            return
        for layer in self.layers:
            layer.abort()
        for timeline in self.timelines:
            timeline.close()
        self._close()

    def _close(self) -> None:
        self.is_open = self.is_announced = False
        if self.total_tokens == 0:  # not even the number of rows is committed
            self._empty()

    def crop(self, tokens: int) -> None:
        """See `EngineCache.crop`. 0 removes nothing."""
        self.check_closed()
        remove = max(0, self.total_tokens - tokens) if tokens > 0 else min(-tokens, self.total_tokens)
        if remove and remove == self.total_tokens:
            self.log = None
            self._empty()
            return
        self._check_rolls_back(remove, tokens)
        for _, state in self._states:
            state.roll_back(remove)
        for timeline in self.timelines:
            timeline.roll_back(remove)
        self.log = None if self.log is None else self.log.first(self.total_tokens)

    def _check_rolls_back(self, remove: int, tokens: int) -> None:
        remedy = "Reset the cache and feed the tokens to keep again."
        for layer_type, state in self._states:
            if not state.can_roll_back(remove):
                raise StepError(
                    f"crop({tokens}) of {self.total_tokens} tokens: a {layer_type} layer keeps a state, of which only "
                    f"the last step can be taken back. {remedy}"
                )
        for layer in self.layers:
            if not layer.timeline.can_roll_back(remove):
                raise StepError(
                    f"crop({tokens}) of {self.total_tokens} tokens: a {layer.spec.layer_type} layer keeps "
                    f"{layer.timeline.kept_tokens} of them and the ones before are gone. {remedy}"
                )

    def reset(self) -> None:
        """Evict everything. Preallocated buffers stay where they are."""
        self.is_open = self.is_announced = False
        self.log = None
        self._empty()
        self.hook.reset()

    def release(self) -> None:
        """Reset, and free all memory: the next step allocates it anew."""
        for layer in self.layers:
            layer.release()
        self.scratch.release()
        self.reset()
        for timeline in self.timelines:
            timeline.release()

    def _empty(self) -> None:
        self.remove_suffixes()
        for timeline in self.timelines:
            timeline.reset()
        for layer in self.layers:
            layer.reset()

    def reserve(self, tokens: int) -> None:
        """See `EngineCache.reserve`."""
        self._make_room({timeline: timeline.room_for(tokens) for timeline in self.timelines})

    # Content, from another cache or from tensors.

    def load_state_dict(
        self,
        timelines: Sequence[dict[str, Any]],
        rows: int,
        states: Iterable[dict[str, Any]],
        hook_state: dict[str, Any],
    ) -> None:
        """Hold exactly this of every timeline and layer of a stack of the same layout: see their `state_dict`.

        Groups share prefixes already where those of the other stack do.
        """
        self.hook.load_state_dict(hook_state)
        for timeline, state in zip(self.timelines, timelines, strict=True):
            timeline.load_state_dict(state, rows)
        for layer, state in zip(self.layers, states, strict=True):
            layer.load_state_dict(state)

    def load_keys_and_values(self, pairs: Sequence[Sequence[torch.Tensor]]) -> None:
        """Hold these keys and values [rows, kv_heads, tokens, head_dim] of all tokens, one pair per layer."""
        rows, _, total_tokens, _ = pairs[0][0].shape
        if self.finds_layers:
            self._make_layers([PLAIN] * len(pairs))
        self.hook.load_state_dict({})
        self.remove_suffixes()
        for timeline in self.timelines:
            timeline.adopt(total_tokens, None, rows)
        for layer, pair in zip(self.layers, pairs, strict=True):
            evicted = layer.timeline.evicted_tokens
            content = zip(("keys", "values"), pair, strict=True)
            layer.load_dense({name: tensor[:, :, evicted:] for name, tensor in content})
        self.log = None

    @property
    def why_not_compiled(self) -> str | None:
        """See `EngineCache.why_not_compiled`."""
        if self.shared_timelines:
            return "a graph reads one tensor per layer, and here rows share the prefix of their prompt"
        blocker = self.layout.compile_blocker
        return QUANTIZES if self.is_quantized and blocker in (None, MOVES) else blocker
