"""Steps of loops that never announce them: transformers' `generate`, or plain `model(...)`.

The first use of a layer opens a step and commits the one before. What is read in between is answered as if the step
before had been committed already.
"""

from __future__ import annotations

import logging
import sys
from types import FrameType

import torch
from transformers import PreTrainedModel

from caches.core.layer_stack import LayerStack
from caches.core.row_selection import RowSelection
from caches.errors import StepError
from caches.layers.layer_spec import KV, MODEL_SPECIFIC, PLAIN, LayerSpec
from caches.platform.torch_api import module_call_code

_logger = logging.getLogger("caches")


class ImplicitSteps:
    """Opens and ends the steps of `stack` that no `begin` announced.

    calls: the uses of layers in the open step. reached: the components of layers that it has come to. required: those
    that every whole forward comes to.
    """

    def __init__(self, stack: LayerStack, selection: RowSelection):
        self.stack, self.selection = stack, selection
        self.calls: set[tuple[int, str]] = set()
        self.reached: set[tuple[int, str]] = set()
        self.required: set[tuple[int, str]] = set()
        self.require_all()

    @property
    def is_open(self) -> bool:
        """Whether a step is open that was not announced."""
        return self.stack.is_open and not self.stack.is_announced

    @property
    def is_complete(self) -> bool:
        """Whether such a step has reached every layer."""
        return self.is_open and self.reached >= self.required

    @property
    def uncommitted(self) -> int:
        """Tokens of a step that is complete and not committed yet."""
        # A step of one token may use a model without attention unseen: it writes its states in place.
        return (self.stack.pending or 1) if self.is_complete else 0

    def has_reached(self, layer_idx: int) -> bool:
        """Whether an open step has reached this layer."""
        return self.is_open and any(index == layer_idx for index, _ in self.reached)

    def require_all(self) -> None:
        """Wait for all layers of the cache."""
        self.required = {use for index, spec in enumerate(self.stack.specs) for use in _uses(index, spec)}

    def require_layers_of(self, model: PreTrainedModel | None) -> None:
        """Wait for the layers that a model uses, where those are fewer than the cache has. None: for all."""
        self.require_all()
        if model is not None:
            indexes = {getattr(module, "layer_idx", None) for module in model.modules()}
            config = model.config.get_text_config(decoder=True)
            count = getattr(config, "num_decoder_layers", None) or getattr(config, "num_hidden_layers", None)
            used = {use for use in self.required if use[0] in indexes and (count is None or use[0] < count)}
            self.required = used or self.required

    def required_and_used(self) -> set[tuple[int, str]]:
        """Of `required` what was ever used: after a whole forward, the others never take part."""
        return {(index, component) for index, component in self.required if self.stack.layers[index].is_initialized}

    def end(self) -> None:
        """Between steps: end an open step, and carry out what was deferred.

        Raises `StepError` where a step was announced, or rows are half selected.
        """
        self.end_step()
        self.selection.check_finished()

    def end_step(self) -> None:
        """End an open step. A deferred selection may stay pending. Raises `StepError` where a step was announced."""
        stack = self.stack
        if not self.is_open:
            stack.check_closed()
        elif not self.is_complete:
            self._give_up()
        else:
            if stack.pending == 0:
                stack.place(1)
            tokens = stack.pending
            stack.commit()
            if tokens == 1:
                self.selection.unshare_if_materialized()

    def take_back(self, tokens: int) -> bool:
        """Commit a complete step without its last tokens, as other loops need it that have verified a draft: what
        windows evict is there until the step ends. tokens: see `EngineCache.crop`. Returns whether it was possible."""
        stack = self.stack
        if not (self.is_open and self.is_complete and stack.pending):
            return False
        remove = max(0, stack.total_tokens + stack.pending - tokens) if tokens > 0 else -tokens
        if not (0 < remove < stack.pending and stack.can_reject(remove)):
            return False
        self.selection.check_finished()
        stack.commit(remove)
        return True

    def end_if_complete(self, is_over: bool) -> None:
        """Commit a step once it has reached every layer: then what layers hold can be read.

        is_over: the forward is known to have ended, so what it did not reach never takes part.
        """
        if is_over and self.stack.is_open:
            self.required &= self.reached
        if self.is_complete or not self.stack.is_open:
            self.end()

    def _give_up(self) -> None:
        """A forward failed half-way, as far as that can be known: undo the step."""
        layers, needed = ({index for index, _ in uses} for uses in (self.reached, self.required | self.reached))
        _logger.warning(
            "a forward reached %d of the %d layers of this %s cache (up to layer %d) before the next one began: it "
            "counts as failed, and its %d tokens were not kept. If the model has only these layers, build the cache "
            "with a configuration that says so (num_hidden_layers)",
            *(len(layers), len(needed), self.stack.layout.name, max(layers, default=-1), self.stack.pending),
        )
        self.stack.abort()

    def use(self, layer_idx: int, call: str, tokens: int | None) -> None:
        """A model uses a layer: that may end the step before, and open one. tokens: of the step, where known."""
        stack = self.stack
        if self.is_open and (layer_idx, call) in self.calls:
            self.end()
        is_new = not stack.is_open
        if is_new:
            self._begin()
        if tokens is not None and stack.pending == 0:
            self._check_windows(tokens)
            stack.place(tokens)
        elif is_new:
            stack.open_states()
        if is_new:
            stack.is_open, stack.log = True, None  # the tokens that another loop feeds are not known
        if stack.total_tokens == 0 and all(index != layer_idx for index, _ in self.required):
            self.require_all()  # a model that numbers its layers while it computes
        self.calls.add((layer_idx, call))

    def _begin(self) -> None:
        self.selection.check_finished()
        self.calls.clear()
        self.reached.clear()
        if torch.compiler.is_compiling():
            return
        if self.stack.total_tokens > 0:  # steps of another loop may have shown which layers take part
            self.required = self.required_and_used()
        elif not self.stack.finds_layers:
            self.require_layers_of(model_at_work())

    def _check_windows(self, tokens: int) -> None:
        """Only the engine masks what is further back than a window that the cache imposes."""
        stack = self.stack
        windows = [stack.imposed_window(index) for index in range(len(stack.layers))]
        narrow = min((window for window in windows if window is not None), default=None)
        cached = stack.total_tokens + self.uncommitted
        if narrow is not None and tokens > 1 and cached + tokens > narrow:
            raise StepError(
                f"a step of {tokens} tokens after {cached} would look further back than the window of {narrow} that "
                f"the {stack.layout.name} cache imposes: generate with our engine, or feed the tokens after the first "
                f"{narrow} one by one"
            )

    def find_layer(self, layer_idx: int | None, component: str) -> None:
        """Add layers up to this one to a cache that adds them as they are used."""
        stack = self.stack
        if layer_idx is None or layer_idx < len(stack.layers):
            return
        if component != KV or stack.total_tokens > 0:
            raise StepError(
                f"layer {layer_idx} appears in a cache that was built without a configuration"
                + (" and keeps a state" if component != KV else " after the first step, so that step died half-way")
                + ": build it with config=model.config"
            )
        while len(stack.layers) <= layer_idx:
            self.required |= set(_uses(len(stack.layers), PLAIN))
            stack.add_layer(PLAIN)


def _uses(index: int, spec: LayerSpec) -> list[tuple[int, str]]:
    """The components that every whole forward reaches in a layer."""
    return [(index, KV if component == MODEL_SPECIFIC else component) for component in spec.components]


def model_at_work() -> PreTrainedModel | None:
    """The innermost model whose forward is running in this thread; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    code = module_call_code()
    while frame is not None:
        # Only variables are read: what they refer to lives as long as the call in any case.
        if frame.f_code is code:
            module = frame.f_locals.get("self")
            if isinstance(module, PreTrainedModel):
                return module
        frame = frame.f_back
    return None
