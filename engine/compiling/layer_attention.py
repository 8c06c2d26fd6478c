"""Attention of compiled layers, whose code leaves the cache and attention over it to the step: it is the same for all.

The code calls the operator `layer_attention` of `native/dense_attention.cpp`. It computes attention itself in layers
that are open, and otherwise hands the new query, key and value to what `run` was given.
"""

from __future__ import annotations

import builtins
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import library, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache as TransformersCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from caches import Cache
from caches.attention.kernels import KERNELS, close_layers, empty_output, open_layers
from caches.hf.joined import JoinedCaches
from engine.errors import OptionError
from engine.kernels.attention_hook import is_plain

T = TypeVar("T")

Compute: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From query [rows, heads, tokens, width], key and value [rows, kv_heads, tokens, width] of the new tokens to what
attention finds, [rows, tokens, heads, width]."""

Code: TypeAlias = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""A compiled layer."""

Function: TypeAlias = Callable[..., tuple[torch.Tensor, object]]
"""An attention function of transformers: of a module, query, keys, values, mask and options."""

PLAIN = (bool, int, float, str, type(None))  # the types of arguments that compiled code has as constants


class LayerAttention(NamedTuple):
    """How a layer, of this number, calls attention: which function, with which module and options. is_plain: whether
    that is transformers' "sdpa" with no options that the kernel does not know."""

    number: int
    function: Function
    module: nn.Module
    options: dict[str, Any]
    is_plain: bool = False

    def compute(
        self, handle: TransformersCache, mask: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See `Compute`. handle: the model's argument for the cache, which is updated. mask: of all that it holds."""
        # A cache may keep the tensors that it is given, and compiled code writes other values there afterwards.
        keys, values = handle.update(key.clone(), value.clone(), self.number)
        return self.function(self.module, query, keys, values, mask, **self.options)[0]


def attentions_of(layers: Sequence[LayerAttention], handle: TransformersCache, mask: object) -> Sequence[Compute]:
    """Those of layers that are computed next in this thread, in this order, until `close_layers`; none where the
    operator computes them itself. handle, mask: see `compute`; all layers take the same mask."""
    if _are_opened(layers, handle, mask):
        return []
    close_layers()  # that an earlier layer of the step has opened
    return [partial(layer.compute, handle, mask) for layer in layers]


def _are_opened(layers: Sequence[LayerAttention], handle: TransformersCache, mask: object) -> bool:
    """Open them, in a step of one token per row, unless the cache or attention need more."""
    if not (isinstance(handle, (Cache, JoinedCaches)) and all(layer.is_plain for layer in layers)):
        return False
    if not (mask is None or isinstance(mask, torch.Tensor)):
        return False
    slots = handle.open_slots([layer.number for layer in layers])
    if slots is None:
        return False
    if isinstance(handle, JoinedCaches) and handle.are_visible(layers[0].number, max(rows.slots for rows in slots[0])):
        mask = None
    return open_layers(slots, mask, [layer.options.get("scaling") for layer in layers])


class AttentionCall(NamedTuple):
    """A layer's call of attention. inputs: query, key and value. found: the result."""

    attention: LayerAttention
    mask: object
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    found: torch.Tensor


class OpenCache:
    """A cache for one call of the layer of this number. `update` returns the new keys and values as they are; the
    attention that follows updates `handle`. A layer that reads these keys otherwise sees the new ones alone.

    calls: those attentions. is_used_otherwise: whether the layer calls anything else of the cache, or of attention.
    """

    def __init__(self, handle: TransformersCache, number: int):
        self._handle, self._number = handle, number
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None
        self.calls: list[AttentionCall] = []
        self.is_used_otherwise = False

    def update(
        self, key: torch.Tensor, value: torch.Tensor, number: int, *arguments: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of transformers' caches."""
        if self._new is not None or number != self._number or any(argument is not None for argument in arguments):
            raise _unknown_attention()
        self._new = key, value
        return key, value

    def __getattr__(self, name: str) -> object:
        self.is_used_otherwise = True
        return getattr(self._handle, name)

    def watch(self, forward: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]) -> T:
        """Call a layer's forward with arguments that have this object. Raises `OptionError` where it cannot follow."""
        with _attention_by(self._attend):
            try:
                result = forward(*args, **kwargs)
            except Exception:
                if self._new is None:
                    raise
                raise _unknown_attention() from None
        if self._new is not None:
            raise _unknown_attention()
        return result

    def _attend(
        self,
        function: Function,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        **options: object,
    ) -> tuple[torch.Tensor, object]:
        if self._new is None or key is not self._new[0] or value is not self._new[1]:
            self.is_used_otherwise = True
            return function(module, query, key, value, attention_mask, **options)
        self._new = None
        attention = LayerAttention(self._number, function, module, options)
        output = attention.compute(self._handle, attention_mask, query, key, value)
        # A layer passes on arguments that the function does not read, tensors of one step among them.
        tensor_options = {name for name, option in options.items() if not isinstance(option, PLAIN)}
        self.is_used_otherwise |= any(_reads(function, name) for name in tensor_options)
        read_options = {name: option for name, option in options.items() if name not in tensor_options}
        attention = attention._replace(options=read_options, is_plain=is_plain(function, read_options))
        self.calls.append(AttentionCall(attention, attention_mask, (query, key, value), output))
        return output, None


def _unknown_attention() -> OptionError:
    return OptionError("its layers do not give what a cache returns to an attention function of transformers")


def _reads(function: Function, option: str) -> bool:
    """Whether an attention function may read this option. Those of transformers name what they read."""
    original = inspect.unwrap(function)
    return not original.__module__.startswith("transformers.") or option in inspect.signature(original).parameters


class TracedCache:
    """A cache while a layer is traced: `update` returns what it is given. The operator takes the place of attention."""

    def update(self, key: torch.Tensor, value: torch.Tensor, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value

    def trace(self, forward: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]) -> T:
        """Call a layer's forward with arguments that have this object."""
        with _attention_by(_traced):
            return forward(*args, **kwargs)


def _traced(function: Function, module: nn.Module, *inputs: object, **options: object) -> tuple[torch.Tensor, None]:
    return KERNELS.or_error().layer_attention(*inputs[:3]), None


class _Watched(threading.local):
    attend: Function | None = None


_watched = _Watched()
_watches: list[Function] = []  # of all threads
_lock = threading.Lock()


@contextmanager
def _attention_by(attend: Function) -> Iterator[None]:
    """In this thread `attend` takes the place of attention: it is given the function, then its arguments.

    Meanwhile the method by which models find their function is another one, in all threads.
    """
    outer, _watched.attend = _watched.attend, attend
    try:
        with _lock:
            _watches.append(attend)
            vars(ALL_ATTENTION_FUNCTIONS)["get_interface"] = _get_interface
        yield
    finally:
        _watched.attend = outer
        with _lock:
            _watches.remove(attend)
            if not _watches:
                del vars(ALL_ATTENTION_FUNCTIONS)["get_interface"]


def _get_interface(attn_implementation: str, default: Function) -> Function:
    function = AttentionInterface.get_interface(ALL_ATTENTION_FUNCTIONS, attn_implementation, default)
    if torch.compiler.is_dynamo_compiling() or _watched.attend is None:
        return function
    return partial(_watched.attend, function)


class _Running(threading.local):
    computes: Iterator[Compute] = iter(())
    error: BaseException | None = None


_running = _Running()


def run(codes: Sequence[Code], inputs: list[torch.Tensor], computes: Sequence[Compute]) -> list[torch.Tensor]:
    """What the last of some compiled layers returns, of which each takes first what the one before it returned.

    computes: attention of each; none where they are open. Raises what those raise.
    """
    _running.computes, _running.error = iter(computes), None
    results, (_, *shared) = inputs, inputs
    try:
        for code in codes:
            results = code([results[0], *shared])
            if computes and _running.error is not None:
                raise _running.error
        return results
    except RuntimeError as error:
        # A signal's handler may raise on entry to `_attention`: only its name and text are left.
        name, _, text = str(error).partition(": ")
        error_class = getattr(builtins, name, None)
        if isinstance(error_class, type) and issubclass(error_class, BaseException) and error is not _running.error:
            raise error_class(text) from error
        raise
    finally:
        _running.computes, _running.error = iter(()), None


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    try:
        return next(_running.computes)(query, key, value).contiguous()
    except BaseException as error:  # on its way through compiled code it would lose its type
        _running.error = error
        return empty_output(query, key, value).zero_()


_LIBRARY = library.Library("kvengine", "FRAGMENT")  # is kept: its end is that of the operator
_LIBRARY.define("layer_attention_in_python(Tensor query, Tensor key, Tensor value) -> Tensor")
_LIBRARY.impl("layer_attention_in_python", _attention, "CPU")
