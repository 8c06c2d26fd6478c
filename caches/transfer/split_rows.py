"""A cache of rows that are computed part after part, made of one cache for each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from transformers.cache_utils import Cache as TransformersCache

from caches.core.row_transfer import deal_rows, gather_rows
from caches.errors import CacheError, StepError
from caches.hf.no_cache import NoCache
from caches.protocol import Capabilities, EngineCache, TokenLog, can_predict, capabilities
from caches.transfer.convert import can_migrate


class SplitCache:
    """See `EngineCache`; `begin` is called on the parts themselves. Rows move within a part, never to another.

    parts: the caches. sizes: how many rows each of them has.
    """

    max_rows = None
    why_not_compiled = "its rows are computed part after part"

    def __init__(self, caches: Sequence[EngineCache], sizes: Sequence[int]):
        self.parts, self.sizes, self.name = list(caches), list(sizes), caches[0].name
        self.log: TokenLog | None = None
        self._waiting: list[tuple[EngineCache, Callable[[], None]]] = []  # parts whose rows are still to be selected
        self._is_given_up = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(can_split=True, can_predict=True, is_quantized=capabilities(self.parts[0]).is_quantized)

    def replace_by(self, cache: EngineCache, replacements: Sequence[EngineCache], sizes: Sequence[int]) -> None:
        """Put `replacements`, of `sizes` rows each, in the place of `cache`."""
        number = next(number for number, candidate in enumerate(self.parts) if candidate is cache)
        self.parts[number : number + 1], self.sizes[number : number + 1] = replacements, sizes

    def replace(self, number: int, cache: EngineCache) -> None:
        """Put `cache` in the place of the part with that number."""
        self.parts[number] = cache
        self.name = self.parts[0].name

    @property
    def handle(self) -> TransformersCache | None:
        return None if self._is_given_up else self.parts[0].handle

    @property
    def total_tokens(self) -> int:
        return min(cache.total_tokens for cache in self.parts)

    @property
    def batch_size(self) -> int:
        return -1 if any(cache.batch_size == -1 for cache in self.parts) else sum(self.sizes)

    @property
    def max_tokens(self) -> int | None:
        return self.parts[0].max_tokens

    @property
    def bytes(self) -> int:
        return sum(cache.bytes for cache in self.parts)

    @property
    def device_bytes(self) -> int:
        return sum(cache.device_bytes for cache in self.parts)

    def growth(self, tokens: int) -> int:
        """How many bytes more it will take of the device when there is room for `tokens` more."""
        return sum(cache.growth(tokens) for cache in self.parts if can_predict(cache))

    @property
    def rows_of_parts(self) -> Iterator[tuple[slice, EngineCache]]:
        """The parts, each with the rows that it has."""
        end = 0
        for cache, size in zip(self.parts, self.sizes, strict=True):
            begin, end = end, end + size
            yield slice(begin, end), cache

    def check_fits(self, model_config: object) -> None:
        for cache in self.parts:
            cache.check_fits(model_config)

    def begin(self, tokens: int, graph: bool = False) -> None:
        raise StepError("rows that are split are computed part after part: begin a step of each part")

    def can_reject(self, rejected: int) -> bool:
        return all(cache.can_reject(rejected) for cache in self.parts)

    def commit(self, rejected: int = 0) -> None:
        for cache in self.parts:
            cache.commit(rejected)

    def abort(self) -> None:
        for cache in self.parts:
            cache.abort()

    def select_rows(self, index: torch.Tensor) -> None:
        owners = torch.bucketize(index, torch.tensor(self.sizes, device="cpu").cumsum(0), right=True)
        if bool((owners[1:] < owners[:-1]).any()):
            raise StepError(f"select_rows({index.tolist()}) would move rows between parts of {self.sizes}")
        begins = torch.tensor([0, *self.sizes], device="cpu").cumsum(0)
        chosen = [index[owners == number] - begins[number] for number in range(len(self.parts))]
        selected = [(cache, rows) for cache, rows in zip(self.parts, chosen, strict=True) if len(rows)]
        self.parts, self.sizes = [cache for cache, _ in selected], [len(rows) for _, rows in selected]
        self._waiting = [(cache, partial(cache.select_rows, rows)) for cache, rows in selected]
        self.finish()

    def fork(self, times: int) -> None:
        self.sizes = [size * times for size in self.sizes]
        self._waiting = [(cache, partial(cache.fork, times)) for cache in self.parts]
        self.finish()

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting)

    def finish(self) -> None:
        while self._waiting:
            cache, select = self._waiting[0]
            if cache.unfinished:
                cache.finish()
            else:
                select()
            del self._waiting[0]

    def crop(self, tokens: int) -> None:
        for cache in self.parts:
            cache.crop(tokens)

    def reserve(self, tokens: int) -> None:
        for cache in self.parts:
            cache.reserve(tokens)

    def reset(self) -> None:
        self._waiting = []
        for cache in self.parts:
            cache.reset()

    def bring_together(self) -> None:
        """After a failure some parts may have more tokens than others: crop all to those that all have."""
        self.abort()
        try:
            self.crop(self.total_tokens) if self.total_tokens else self.reset()
        except CacheError:
            self.reset()

    def joined(self) -> EngineCache:
        """One cache of all rows; the parts are empty afterwards."""
        caches = [cache for cache in self.parts if can_migrate(cache)]
        return gather_rows(caches) if caches else self.parts[0]

    def give_up(self) -> None:
        """Reset, and have no `handle` from here on: no run can continue it."""
        self._is_given_up = True
        self.reset()


def halves(cache: EngineCache, prompts: torch.Tensor) -> SplitCache | None:
    """`cache` in parts half as large, with the rows of one prompt together. None where nothing can be split.

    Every part is emptied on the way, so no more than about a layer of it is there twice. Where that fails, the parts
    before it stay split and the others whole.

    prompts: LongTensor [rows], the prompt that each row belongs to, in ascending order.
    """
    rows_of_parts = cache.rows_of_parts if isinstance(cache, SplitCache) else [(slice(0, len(prompts)), cache)]
    to_split: list[tuple[EngineCache, list[int]]] = []
    for rows, full in rows_of_parts:
        of_prompts = prompts[rows].unique_consecutive(return_counts=True)[1]
        half = len(of_prompts) // 2
        if half:
            to_split.append((full, [int(of_prompts[:half].sum()), int(of_prompts[half:].sum())]))
    if not to_split:
        return None
    split = cache if isinstance(cache, SplitCache) else None
    for full, sizes in to_split:
        dealt = _dealt(full, sizes)
        if split is None:
            return SplitCache(dealt, sizes)
        split.replace_by(full, dealt, sizes)
    return split


def _dealt(cache: EngineCache, sizes: list[int]) -> list[EngineCache]:
    if not capabilities(cache).can_split:
        raise StepError(f"the rows of a {cache.name} cannot be split")
    if cache.handle is None:  # it keeps nothing
        return [NoCache(cache.name) for _ in sizes]
    if not can_migrate(cache):
        raise StepError(f"the rows of a {cache.name} cannot be split: it was not made by caches.build")
    # As many as these rows may become, where there was room for all of what all may become.
    rooms = [None if cache.max_rows is None else cache.max_rows * size // sum(sizes) for size in sizes]
    return list(deal_rows(cache, sizes, rooms))
