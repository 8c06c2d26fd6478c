"""transformers' own cache objects, driven in place by our loop."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import EncoderDecoderCache

from caches.driven import Log
from caches.errors import StepError, UnsupportedLayer


class ForeignCache:
    """The operations of a step on a cache that has only `update` and `crop`.

    A sliding layer of transformers forgets in the middle of a step. Once one is full, a step cannot be undone: when it
    fails the cache is lost, `handle` becomes None and a `begin` on the same object raises `StepError`.
    """

    fixed = False  # for our compiled step: it writes where transformers' own bookkeeping says

    def __init__(self, cache: TransformersCache):
        if isinstance(cache, EncoderDecoderCache):
            raise UnsupportedLayer("an EncoderDecoderCache belongs to an encoder-decoder model, which is not supported")
        self._cache = cache
        self._seen_before: int | None = None  # while a step is open
        self._lost = False
        self.name = type(cache).__name__

    @property
    def log(self) -> None:
        """Not kept: others can feed this cache unnoticed."""
        return

    @log.setter
    def log(self, log: Log | None) -> None:
        pass

    @property
    def handle(self) -> TransformersCache | None:
        return None if self._lost else self._cache

    @property
    def seen(self) -> int:
        return int(self._cache.get_seq_length())

    @property
    def batch_size(self) -> int:
        for layer in self._cache.layers:
            keys = getattr(layer, "keys", None)
            if _is_written(layer) and keys is not None and keys.numel() > 0:
                return keys.shape[0]
        return -1

    @property
    def max_tokens(self) -> int | None:
        # Sliding layers name their window; a fixed layer of full attention names what it can hold, a growing one -1.
        limits = [layer.get_max_length() for layer in self._cache.layers if not getattr(layer, "is_sliding", False)]
        limits = [limit for limit in limits if limit >= 0]
        return min(limits) if limits else None

    @property
    def bytes(self) -> int:
        tensors = (getattr(layer, name, None) for layer in self._cache.layers for name in ("keys", "values"))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def check_fits(self, model_config: Any) -> None:
        """Not known: transformers' layers do not say what they were built for."""

    def begin(self, tokens: int, graph: bool = False) -> None:
        if graph:
            raise StepError(f"a compiled step needs one of our own fixed caches, not a {self.name}")
        lengths = {int(layer.get_seq_length()) for layer in self._cache.layers if _is_written(layer)}
        if len(lengths) > 1:
            raise StepError(
                f"the layers of this {self.name} hold {min(lengths)} to {max(lengths)} tokens: a step failed half-way "
                "and could not be taken back. Start with an empty cache"
            )
        self._seen_before = self.seen

    def can_drop(self, drop: int) -> bool:
        return not drop or all(map(_can_take_back, self._cache.layers))

    def settle(self, drop: int = 0) -> None:
        if not self.can_drop(drop):
            full = next(layer for layer in self._cache.layers if not _can_take_back(layer))
            raise StepError(f"the last {drop} tokens cannot be taken back from a full {type(full).__name__}")
        if drop:
            self._cache.crop(-drop)
        self._seen_before = None

    def abort(self) -> None:
        """Take back the layers that the failed step had reached, as far as their classes can."""
        if self._seen_before is None:
            return
        before, self._seen_before = self._seen_before, None
        for layer in self._cache.layers:
            ahead = int(layer.get_seq_length()) - before if _is_written(layer) else 0
            if ahead and _can_take_back(layer):
                layer.crop(-ahead)
            elif ahead:
                self._lost = True

    def rows(self, index: torch.Tensor) -> None:
        self._cache.reorder_cache(index)

    def reserve(self, tokens: int) -> None:
        """Nothing to reserve: transformers' caches make their own room."""

    def reset(self) -> None:
        self._cache.reset()
        for layer in self._cache.layers:  # in transformers 5.17 a growing layer only becomes zeros of the same length
            if _is_written(layer) and int(layer.get_seq_length()) > 0:
                layer.keys = layer.values = None
                layer.is_initialized = False


def _is_written(layer: Any) -> bool:
    return hasattr(layer, "get_seq_length") and getattr(layer, "is_initialized", False)


def _can_take_back(layer: Any) -> bool:
    """Whether the layer's last tokens can be cropped."""
    window = getattr(layer, "sliding_window", None)
    is_full = window is not None and _is_written(layer) and int(layer.get_seq_length()) >= window
    return getattr(layer, "is_croppable", False) and (not is_full or getattr(layer, "record_past", False))
