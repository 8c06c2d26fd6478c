"""transformers' own cache objects, used in place by the engine's loop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from weakref import WeakKeyDictionary, ref

import torch
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, EncoderDecoderCache, QuantizedLayer, StaticLayer

from caches.core.row_selection import keeps_all_rows, repeated
from caches.errors import StepError, UnsupportedLayerError
from caches.layers.quirks import quirks_of
from caches.platform.torch_api import write_count
from caches.platform.transformers_api import follows_rows, quantized_parts, quantized_rows
from caches.platform.undo import on_failure
from caches.protocol import Capabilities, EngineCache, TokenLog, capabilities

_STATES = ("conv_states", "recurrent_states")
_QUANTIZED = getattr(cache_utils, "BaseQuantizedLayer", QuantizedLayer)  # not in 5.17

# Of caches that the engine filled: their token log, how many tokens it fed, how many of them it lacks, and the tensors
# with their versions.
_logs: WeakKeyDictionary[TransformersCache, tuple[TokenLog, int, int, list[tuple[ref[torch.Tensor], int]]]] = (
    WeakKeyDictionary()
)


class HFCacheAdapter:
    """The operations of a step on a cache that has only `update` and `crop`.

    A sliding layer of transformers evicts in the middle of a step, and the first step writes the cross part of an
    encoder-decoder cache. Such a step cannot be undone: when it fails the cache is lost, `handle` becomes None and a
    `begin` on the same object raises `StepError`, until it is emptied.

    Other code may shorten layers in the middle of a step, as pruners do: the tokens that it lacks then still count.
    """

    max_rows = None
    why_not_compiled = "it writes where transformers' own bookkeeping says, not where the engine decides"

    def __init__(self, cache: TransformersCache):
        self._cache = cache
        self._own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        self._tokens_before: int | None = None  # while a step is open
        self._before: list[dict[str, object] | None] = []  # the attributes of layers that cannot crop
        self._tokens = 0  # of the open step
        self._lost = False
        # _read: tokens committed by us: a cache of states alone does not count them. _evicted: those of which layers
        # hold nothing: other code has shortened them.
        _, self._read, self._evicted, _ = _logs.get(cache, (None, 0, 0, []))
        if self.log is None:
            self._read = self._evicted = 0
        self._index: torch.Tensor | None = None  # while rows are chosen: of which rows,
        self._left: list[CacheLayerMixin] = []  # and the layers that still have those of before
        self.name = type(cache).__name__

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(rollback="sometimes", rollback_blocker=self.why_not_taken_back, is_lost=self._lost)

    @property
    def log(self) -> TokenLog | None:
        """The tokens that the engine's last run left in it, as long as no other loop has written to it since."""
        log, _, _, refs = _logs.get(self._cache, (None, 0, 0, []))
        if log is None or log.ids.shape[1] < self.total_tokens:
            return None
        live = list(self._tensors())
        is_unchanged = len(live) == len(refs) and all(
            was() is tensor and _version(tensor) == version for tensor, (was, version) in zip(live, refs, strict=True)
        )
        return log if is_unchanged else None

    @log.setter
    def log(self, log: TokenLog | None) -> None:
        _logs.pop(self._cache, None)
        live = list(self._tensors())
        # Tensors of inference mode do not count how often they were written. Codes, which HQQ makes in it, never are.
        uncoded = [tensor for layer in self._layers if not isinstance(layer, _QUANTIZED) for tensor in _tensors(layer)]
        if log is not None and not any(tensor.is_inference() for tensor in uncoded):
            _logs[self._cache] = log, self._read, self._evicted, [(ref(tensor), _version(tensor)) for tensor in live]

    @property
    def handle(self) -> TransformersCache | None:
        return None if self._lost else self._cache

    @property
    def total_tokens(self) -> int:
        layers = self._own.layers
        if layers and not any(hasattr(layer, "get_seq_length") for layer in layers):
            return self._read
        return int(self._own.get_seq_length()) + self._evicted

    @property
    def batch_size(self) -> int:
        return next((rows for layer in self._layers if (rows := _rows(layer)) is not None), -1)

    @property
    def max_tokens(self) -> int | None:
        # Sliding layers name their window; a fixed layer of full attention names what it can hold, a growing one -1.
        limits = [layer.get_max_length() for layer in self._own.layers if not getattr(layer, "is_sliding", False)]
        limits = [limit for limit in limits if limit >= 0]
        return min(limits) if limits else None

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def device_bytes(self) -> int:
        """transformers keeps on the host what is not on an accelerator, if there is one."""
        off_device_tensors = [tensor for tensor in self._tensors() if tensor.device.type == "cpu"]
        off_device = sum(tensor.nbytes for tensor in off_device_tensors)
        return self.bytes if off_device == self.bytes else self.bytes - off_device

    @property
    def sections(self) -> list[TransformersCache]:
        """The decoder's cache, and the encoder's where there is one."""
        return [self._own] if self._own is self._cache else [self._own, self._cache.cross_attention_cache]

    @property
    def _layers(self) -> list[CacheLayerMixin]:
        return [layer for section in self.sections for layer in section.layers]

    def _tensors(self) -> Iterator[torch.Tensor]:
        for layer in self._layers:
            yield from _tensors(layer)
            yield from _tensors_of(quantized_parts(layer))

    def check_fits(self, model_config: PreTrainedConfig) -> None:
        """Whether it is for models with an encoder; transformers' layers do not say what they were built for."""
        if quirks_of(model_config).has_own_cache:
            raise UnsupportedLayerError(
                f"models of type {model_config.model_type!r} keep states in a cache of their own class, not in its "
                f"layers, so a {self.name} cannot follow rows or take back a step here: use cache='dynamic'"
            )
        if (self._own is self._cache) == bool(model_config.is_encoder_decoder):
            expected = "an EncoderDecoderCache" if self._own is self._cache else "a cache that is not for two parts"
            raise UnsupportedLayerError(f"the model needs {expected}, but this is a {self.name}")

    def begin(self, tokens: int, graph: bool = False) -> None:
        self._check_finished()
        if graph:
            raise StepError(f"a compiled step needs one of our own fixed caches, not a {self.name}")
        lengths = {int(layer.get_seq_length()) for layer in self._own.layers if _is_filled(layer)}
        if len(lengths) > 1:
            raise StepError(
                f"the layers of this {self.name} hold {min(lengths)} to {max(lengths)} tokens: a step failed half-way "
                "and could not be taken back, or other code has shortened them by different numbers. Start with an "
                "empty cache, and shorten all layers alike"
            )
        if self.total_tokens == 0 and any(
            any(layer.has_previous_state.values()) for layer in self._own.layers if _is_state(layer)
        ):
            raise StepError(
                f"this {self.name} does not say how many tokens its states have read: start with an empty one"
            )
        if self._own is not self._cache and self.total_tokens == 0:  # it may hold the encoder's keys of another source
            self.reset()
        self._before = [_attributes(layer) if _restores_attributes(layer) else None for layer in self._own.layers]
        self._tokens_before, self._tokens = self.total_tokens, tokens

    def can_reject(self, rejected: int) -> bool:
        if not rejected:
            return True
        is_complete = self.total_tokens >= (self._tokens_before or 0) + self._tokens  # else other code has shortened it
        return is_complete and all(self._can_take_back(layer, rejected) for layer in self._own.layers)

    def commit(self, rejected: int = 0) -> None:
        if not self.can_reject(rejected):
            full = next(layer for layer in self._own.layers if not self._can_take_back(layer, rejected))
            raise StepError(f"the last {rejected} tokens cannot be taken back from a full {type(full).__name__}")
        if rejected:
            for index, layer in enumerate(self._own.layers):
                self._take_back(index, layer, rejected)
        else:
            for layer in self._own.layers:
                if _is_window(layer) and layer.record_past and _is_filled(layer):
                    layer.crop(0)  # what has left the window
        self._read += self._tokens - rejected
        self._evicted += max(0, (self._tokens_before or 0) + self._tokens - rejected - self.total_tokens)
        self._tokens_before, self._before = None, []

    def abort(self) -> None:
        """Take back the layers that the failed step had reached, as far as their classes can."""
        if self._tokens_before is None:
            return
        tokens_before = self._tokens_before
        self._lost |= self._own is not self._cache and tokens_before == 0
        for index, layer in enumerate(self._own.layers):
            ahead = int(layer.get_seq_length()) + self._evicted - tokens_before if _is_filled(layer) else 0
            if not ahead and not _restores_attributes(layer):
                continue
            # Other code may have shortened it.
            is_complete = ahead >= self._tokens or tokens_before == 0 or _restores_attributes(layer)
            if is_complete and self._can_take_back(layer, self._tokens):
                self._take_back(index, layer, ahead)
            else:
                self._lost = True
        self._tokens_before, self._before = None, []

    def keep_past(self, keep: bool) -> None:
        """Whether windows keep what leaves them in a step until it is committed, so that tokens can be taken back."""
        for layer in self._own.layers:
            if _is_window(layer):
                layer.record_past = keep

    @property
    def why_not_taken_back(self) -> str | None:
        """Why tokens that were read cannot be taken back; None where they can."""
        for layer in self._own.layers:
            croppable = getattr(layer, "is_croppable", False) and not isinstance(layer, _QUANTIZED)
            if not (croppable or _is_fixed(layer) or _is_state(layer) or _is_window(layer)):
                return f"a {type(layer).__name__} of transformers' cannot give tokens back"
        return None

    def _can_take_back(self, layer: CacheLayerMixin, tokens: int) -> bool:
        """Whether the layer's last tokens can be cropped; states and codes only go back by the open step."""
        if _restores_attributes(layer):
            return self._tokens_before is not None and tokens == self._tokens
        if _is_fixed(layer):
            return True
        if _is_full(layer) and self._tokens_before is None:  # between steps what has left the window is evicted
            return False
        return getattr(layer, "is_croppable", False) and (not _is_full(layer) or getattr(layer, "record_past", False))

    def _take_back(self, index: int, layer: CacheLayerMixin, tokens: int) -> None:
        attributes = self._before[index] if index < len(self._before) else None
        if attributes is None:
            _crop(layer, tokens)
        else:
            vars(layer).update(attributes)

    def select_rows(self, index: torch.Tensor) -> None:
        self._check_finished()
        for layer in self._layers:
            if isinstance(layer, _QUANTIZED) and not follows_rows(layer):
                raise UnsupportedLayerError(
                    f"beams and several texts per prompt reorder rows, and a {type(layer).__name__} of this release of "
                    "transformers reorders its exact tokens alone: use cache='quantized', or a later release"
                )
        if not keeps_all_rows(index, self.batch_size):
            self._index, self._left = index, self._layers
            self.finish()

    @property
    def unfinished(self) -> bool:
        return bool(self._left)

    def finish(self) -> None:
        while self._left:
            layer = self._left[-1]
            attributes = {name: dict(item) if isinstance(item, dict) else item for name, item in vars(layer).items()}
            with on_failure(partial(vars(layer).update, attributes)):  # it reorders its keys before its values
                layer.reorder_cache(self._index)
            self._left.pop()

    def _check_finished(self) -> None:
        if self._left:
            raise StepError(
                f"the last selection of rows failed half-way, so {len(self._left)} layers of this {self.name} still "
                "have the rows of before: finish() goes on where it stopped, reset() empties the cache"
            )

    def fork(self, times: int) -> None:
        """What transformers' caches hold is copied."""
        self.select_rows(repeated(self.batch_size, times))

    def crop(self, tokens: int) -> None:
        self._check_finished()
        remove = max(0, self.total_tokens - tokens) if tokens > 0 else min(-tokens, self.total_tokens)
        if remove and self._evicted:
            raise StepError(
                f"other code has shortened this {self.name}: {self._evicted} of its {self.total_tokens} tokens are "
                f"evicted, so which are the last {remove} is not known. Reset it and feed the tokens to keep again"
            )
        for layer in self._own.layers:
            if _restores_attributes(layer) or not self._can_take_back(layer, remove):
                raise StepError(f"the last {remove} tokens cannot be taken back from a {type(layer).__name__}")
        for layer in self._own.layers:
            _crop(layer, remove)
        self._read -= remove

    def reserve(self, tokens: int) -> None:
        """Nothing to reserve: transformers' caches make their own room."""

    def reset(self) -> None:
        self._cache.reset()
        self._read, self._evicted, self._left, self._lost = 0, 0, [], False
        for layer in self._layers:  # in transformers 5.17 a growing layer only becomes zeros of the same length
            if _is_filled(layer) and not hasattr(layer, "max_cache_len"):
                layer.keys = layer.values = None
                layer.is_initialized = False


def may_be_lost(cache: EngineCache) -> bool:
    """Whether a step of the cache cannot always be undone."""
    return capabilities(cache).rollback == "sometimes"


def _is_filled(layer: CacheLayerMixin) -> bool:
    return hasattr(layer, "get_seq_length") and getattr(layer, "is_initialized", False)


def _is_fixed(layer: CacheLayerMixin) -> bool:
    """Whether it writes into tensors of the full size, where what is behind the last token is not read."""
    return type(layer) is StaticLayer


def _crop(layer: CacheLayerMixin, tokens: int) -> None:
    if _is_fixed(layer):
        layer.cumulative_length.sub_(tokens)  # in place: a graph may know it
    else:
        layer.crop(-tokens)


def _is_window(layer: CacheLayerMixin) -> bool:
    return hasattr(layer, "record_past") and hasattr(layer, "sliding_window") and not _is_state(layer)


def _is_full(layer: CacheLayerMixin) -> bool:
    """Whether it has a window, and as many tokens as that."""
    window = getattr(layer, "sliding_window", None)
    return window is not None and _is_filled(layer) and int(layer.get_seq_length()) >= window


def _is_state(layer: CacheLayerMixin) -> bool:
    return hasattr(layer, _STATES[0])


def _restores_attributes(layer: CacheLayerMixin) -> bool:
    """Whether it is taken back by putting its attributes back: states, and codes of tokens encoded together."""
    return _is_state(layer) or isinstance(layer, _QUANTIZED)


def _rows(layer: CacheLayerMixin) -> int | None:
    if isinstance(layer, _QUANTIZED):
        return quantized_rows(layer) if _is_filled(layer) else None
    return next((tensor.shape[0] for tensor in _tensors(layer) if tensor.numel() > 0), None)


def _tensors(layer: CacheLayerMixin) -> Iterator[torch.Tensor]:
    """What it holds as it came, not as codes."""
    return _tensors_of([getattr(layer, name, None) for name in ("keys", "values", *_STATES)])


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else write_count(tensor)


def _tensors_of(value: object) -> Iterator[torch.Tensor]:
    """The tensors in containers, and those that a tensor of a library consists of."""
    if hasattr(value, "__tensor_flatten__"):
        value = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for element in value.values() if isinstance(value, dict) else value:
            yield from _tensors_of(element)


def _attributes(layer: CacheLayerMixin) -> dict[str, object]:
    """The layer's attributes, to be put back: keys that count are never written in place, states and clocks are."""

    def copied(value: object) -> object:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return value.clone()
        if not isinstance(value, dict):
            return value
        return {name: item.clone() if isinstance(item, torch.Tensor) else item for name, item in value.items()}

    return {name: copied(value) for name, value in vars(layer).items()}
