"""transformers' own cache objects, driven in place by our loop."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import EncoderDecoderCache

from caches.errors import StepError, UnsupportedLayer


class ForeignCache:
    """The four operations of a step on a cache that has only `update` and `crop`."""

    fixed = False  # for our compiled step: it writes where transformers' own bookkeeping says

    def __init__(self, cache: TransformersCache):
        if isinstance(cache, EncoderDecoderCache):
            raise UnsupportedLayer("an EncoderDecoderCache belongs to an encoder-decoder model, which is not supported")
        self._cache = cache
        self._tokens = 0
        self._seen_before: int | None = None  # while a step is open
        self.name = type(cache).__name__

    @property
    def handle(self) -> TransformersCache:
        return self._cache

    @property
    def seen(self) -> int:
        return int(self._cache.get_seq_length())

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

    def begin(self, tokens: int, graph: bool = False) -> None:
        if graph:
            raise StepError(f"a compiled step needs one of our own fixed caches, not a {self.name}")
        self._seen_before, self._tokens = self.seen, tokens

    def settle(self, drop: int = 0) -> None:
        if drop:
            for layer in self._cache.layers:
                window = getattr(layer, "sliding_window", None)
                if window is not None and self.seen >= window and not getattr(layer, "record_past", False):
                    raise StepError(
                        f"the last {drop} tokens cannot be taken back from a {type(layer).__name__} that is full and "
                        "does not record its past"
                    )
            self._cache.crop(-drop)
        self._seen_before = None

    def abort(self) -> None:
        """Take back the layers that the failed step had reached. Raises `StepError` where their class cannot."""
        if self._seen_before is None:
            return
        before, self._seen_before = self._seen_before, None
        for layer in self._cache.layers:
            if not hasattr(layer, "get_seq_length") or int(layer.get_seq_length()) == before:
                continue
            if not getattr(layer, "is_croppable", False):
                raise StepError(
                    f"the failed step of {self._tokens} tokens cannot be taken back from a {type(layer).__name__}, "
                    "so this cache is no longer usable; generate with a cache of ours to keep it usable"
                )
            layer.crop(before - int(layer.get_seq_length()))

    def rows(self, index: torch.Tensor) -> None:
        self._cache.reorder_cache(index)

    def reserve(self, tokens: int) -> None:
        """Nothing to reserve: transformers' caches make their own room."""

    def reset(self) -> None:
        self._cache.reset()
