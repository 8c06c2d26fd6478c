"""The one loop. A strategy's flow says what to do, `Run` does it: it owns the clock, the tokens, the mask, the cache's
steps, the streams and the clean end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.generation.streamers import BaseStreamer

import caches
from caches import Driven
from configs import CacheConfig, EngineConfig
from engine.errors import EngineError, Interrupted, OptionError
from engine.loading import load
from engine.masks import Columns
from engine.request import Request, read_request
from engine.result import Generation, Piece, Stats
from engine.runner import Runner, extend_extras
from engine.session import check_prefix, remember
from engine.text import RowText
from strategies import Crop, Emit, Forward, Operation, Rows, Strategy

CacheChoice = str | CacheConfig | TransformersCache | Driven


class Generator:
    """Generates with one model. Keeps what is worth keeping between calls: the compiled decode step.

    model: a `PreTrainedModel`, or a local path or hub id, which also brings its tokenizer.
    tokenizer: needed for text prompts, text results and stop strings. config: how it works.
    """

    def __init__(self, model: PreTrainedModel | str, tokenizer: Any = None, config: EngineConfig | None = None):
        self.config = config or EngineConfig()
        self.model, self.tokenizer = load(model, tokenizer, self.config)
        self._runner = Runner(self.model, self.config.compile)

    def generate(self, inputs: Any = None, **arguments: Any) -> Generation:
        """Generate to the end. Arguments as in `engine.generate`."""
        run = self._start(inputs, stream_text=False, **arguments)
        for _ in run.pieces():
            pass
        return run.result()

    def stream(self, inputs: Any = None, **arguments: Any) -> Iterator[Piece]:
        """Generate piece by piece: one `Piece` per row and step. Arguments are checked here, before the first piece."""
        return self._start(inputs, stream_text=True, **arguments).pieces()

    def _start(
        self,
        inputs: Any,
        *,
        stream_text: bool,
        cache: CacheChoice | None = None,
        cache_config: dict[str, Any] | CacheConfig | None = None,
        strategy: str | Strategy | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence | None = None,
        stopping_criteria: Sequence | None = None,
        streamer: BaseStreamer | None = None,
        tokenizer: Any = None,
        past_key_values: TransformersCache | None = None,
        cache_implementation: str | None = None,
        **options: Any,
    ) -> Run:
        started = time.perf_counter()
        tokenizer = tokenizer if tokenizer is not None else self.tokenizer
        live = _live_cache(cache, past_key_values, cache_implementation, cache_config)
        request = read_request(
            self.model,
            tokenizer,
            inputs,
            cache_seen=0 if live is None else live.seen,
            strategy=strategy,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            options=options,
        )
        if live is None:
            chosen = _one_of(cache=cache, cache_implementation=cache_implementation)
            live = self._new_cache(chosen, cache_config, request)
        elif request.before == 0:
            check_prefix(live.handle, request.prompt.ids, live.seen)
        if live.max_tokens is not None and live.max_tokens < request.total - 1:
            raise caches.CapacityError(
                f"the {live.name} cache holds at most {live.max_tokens} tokens, but {request.mask.shape[1]} prompt tokens "
                f"and {request.new_tokens} new ones need {request.total - 1}: raise max_cache_len or ask for fewer"
            )
        chunk_tokens = request.config.prefill_chunk_size or self.config.prefill_chunk_tokens
        if chunk_tokens is not None and live.handle is None:
            raise OptionError(f"reading the prompt in pieces of {chunk_tokens} tokens needs a cache to keep them in")
        if self.config.compile != "off" and not live.fixed:
            raise OptionError(
                f"compile={self.config.compile!r} needs a cache whose tensors never move, and {live.name!r} is not one: "
                "use cache='static'"
            )
        return Run(self._runner, request, live, chunk_tokens, tokenizer, streamer, stream_text, started)

    def _new_cache(
        self, choice: CacheChoice | None, options: dict[str, Any] | CacheConfig | None, request: Request
    ) -> Driven:
        if request.config.use_cache is False:
            if choice not in (None, "none"):
                raise OptionError(f"use_cache=False contradicts cache={choice!r}: leave one of them out")
            choice = "none"
        if choice is None:
            choice = request.config.cache_implementation or self.config.cache
        options = request.config.cache_config if options is None else options
        if isinstance(choice, CacheConfig):
            choice, options = choice.name, choice.to_dict() | _as_dict(options)
        assert isinstance(choice, str)
        values = _as_dict(options)
        known = caches.recipe(choice).options.option_names()
        if "max_cache_len" in known and values.get("max_cache_len") is None:
            values["max_cache_len"] = max(request.total, getattr(request.config, "max_cache_len", None) or 0)
        cache = caches.build(choice, self.model.config, **values)
        # A row may end early: then room for all its tokens would be room for nothing.
        columns = request.total - 1
        cache.reserve(columns if request.length_is_known else min(columns, request.mask.shape[1] + 128))
        return cache


def _as_dict(options: dict[str, Any] | CacheConfig | None) -> dict[str, Any]:
    return options.to_dict() if isinstance(options, CacheConfig) else dict(options or {})


def _one_of(**given: Any) -> Any:
    """The one argument that is not None. Raises `OptionError` when there are several."""
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        raise OptionError(f"{' and '.join(named)} both choose the cache: leave all but one out")
    return next(iter(named.values()), None)


def _live_cache(
    cache: CacheChoice | None,
    past_key_values: TransformersCache | None,
    cache_implementation: str | None,
    cache_config: dict[str, Any] | CacheConfig | None,
) -> Driven | None:
    """The cache object among the arguments, if there is one."""
    chosen = _one_of(cache=cache, past_key_values=past_key_values, cache_implementation=cache_implementation)
    if chosen is None or isinstance(chosen, (str, CacheConfig)):
        return None
    if cache_config is not None:
        raise OptionError("cache_config builds a new cache, but a live one was given: leave one of them out")
    if not isinstance(chosen, (TransformersCache, caches.NoCache, caches.ForeignCache)):
        raise OptionError(
            f"a cache is a name, a CacheConfig or a cache object, not a {type(chosen).__name__}; "
            f"names: {', '.join(caches.names())}"
        )
    return caches.driven(chosen)


class Run:
    """One generation under way."""

    def __init__(
        self,
        runner: Runner,
        request: Request,
        cache: Driven,
        chunk_tokens: int | None,
        tokenizer: Any,
        streamer: BaseStreamer | None,
        stream_text: bool,
        started: float,
    ):
        self._started = started
        self._runner, self._request, self._cache, self._tokenizer = runner, request, cache, tokenizer
        self._streamer = streamer
        self._chunk_tokens = chunk_tokens
        prompt = request.prompt.ids
        self._rows = prompt.shape[0]
        self._before = request.before
        self._prompt_tokens = int(request.mask[:, cache.seen :].sum())
        extras = dict(request.prompt.extras)
        self._columns = Columns(request.mask, request.total, extras.pop("position_ids", None))
        self._extras = extend_extras(extras, request.total)
        self._stopping = request.stopping()
        # Emitted tokens, the prompt first; the part in use is [:, :_length].
        self._ids = prompt.new_full((self._rows, request.total - request.before), request.pad_id)
        self._ids[:, : prompt.shape[1]] = prompt
        self._length = prompt.shape[1]
        self._fed = prompt[:, :0]  # tokens given to the model in this run, committed or in the open step
        self._step_open = False
        self._texts: list[RowText] | None = None
        if tokenizer is not None and (stream_text or request.stop_strings):
            self._texts = [RowText(tokenizer, request.stop_strings) for _ in range(self._rows)]
        wanted = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        self._records: dict[str, list[Any]] = {name: [] for name in wanted if getattr(request.config, name, None)}
        self._new_tokens = 0
        self._first_token_s: float | None = None
        self._ended_s: float | None = None
        self._device = prompt.device
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def pieces(self) -> Iterator[Piece]:
        """Run to the end, piece by piece. Whatever stops it, the cache is consistent and the streamer has ended."""
        flow = self._request.strategy.flow(self._ids[:, : self._length], self._request.processors)
        try:
            if self._streamer is not None:
                self._streamer.put(self._ids[:, : self._length].cpu())
            answer: Any = None
            while not self._stopping.done:
                with torch.no_grad():
                    operation = flow.send(answer)
                    answer, pieces = self._perform(operation)
                yield from pieces
        except EngineError:
            raise
        except Exception as error:
            self._leave_last_token_unfed()
            new = self._length - self._request.prompt.ids.shape[1]
            raise Interrupted(
                f"generation stopped after {new} new tokens per row ({type(error).__name__}: {error}); what was "
                "generated is in `partial`, and its cache can be continued",
                self._partial(),
            ) from error
        finally:
            flow.close()
            self._close()

    def _perform(self, operation: Operation) -> tuple[Any, list[Piece]]:
        """Carry out one operation of the flow: its result, and what there is to show."""
        match operation:
            case Forward(tokens):
                self._settle()
                return self._forward(tokens), []
            case Emit(tokens, scores):
                return self._emit(tokens, scores)
            case Crop(tokens):
                self._settle(drop=tokens)
            case Rows(index):
                self._settle()
                self._reorder(index)
        return None, []

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        prefill = self._fed.shape[1] == 0
        self._fed = torch.cat([self._fed, tokens], dim=1)
        flags = {name: True for name in ("output_attentions", "output_hidden_states") if name in self._records}
        outputs = self._runner.feed(
            self._fed,
            self._columns,
            self._cache,
            before=self._before,
            prefill=prefill,
            extras=self._extras,
            flags=flags,
            chunk_tokens=self._chunk_tokens,
        )
        self._step_open = True
        for name in flags:
            self._records[name].append(getattr(outputs, name.removeprefix("output_")))
        logits = outputs.logits[:, -1].to(torch.float32, copy=True)
        if "output_logits" in self._records:
            self._records["output_logits"].append(logits)
        return logits

    def _emit(self, tokens: torch.Tensor, scores: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, list[Piece]]:
        pieces: list[Piece] = []
        for column in range(tokens.shape[1]):
            if self._stopping.done:
                break
            new = tokens[:, column].tolist()  # waits for the device, so the clock below is honest
            if self._first_token_s is None:
                self._first_token_s = time.perf_counter()
            running = [reason is None for reason in self._stopping.reasons]
            new = [token if runs else self._request.pad_id for token, runs in zip(new, running, strict=True)]
            self._ids[:, self._length] = torch.tensor(new)
            self._length += 1
            self._new_tokens += sum(running)
            if "output_scores" in self._records and scores:
                self._records["output_scores"].append(scores[column])
            if self._streamer is not None:
                self._streamer.put(torch.tensor(new))
            pieces += self._end_rows(new, running, scores[: column + 1] or None)
        return self._ids[:, : self._length], pieces

    def _end_rows(
        self, new: list[int], running: list[bool], scores: tuple[torch.Tensor, ...] | None
    ) -> list[Piece]:
        """Find the rows that end with their new token; one piece for each that was running."""
        deltas: list[str | None] = [None] * self._rows
        if self._texts is not None:
            deltas = [text.push(token) if runs else "" for text, token, runs in zip(self._texts, new, running, strict=True)]
        self._stopping.check(self._ids[:, : self._length], new, scores, self._texts)
        pieces = []
        for row, reason in enumerate(self._stopping.reasons):
            if not running[row]:
                continue
            delta = deltas[row]
            if reason is not None and self._texts is not None:
                delta = (delta or "") + self._texts[row].flush()
            pieces.append(Piece(row, (new[row],), delta, reason))
        return pieces

    def _reorder(self, index: torch.Tensor) -> None:
        self._cache.rows(index)
        self._columns.rows(index)
        self._ids, self._fed = self._ids[index], self._fed[index]
        self._stopping.rows(index)
        if self._texts is not None:
            raise OptionError("stop strings and streamed text cannot follow a strategy that reorders rows")

    def _settle(self, drop: int = 0) -> None:
        if not self._step_open:
            if drop:
                raise EngineError(f"Crop({drop}) has to follow a Forward")
            return
        self._cache.settle(drop)
        self._step_open = False
        if drop:
            self._fed = self._fed[:, :-drop]

    def _leave_last_token_unfed(self) -> None:
        """What holds after every run holds after a failed one: continuing needs a token that the cache has not seen."""
        if self._step_open:
            fed_too_far = max(0, self._fed.shape[1] - (self._length - 1))
            with contextlib.suppress(caches.StepError):  # a cache that cannot take it back keeps it
                self._settle(drop=fed_too_far)

    def _close(self) -> None:
        if self._ended_s is not None:
            return
        self._settle()
        self._ended_s = time.perf_counter()
        if self._streamer is not None:
            self._streamer.end()
        if self._cache.handle is not None and self._before == 0:
            remember(self._cache.handle, self._fed[:, : self._cache.seen])

    def _partial(self) -> Generation:
        self._close()
        return self.result()

    def result(self) -> Generation:
        """What was generated, after the end."""
        sequences = self._ids[:, : self._length]
        records = {name.removeprefix("output_"): tuple(values) for name, values in self._records.items()}
        return Generation(
            sequences=sequences,
            text=self._text(sequences),
            finish_reasons=list(self._stopping.reasons),
            stats=self._stats(),
            cache=self._cache.handle,
            **records,
        )

    def _text(self, sequences: torch.Tensor) -> list[str] | None:
        if self._tokenizer is None:
            return None
        if self._texts is not None:
            for text in self._texts:
                text.flush()
            return [text.text for text in self._texts]
        new = sequences[:, self._request.prompt.ids.shape[1] :].tolist()
        return [self._tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False) for row in new]

    def _stats(self) -> Stats:
        assert self._ended_s is not None
        prefill_s = None if self._first_token_s is None else self._first_token_s - self._started
        decode_s = None if self._first_token_s is None else self._ended_s - self._first_token_s
        decoded = self._new_tokens - self._rows  # the first token of each row comes from the prefill
        return Stats(
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._new_tokens,
            ttft_s=prefill_s,
            prefill_tokens_per_s=None if not prefill_s else self._prompt_tokens / prefill_s,
            decode_tokens_per_s=None if not decode_s or decoded < 1 else decoded / decode_s,
            total_s=self._ended_s - self._started,
            cache_bytes=self._cache.bytes,
            peak_bytes=torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None,
        )
