"""`Generator`: one model, the choice of its cache, and the runs it starts."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.generation.streamers import BaseStreamer

import caches
from caches import Driven
from configs import CacheConfig, EncoderDecoderCacheConfig, EngineConfig
from engine.checks import check_places, check_positions
from engine.errors import OptionError
from engine.lane import Lane
from engine.loading import load
from engine.masks import Columns, check_takes_masks
from engine.request import Request, read_request
from engine.result import Generation, Piece
from engine.run import Run
from engine.runner import Runner
from engine.session import check_continues
from engine.turning import check_turning
from strategies import Strategy

_SIZE_STEP = 128  # tokens

CacheChoice: TypeAlias = str | CacheConfig | TransformersCache | Driven


class Generator:
    """Generates with one model. Keeps what is worth keeping between calls: the compiled decode step.

    model: a `PreTrainedModel`, in PEFT's wrapper or not, or a local path or hub id, which also brings its tokenizer.
    tokenizer: needed for text prompts, text results and stop strings. config: how it works.
    """

    def __init__(self, model: PreTrainedModel | str | Path, tokenizer: Any = None, config: EngineConfig | None = None):
        self.config = config or EngineConfig()
        self.model, self.tokenizer = load(model, tokenizer, self.config)
        self._runner = Runner(self.model, self.config.compile, self.config.linears)

    def generate(self, inputs: Any = None, **arguments: Any) -> Generation:
        """Generate to the end. Arguments as in `engine.generate`."""
        run = self._start(inputs, stream_text=False, **arguments)
        for _ in run.pieces():
            pass
        return run.result()

    def stream(self, inputs: Any = None, **arguments: Any) -> Stream:
        """Generate piece by piece: one `Piece` per row and step. Arguments are checked here, before the first piece."""
        return Stream(self._start(inputs, stream_text=True, **arguments))

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
        past_key_values: TransformersCache | tuple | None = None,
        cache_implementation: str | None = None,
        return_legacy_cache: bool | None = None,
        **options: Any,
    ) -> Run:
        started = time.perf_counter()
        if isinstance(past_key_values, tuple):
            past_key_values = caches.from_legacy_cache(past_key_values, self.model.config)
        tokenizer = tokenizer if tokenizer is not None else self.tokenizer
        cache_implementation = self._said(generation_config, "cache_implementation", cache_implementation)
        cache_config = self._said(generation_config, "cache_config", cache_config)
        live = _live_cache(cache, past_key_values, cache_implementation, cache_config)
        request = read_request(
            self.model,
            tokenizer,
            inputs,
            cache=live,
            strategy=strategy,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            chunk_tokens=self.config.prefill_chunk_tokens,
            options=options,
        )
        if live is None:
            chosen = _one_of(cache=cache, cache_implementation=cache_implementation)
            live = self._new_cache(chosen, cache_config, request)
        else:
            if request.use_cache is False:
                raise OptionError("use_cache=False contradicts the live cache that was given: leave one of them out")
            live.check_fits(self.model.config)
            check_continues(live, request.prompt, request.mask, request.before)
        self._check_together(live, request)
        extras = dict(request.prompt.extras)
        positions = extras.get("position_ids")
        if positions is not None:
            del extras["position_ids"]
        lane = Lane(
            self._runner,
            live,
            Columns(request.mask, request.total, positions),
            rows=len(request.prompt.ids),
            before=request.before,
            embeds=request.prompt.embeds,
            unnamed=request.prompt.unnamed,
            extras=extras,
            flags=request.output_flags,
            chunk_tokens=request.chunk_tokens,
        )
        return Run(
            request,
            lane,
            tokenizer=tokenizer,
            streamer=streamer,
            stream_text=stream_text,
            legacy=bool(return_legacy_cache),
            started=started,
        )

    def _said(self, generation_config: GenerationConfig | None, name: str, value: Any) -> Any:
        """An argument of the call, or what its `generation_config` says other than the model's own."""
        in_config = getattr(generation_config, name, None)
        if in_config == getattr(self.model.generation_config, name, None):
            return value
        return _one_of(**{name: value, f"generation_config.{name}": in_config})

    def _check_together(self, live: Driven, request: Request) -> None:
        """Refuse what this model, this cache and this request cannot do together."""
        check_positions(self.model, live, request.mask.shape[1], request.total)
        if isinstance(live, caches.Cache):
            check_takes_masks(self.model, live)
            check_places(live, request.mask, request.prompt.extras.get("position_ids"))
            check_turning(self._runner, live)
        if live.handle is not None and not self._runner.takes_cache:
            raise OptionError(
                f"{type(self.model).__name__} takes no cache of keys and values (it keeps none, or a state of its own "
                f"kind), so the {live.name} cache has nothing to hold: use cache='none'"
            )
        if live.max_tokens is not None and live.max_tokens < request.total - 1:
            raise caches.CapacityError(
                f"the {live.name} cache holds at most {live.max_tokens} tokens, but {request.mask.shape[1]} prompt "
                f"tokens and {request.new_tokens} new ones need {request.total - 1}: raise max_cache_len or ask for "
                "fewer"
            )
        text_config = self.model.config.get_text_config(decoder=True)
        by_id = getattr(text_config, "hidden_size_per_layer_input", None)
        if request.prompt.embeds is not None and live.handle is None and by_id:
            raise OptionError(
                f"{type(self.model).__name__} looks up more of every token by its id, so embeddings and ids cannot be "
                "computed again together: use a cache"
            )
        if request.chunk_tokens is not None and live.handle is None:
            raise OptionError(
                f"reading the prompt in pieces of {request.chunk_tokens} tokens needs a cache to keep them in"
            )
        if self.config.compile != "off" and request.config.disable_compile:
            raise OptionError(f"disable_compile=True contradicts EngineConfig(compile={self.config.compile!r})")
        if self.config.compile != "off" and live.why_not_compiled is not None:
            raise OptionError(
                f"compile={self.config.compile!r} cannot be with the {live.name} cache: {live.why_not_compiled}. Use "
                "cache='static', or leave compile off"
            )

    def _new_cache(
        self, choice: CacheChoice | None, options: dict[str, Any] | CacheConfig | None, request: Request
    ) -> Driven:
        if request.use_cache is False and choice not in (None, "none"):
            raise OptionError(f"use_cache=False contradicts cache={choice!r}: leave one of them out")
        if choice is None and request.config.use_cache is False:
            choice = "none"  # said by this call, or by the model's own configuration
        if choice is None and self.config.cache is None and not self._runner.takes_cache:
            _warn_once(
                f"{type(self.model).__name__} takes no cache of keys and values: it runs with cache='none' and reads "
                "the whole text again for every token"
            )
            choice = "none"
        if choice is None:
            choice = self.config.cache
        if choice is None:  # only now the model's own setting, whose options are for its own choice
            choice = request.config.cache_implementation or "dynamic"
            options = request.config.cache_config if options is None else options
        assert isinstance(choice, (str, CacheConfig))
        recipe = caches.recipe(choice if isinstance(choice, str) else choice.name)
        values = {} if isinstance(choice, str) else choice.to_dict()
        values |= dict(options or {})
        config = recipe.options.from_dict(values)
        if isinstance(config, EncoderDecoderCacheConfig):
            config = replace(config, self_cache=_sized(config.self_cache, request))
        cache = caches.build(recipe.name, self.model.config, _sized(config, request))
        # A row may end early: then room for all its tokens would be room for nothing.
        columns = request.total - 1
        cache.reserve(columns if request.length_is_known else min(columns, request.mask.shape[1] + 128))
        return cache


def _sized(choice: str | CacheConfig, request: Request) -> CacheConfig:
    """The cache's configuration, with a size for this request where it needs one and has none."""
    config = caches.recipe(choice).options() if isinstance(choice, str) else choice
    if not config.needs_size or config.to_dict()["max_cache_len"] is not None:
        return config
    wanted = max(request.total, getattr(request.config, "max_cache_len", None) or 0)
    # A compiled step is compiled for a size: calls of similar length share one.
    return config.update(max_cache_len=-(-wanted // _SIZE_STEP) * _SIZE_STEP)[0]


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger("engine").warning(message)


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
    if not isinstance(chosen, (TransformersCache, Driven)):
        raise OptionError(
            f"a cache is a name, a CacheConfig or a cache object, not a {type(chosen).__name__}; "
            f"names: {', '.join(caches.names())}"
        )
    return caches.driven(chosen)


class Stream:
    """An iterator of pieces. Leaving it early is fine: `result()` then gives what was generated so far."""

    def __init__(self, run: Run):
        self._run = run
        self._pieces = run.pieces()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def result(self) -> Generation:
        """End the stream, if it has not ended, and return the generation."""
        self._pieces.close()
        return self._run.result()
