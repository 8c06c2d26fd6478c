"""Runs the forwards of a session: the full batch, chunked prefill or row groups, with less memory on request."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.utils import ModelOutput

from caches import EngineCache, StepError, apply_window, migrate
from caches.protocol import capabilities
from caches.transfer.convert import can_migrate
from caches.transfer.split_rows import SplitCache, halves
from engine.decoding.collected_outputs import CollectedOutputs, joined
from engine.model.forward import ModelRunner
from engine.model.linear_backend import TORCH
from engine.model.masks import Columns
from engine.model.rope_frequencies import Frequencies
from engine.request.encoder import index_rows, largest_matrix_bytes
from engine.request.model_kwargs import extend_model_kwargs

_SMALLEST_PIECE = 8  # tokens of a prompt


class ForwardExecutor:
    """cache: what the columns are kept in, another one after some of the ways to do with less memory.

    For the rest see `ModelSession`. routes: whether linear layers are routed: not where the runner has no table of
    routes.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: EngineCache,
        columns: Columns,
        *,
        rows: int,
        before: int,
        embeds: torch.Tensor | None,
        model_kwargs: dict[str, Any],
        flags: dict[str, bool],
        chunk_tokens: int | None,
        check: Callable[[], None] | None,
    ):
        self.cache, self.columns, self.routes = cache, columns, runner.linears != TORCH
        self._runner, self._before, self._embeds, self._check = runner, before, embeds, check
        self.model_kwargs, self._axes = extend_model_kwargs(runner.model, model_kwargs, columns.room)
        self._flags, self._chunk_tokens, self._asked_chunk_tokens = flags, chunk_tokens, chunk_tokens
        # Which row of the prompt each row goes on from: what belongs to the prompt is the same for all of its rows.
        self._origins = torch.arange(rows)
        self._graphs = True
        self._frequencies = Frequencies(runner.model, runner.dynamic_ropes)
        self._is_rounded = False  # the cache was encoded because memory was out

    @property
    def reader(self) -> weakref.ref[PreTrainedModel]:
        """The model that is fed."""
        return weakref.ref(self._runner.model)

    @property
    def linears(self) -> str:
        """See `Stats`."""
        return self._runner.linears if self.routes else TORCH

    def computed(
        self, ids: torch.Tensor, prefill: bool, gathered: CollectedOutputs
    ) -> tuple[ModelOutput, torch.Tensor | None]:
        """Feed what the cache has not seen of `ids` [rows, tokens]: the last outputs, and the states of all."""
        self._reserve(self._before + ids.shape[1])
        try:
            fed = [(rows, self._fed(ids[rows], rows, cache, prefill, gathered)) for rows, cache in self.parts]
        except BaseException:
            if isinstance(self.cache, SplitCache):
                self.cache.abort()  # also the steps of the parts before
            raise
        try:
            outputs, states = zip(*(gathered.complete(rows, last) for rows, last in fed), strict=True)
            return joined(outputs), torch.cat(states) if gathered.hidden else None
        except BaseException:
            self.cache.abort()
            raise

    def _reserve(self, columns: int) -> None:
        """What is known of every column is known of so many."""
        self.columns.reserve(columns)
        if any(self.model_kwargs[name].shape[axis] < columns for name, axis in self._axes.items()):
            self.model_kwargs, _ = extend_model_kwargs(self._runner.model, self.model_kwargs, self.columns.room)

    def _fed(
        self, ids: torch.Tensor, rows: slice, cache: EngineCache, prefill: bool, gathered: CollectedOutputs
    ) -> ModelOutput:
        """The last outputs of a feed of these rows."""
        gathered.forget(rows, cache.total_tokens)
        columns, model_kwargs = self._of_rows(rows)
        return self._runner.feed(
            ids,
            columns,
            cache,
            before=self._before,
            prefill=prefill,
            embeds=None if self._embeds is None else self._embeds[rows],
            model_kwargs=model_kwargs,
            axes=self._axes,
            flags=self._flags | {"output_hidden_states": True} if gathered.hidden else self._flags,
            chunk_tokens=self._chunk_tokens,
            look=gathered.of(rows),
            keep=gathered.tokens,
            check=self._check,
            graphs=self._graphs,
            routes=self.routes,
            resume=self._frequencies.resume,
        )

    @property
    def parts(self) -> list[tuple[slice, EngineCache]]:
        """Which rows are computed together, and with which cache."""
        if isinstance(self.cache, SplitCache):
            return list(self.cache.shares)
        return [(slice(0, len(self._origins)), self.cache)]

    def _of_rows(self, rows: slice) -> tuple[Columns, dict[str, Any]]:
        """What is known of the columns of these rows, and their further inputs."""
        count = len(self._origins)
        if rows == slice(0, count):
            return self.columns, self.model_kwargs
        index = torch.arange(rows.start, rows.stop, device=self.columns.device)
        model_kwargs = {name: index_rows(value, index, count) for name, value in self.model_kwargs.items()}
        return self.columns.of_rows(index), model_kwargs

    def choosing(self, index: torch.Tensor) -> Callable[[], None] | None:
        """What makes row i row `index[i]`, an index on the CPU, in all but the cache, and cannot fail.

        None where all rows keep their prompt.
        """
        origins = self._origins[index]
        if torch.equal(origins, self._origins):
            return None
        index = index.to(self.columns.device)
        columns = self.columns.of_rows(index)
        embeds = None if self._embeds is None else self._embeds[index]
        model_kwargs = {name: index_rows(value, index, len(self._origins)) for name, value in self.model_kwargs.items()}

        def choose() -> None:
            self._origins, self.columns, self._embeds, self.model_kwargs = origins, columns, embeds, model_kwargs

        return choose

    # Ways to do with less memory.

    @property
    def largest_matrix_bytes(self) -> int:
        """Of the model's weights: about as much a library may take at once to rearrange one."""
        return largest_matrix_bytes(self._runner.model)

    def release(self) -> None:
        """Go on without compiled graphs, and rejected scratch memory: a step makes what it needs of it anew."""
        self._graphs = False
        self._runner.drop_graphs()
        for _, cache in self.parts:
            if can_migrate(cache):
                for part in cache.parts:
                    part.scratch.release()

    def read_in_smaller_pieces(self, waiting: int) -> int | None:
        """Cut the tokens that wait to be fed into smaller pieces: the tokens of one. None where that is no use."""
        tokens = waiting if self._chunk_tokens is None else min(waiting, self._chunk_tokens)
        is_quantized = capabilities(self.cache).is_quantized and not self._is_rounded  # pieces would read codes
        if tokens <= _SMALLEST_PIECE or is_quantized or self.cache.handle is None or self._sees:
            return None
        self._chunk_tokens = max(_SMALLEST_PIECE, tokens // 4)
        return self._chunk_tokens

    @property
    def _sees(self) -> bool:
        return bool(set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL) & set(self.model_kwargs))

    def move_away(self, quantized: bool = False) -> str | None:
        """Move the cache where the device does not have to hold it; its new name and place. None where it is there."""
        residency = "disk" if self.columns.device.type == "cpu" else "host"
        changes = 0
        for number, (_, cache) in enumerate(self.parts):
            moved = _moved_away(cache, residency, quantized)
            if moved is None:
                continue
            changes += 1
            if isinstance(self.cache, SplitCache):  # at once: what it came from is empty
                self.cache.replace(number, moved)
            else:
                self.cache = moved
        self._is_rounded |= quantized and changes > 0
        self._chunk_tokens = self._asked_chunk_tokens  # it may have been the cache that had no room, not what is read
        place = "on disk" if residency == "disk" else "in host memory"
        return f"{self.cache.name} {place}" if changes else None

    def impose(self, window_length: int) -> None:
        """Go on with the last columns of the cache alone."""
        slid: list[EngineCache] = []
        for _, cache in self.parts:
            if not can_migrate(cache):
                raise StepError(f"a window cannot be imposed on a {cache.name} cache")
            slid.append(apply_window(cache, window_length))
        self._take_parts(slid)

    def _take_parts(self, caches: list[EngineCache]) -> None:
        """What the parts hold is in these caches from here on."""
        if not isinstance(self.cache, SplitCache):
            [self.cache] = caches
            return
        for number, cache in enumerate(caches):
            self.cache.replace(number, cache)

    def split(self) -> int | None:
        """Compute the rows in smaller parts from here on: how many there are. None where none can be smaller."""
        if self._sees:
            return None
        cache = halves(self.cache, self._origins)
        if cache is None:
            return None
        self.cache = cache
        return len(cache.parts)


def _moved_away(cache: EngineCache, residency: str, quantized: bool) -> EngineCache | None:
    if not can_migrate(cache):
        return None
    if capabilities(cache).imposes_windows:
        raise StepError(f"the {cache.name} cache imposes a window on the model, and no cache that lives elsewhere does")
    name = "offloaded_quantized" if quantized or cache.is_quantized else "offloaded"
    is_away = cache.name == name and (residency == "host" or "disk" in cache.bytes_by_place)
    return None if is_away else migrate(cache, name, residency=residency)
