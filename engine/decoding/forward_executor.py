"""Runs the forwards of a session: the full batch, chunked prefill or row groups, with less memory on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.utils import ModelOutput

from caches import EngineCache, StepError, apply_window, migrate
from caches.hf.cache import Cache
from caches.hf.encoder_decoder import EncoderDecoder
from caches.hf.joined import why_not_joined
from caches.protocol import capabilities
from caches.transfer.convert import can_migrate
from caches.transfer.split_rows import SplitCache, halves
from configs import OffloadedCacheConfig, OffloadedQuantizedCacheConfig
from engine.errors import EngineError
from engine.kernels.linear_routes import TORCH
from engine.model.columns import Columns
from engine.model.facts import ModelFacts
from engine.model.model_inputs import ModelInputs
from engine.model.model_runner import ForwardOptions, ModelRunner
from engine.model.rope_frequencies import Frequencies
from engine.rows import join_rows

_SMALLEST_CHUNK = 8  # tokens of a prompt


@dataclass(frozen=True)
class _Outputs:
    """Outputs of a forward that ended before column `end`, for the rows from `first` to before `last`."""

    first: int
    last: int
    end: int
    logits: torch.Tensor | None
    states: torch.Tensor | None


class CollectedOutputs:
    """hidden: collect the last hidden states of all columns. tokens: collect the logits after so many last tokens."""

    def __init__(self, hidden: bool = False, tokens: int = 1):
        self.hidden, self.tokens = hidden, tokens
        self._takes_last = tokens == 1 and not hidden  # those of the last forward, as they are
        self._outputs: list[_Outputs] = []

    def of(self, rows: slice) -> Callable[[ModelOutput, int], None] | None:
        """A function that takes outputs and the column they end before; None where the last ones are enough."""
        if self._takes_last:
            return None

        def collect(outputs: ModelOutput, end: int) -> None:
            logits = outputs.logits if self.tokens > 1 else None
            states = last_hidden(outputs) if self.hidden else None
            self._outputs.append(_Outputs(rows.start, rows.stop, end, logits, states))

        return collect

    def discard(self, rows: slice, total_tokens: int) -> None:
        """Discard what forwards of these rows returned for columns behind `total_tokens`: they were rolled back."""
        if self._takes_last:
            return
        within = [entry for entry in self._outputs if rows.start <= entry.first and entry.last <= rows.stop]
        self._outputs = [entry for entry in self._outputs if entry not in within or entry.end <= total_tokens]

    def complete(self, rows: slice, outputs: ModelOutput) -> tuple[ModelOutput, torch.Tensor | None]:
        """The `outputs` of the last forward of these rows, with all logits that are wanted, and the hidden states."""
        if self._takes_last:
            return outputs, None
        # Earlier forwards may have computed these rows together with others.
        matching = [entry for entry in self._outputs if entry.first <= rows.start and rows.stop <= entry.last]
        row_slices = [slice(rows.start - entry.first, rows.stop - entry.first) for entry in matching]
        if self.tokens > 1:
            logits = [
                entry.logits[row_slice]
                for entry, row_slice in zip(matching, row_slices, strict=True)
                if entry.logits is not None
            ]
            outputs["logits"] = _last_logits(logits, self.tokens)
        states = [
            entry.states[row_slice]
            for entry, row_slice in zip(matching, row_slices, strict=True)
            if entry.states is not None
        ]
        return outputs, torch.cat(states, dim=1) if self.hidden else None


def _last_logits(logits: list[torch.Tensor], tokens: int) -> torch.Tensor:
    """The logits after the last `tokens` tokens, from those of consecutive forwards."""
    joined = torch.cat(logits, dim=1) if len(logits) > 1 else logits[0]
    if joined.shape[1] < tokens:
        raise EngineError(
            f"the model returns logits after {joined.shape[1]} of the last {tokens} tokens, and a strategy that "
            "proposes tokens needs all of them: use another strategy"
        )
    return joined[:, -tokens:]


def last_hidden(outputs: ModelOutput) -> torch.Tensor:
    """The last hidden states [rows, columns, width]. Raises `EngineError` for a model that returns none."""
    states = outputs.get("hidden_states") or outputs.get("decoder_hidden_states")
    if not states:
        raise EngineError("the model returns no hidden states, which this strategy compares")
    return states[-1]


class ForwardExecutor:
    """Feeds one model. Fallbacks that save memory change `cache`, the tokens per forward and the rows per forward.

    cached_columns: those in the cache that come before the ids. chunk_tokens, check, compiled: see `ForwardOptions`.
    routed: whether linear layers are routed; False where the runner has no table of routes.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: EngineCache,
        columns: Columns,
        inputs: ModelInputs,
        cached_columns: int,
        chunk_tokens: int | None,
        check: Callable[[], None] | None,
        compiled: bool,
    ):
        self.model, self.cache, self.columns, self.routed = runner.model, cache, columns, runner.linears != TORCH
        self._runner, self._before, self._check = runner, cached_columns, check
        self.inputs = inputs.extended(self.model, columns.room)
        self._chunk_tokens = self._given_chunk_tokens = chunk_tokens
        # Per row, the row of the prompt that it goes on from: rows of one prompt share its inputs.
        self._origins = torch.arange(columns.rows, device="cpu")
        self._why_not_compiled = None if compiled else "disable_compile=True"
        self._frequencies = Frequencies(runner.model, runner.facts.dynamic_ropes)
        self._quantized_to_save_memory = False

    @property
    def _facts(self) -> ModelFacts:
        return self._runner.facts

    @property
    def linears(self) -> str:
        """See `Stats`."""
        return self._runner.linears if self.routed else TORCH

    @property
    def compiled(self) -> str:
        """See `Stats`."""
        return self._runner.compiled if self.is_compiled else f"off: {self._why_not_compiled}"

    @property
    def is_compiled(self) -> bool:
        """Whether compiled steps are used."""
        return self._why_not_compiled is None

    def run(
        self, ids: torch.Tensor, prefill: bool, collected: CollectedOutputs
    ) -> tuple[ModelOutput, torch.Tensor | None]:
        """Feed the tokens of `ids` [rows, tokens] that are not cached: the last outputs, and all hidden states."""
        self.reserve(self._before + ids.shape[1])
        fed: list[tuple[slice, ModelOutput]] = []
        try:
            for rows, cache in self.parts:
                collected.discard(rows, cache.total_tokens)
                options = ForwardOptions(
                    prefill=prefill,
                    chunk_tokens=self._chunk_tokens,
                    logits_for_last=collected.tokens,
                    hidden_states=collected.hidden,
                    on_outputs=collected.of(rows),
                    check=self._check,
                    resume=self._frequencies.resume,
                    compiled=self._why_not_compiled is None,
                    routed=self.routed,
                )
                columns, inputs, rows_ids = self.columns, self.inputs, ids
                if cache is not self.cache:
                    rows_ids, index = ids[rows], torch.arange(rows.start, rows.stop, device=columns.device)
                    columns, inputs = columns.of_rows(index), inputs.of_rows(rows, self._all_rows.stop)
                fed.append((rows, self._runner.feed(rows_ids, columns, cache, inputs, self._before, options)))
        except BaseException:  # the runner has aborted the step of the part that failed
            if isinstance(self.cache, SplitCache):
                self.cache.abort()
            raise
        try:
            outputs, states = zip(*[collected.complete(rows, last) for rows, last in fed], strict=True)
            return join_rows(outputs), torch.cat(states) if collected.hidden else None
        except BaseException:
            self.cache.abort()
            raise

    def reserve(self, columns: int) -> None:
        """Make room for `columns` columns of mask, positions and growing inputs."""
        self.columns.reserve(columns)
        if self.inputs.axes and not self.inputs.has_room_for(columns):
            self.inputs = self.inputs.extended(self.model, self.columns.room)

    @property
    def parts(self) -> list[tuple[slice, EngineCache]]:
        """The groups of rows that are computed together, each with its cache."""
        if isinstance(self.cache, SplitCache):
            return list(self.cache.rows_of_parts)
        return [(self._all_rows, self.cache)]

    @property
    def _all_rows(self) -> slice:
        return slice(0, self._origins.shape[0])

    def row_selection(self, index: torch.Tensor) -> Callable[[], None] | None:
        """A function that makes row i row `index[i]` outside the cache and cannot fail; None if prompts stay."""
        origins = self._origins[index]
        if torch.equal(origins, self._origins):
            return None
        index = index.to(self.columns.device)
        columns, inputs = self.columns.of_rows(index), self.inputs.of_rows(index, len(self._origins))

        def select() -> None:
            self._origins, self.columns, self.inputs = origins, columns, inputs

        return select

    def discard_order(self) -> None:
        """Before rows of the cache change places: what the model itself keeps of them does not."""
        self._facts.note(None)

    # Together with other requests: see `engine.serving`.

    def why_alone(self, tokens: int) -> str | None:
        """Why the step after which its texts have so many tokens cannot be joined with those of others; None where it
        can."""
        if self.inputs.model_kwargs:
            return f"the model gets {', '.join(self.inputs.model_kwargs)} with every step"
        if not self.columns.are_plain:
            return "its prompts have padding, or positions of their own"
        if self._depends_on_length(tokens):
            return f"behind {self._facts.plain_tokens} tokens its position embeddings depend on the length of the text"
        return why_not_joined(self.cache) or self._facts.why_not_joined or self._runner.why_not_shown(self.cache)

    @property
    def reads_in_pieces(self) -> bool:
        """Whether a prompt read in pieces gives the same result as one read at once."""
        is_plain = not (capabilities(self.cache).is_quantized or self._has_media or self.inputs.flags)
        # Models leave padding out of their states only where several tokens are read at once.
        is_plain = is_plain and not (self._runner.has_states and self.columns.first_full)
        if not is_plain or self.cache.handle is None or self.why_not_in_pieces(self.columns.prompt) is not None:
            return False
        return self._facts.why_not_several is None

    @property
    def reads_again(self) -> bool:
        """Whether its tokens, read again, give the same cache without taking more memory than it has now."""
        is_forked, able = len(self._origins) > len(self._origins.unique()), capabilities(self.cache)
        is_exact = able.can_migrate and not (able.is_quantized or able.imposes_windows)
        return is_exact and not is_forked and self.why_not_in_pieces(self.cache.total_tokens + 1) is None

    def why_not_in_pieces(self, tokens: int) -> str | None:
        """Why the cache of a text of so many tokens depends on how many of them are read at once; None where not."""
        starts_again = self._facts.starts_again and not self.columns.are_given  # it counts tokens, not positions
        if self._depends_on_length(tokens) and not starts_again:
            return "the keys of a text as long as this one depend on how many tokens are read at once"
        return self._facts.why_not_cut

    def _depends_on_length(self, tokens: int) -> bool:
        """Whether keys of a text of so many tokens depend on more than their positions."""
        plain = self._facts.plain_tokens
        return plain is not None and (tokens > plain or self.columns.are_given)

    def empty(self) -> None:
        """Empty the cache and free its memory."""
        if can_migrate(self.cache):
            for subcache in self.cache.parts:
                subcache.stack.release()
        self.cache.reset()

    # Fallbacks that save memory.

    def release(self) -> None:
        """Go on without compiled graphs and free the scratch memory; a step allocates what it needs of it again."""
        self._why_not_compiled = "memory was out"
        self._runner.discard_graphs()
        for _, cache in self.parts:
            if can_migrate(cache):
                for subcache in cache.parts:
                    subcache.scratch.release()

    def read_in_smaller_chunks(self, waiting: int) -> int | None:
        """Feed the `waiting` tokens in smaller chunks: the tokens of one. None where that cannot save memory."""
        tokens = waiting if self._chunk_tokens is None else min(waiting, self._chunk_tokens)
        # Later chunks would read quantized keys of earlier ones, unless quantization saves memory anyway.
        is_quantized = capabilities(self.cache).is_quantized and not self._quantized_to_save_memory
        if tokens <= _SMALLEST_CHUNK or is_quantized or self.cache.handle is None or self._has_media:
            return None
        reason = self.why_not_in_pieces(self.cache.total_tokens + waiting)
        if reason is not None:
            raise StepError(reason)
        self._chunk_tokens = max(_SMALLEST_CHUNK, tokens // 4)
        return self._chunk_tokens

    @property
    def _has_media(self) -> bool:
        return bool(set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL) & set(self.inputs.model_kwargs))

    def offload(self, quantized: bool = False) -> str | None:
        """Move the cache to the host or, from a CPU, to disk. Returns a description; None where it is there already."""
        residency = "disk" if self.columns.device.type == "cpu" else "host"
        changes = 0
        for number, (_, cache) in enumerate(self.parts):
            moved = _offloaded(cache, residency, quantized)
            if moved is not None:
                self._replace(number, moved)  # at once: the part that it replaces is empty
                changes += 1
        if not changes:
            return None
        self._quantized_to_save_memory |= quantized
        self._chunk_tokens = self._given_chunk_tokens  # the cache may have been the part without room, not the forward
        tier = "on disk" if residency == "disk" else "in host memory"
        return f"the cache goes on as {self.cache.name} {tier}"

    def impose_window(self, window_length: int) -> None:
        """Go on with the last `window_length` tokens of the cache alone."""
        slid: list[EngineCache] = []
        for _, cache in self.parts:
            if not can_migrate(cache):
                raise StepError(f"a window cannot be imposed on a {cache.name} cache")
            slid.append(apply_window(cache, window_length))
        for number, slid_cache in enumerate(slid):
            self._replace(number, slid_cache)

    def _replace(self, number: int, cache: EngineCache) -> None:
        """`cache` replaces that of the part of this number."""
        if isinstance(self.cache, SplitCache):
            self.cache.replace(number, cache)
        else:
            self.cache = cache

    def split(self) -> int | None:
        """Compute the rows in smaller groups from here on: how many there are. None where none can be smaller."""
        if self._has_media:
            return None
        if self._depends_on_length(self.columns.total) and not self.columns.are_plain:
            raise StepError("the keys of texts as long as these depend on the longest one that is read with them")
        cache = halves(self.cache, self._origins)
        if cache is None:
            return None
        self.cache = cache
        return len(cache.parts)


def _offloaded(cache: EngineCache, residency: str, quantized: bool) -> EngineCache | None:
    if not can_migrate(cache):
        return None
    if capabilities(cache).imposes_windows:
        raise StepError(f"the {cache.name} cache imposes a window on the model, and no offloaded cache does")
    config = cache.stacks[0].layout.config
    if quantized and not cache.is_quantized:
        return migrate(cache, OffloadedQuantizedCacheConfig.name, residency=residency)
    if getattr(config, "residency", None) in (residency, "disk"):
        return None
    name = config.offloaded_as if config is not None else _offloaded_as(cache)
    return None if name is None else migrate(cache, name, residency=residency)


def _offloaded_as(cache: Cache | EncoderDecoder) -> str:
    """The backend for a cache that was put together by hand."""
    config_class = OffloadedQuantizedCacheConfig if cache.is_quantized else OffloadedCacheConfig
    return config_class.name
