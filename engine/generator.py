"""`Generator`: one model, the choice of its cache, and the runs it starts."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Generator as PieceGenerator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.generation.streamers import BaseStreamer

import caches
from caches import Driven
from configs import CacheConfig, EngineConfig, checked_rungs, nearest
from engine.budget import Budget
from engine.cancellation import Cancellation
from engine.checks import check_places, check_positions, check_room_for_rows
from engine.draft import Draft, check_takes_back, read_draft_request, verifies
from engine.encoder import NothingEncoded
from engine.errors import InputError, OptionError, OutOfMemory
from engine.fresh import fresh_cache
from engine.guidance import GuidedLane, check_pads
from engine.ladder import Ladder
from engine.lane import Lane
from engine.loading import load
from engine.masks import Columns, check_takes_masks
from engine.out_of_memory import empty_allocators
from engine.outlet import outlet_for
from engine.play import Play
from engine.request import Request, read_request
from engine.result import Generation, Piece, nothing_generated
from engine.run import Run
from engine.runner import Runner
from engine.session import check_content, check_continues
from engine.turning import check_turning
from strategies import Strategy

AUTO = "auto"  # no backend: a plan chooses one

CacheChoice: TypeAlias = str | CacheConfig | TransformersCache | Driven


class Generator:
    """Generates with one model. Keeps what is worth keeping between calls: see `pools`.

    model: a `PreTrainedModel`, in PEFT's wrapper or not, or a local path or hub id, which also brings its tokenizer.
    tokenizer: needed for text prompts, text results and stop strings. config: how it works.
    """

    def __init__(self, model: PreTrainedModel | str | Path, tokenizer: Any = None, config: EngineConfig | None = None):
        self.config = config or EngineConfig()
        self.model, self.tokenizer = load(model, tokenizer, self.config)
        self._runner = Runner(self.model, self.config.compile, self.config.linears)
        self._draft: Draft | None = None

    def generate(self, inputs: Any = None, **arguments: Any) -> Generation:
        """Generate to the end. Arguments as in `engine.generate`."""
        return self._start(inputs, streams=False, **arguments).to_end()

    def stream(self, inputs: Any = None, **arguments: Any) -> Stream:
        """Generate piece by piece: one `Piece` per row and step. Arguments are checked here, before the first piece."""
        return Stream(self._start(inputs, streams=True, **arguments))

    @property
    def pools(self) -> dict[str, int]:
        """What is kept between calls.

        graphs: compiled steps, how many; torch does not say how large they are. draft_bytes: the weights of the
        `assistant_model` that was given last, which is not let go of.
        """
        draft = self._draft
        return {
            "graphs": self._runner.graphs,
            "draft_bytes": 0 if draft is None else draft.model.get_memory_footprint(),
        }

    def release(self) -> None:
        """Let go of what is kept between calls, and hand back what the allocators keep of it.

        Later calls, and streams under way, make anew what they need: no text changes.
        """
        self._draft = None
        self._runner.drop_graphs()
        empty_allocators()

    def _start(self, inputs: Any, *, streamer: BaseStreamer | None = None, **arguments: Any) -> Play:
        grad = torch.is_grad_enabled()
        try:
            return self._prepare(inputs, streamer=streamer, **arguments)
        except BaseException:  # a thread that waits for what the streamer gets would wait for ever
            with suppress(Exception):
                streamer.end()  # type: ignore[union-attr]
            raise
        finally:
            torch._C._set_grad_enabled(grad)  # Ctrl-C may have come where torch.no_grad() ended

    def _prepare(
        self,
        inputs: Any,
        *,
        streams: bool,
        cache: CacheChoice | None = None,
        cache_config: dict[str, Any] | CacheConfig | None = None,
        strategy: str | Strategy | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence | None = None,
        stopping_criteria: Sequence | None = None,
        streamer: BaseStreamer | None = None,
        cancellation: Any = None,
        tokenizer: Any = None,
        past_key_values: TransformersCache | tuple | None = None,
        cache_implementation: str | None = None,
        return_legacy_cache: bool | None = None,
        assistant_model: PreTrainedModel | None = None,
        assistant_tokenizer: Any = None,
        on_oom: Sequence[str] | None = None,
        trust_cache: bool = False,
        **options: Any,
    ) -> Play:
        started = time.perf_counter()
        stop = Cancellation(cancellation)
        rungs = self.config.on_oom if on_oom is None else checked_rungs(on_oom)
        ladder, draft_ladder = Ladder(rungs), Ladder(rungs)
        draft_ladder.taken = ladder.taken
        budget = Budget(self.config.max_cache_bytes, self.config.over_budget, ladder.taken)
        if isinstance(past_key_values, tuple):
            past_key_values = caches.from_legacy_cache(past_key_values, self.model.config)
        tokenizer = tokenizer if tokenizer is not None else self.tokenizer
        cache_implementation = self._said(generation_config, "cache_implementation", cache_implementation)
        cache_config = self._said(generation_config, "cache_config", cache_config)
        draft = self._draft_of(assistant_model)
        live = _live_cache(cache, past_key_values, cache_implementation, cache_config)
        try:
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
                assistant=None if draft is None else draft.model,
                recover=ladder.climb_before,
            )
            draft_request = read_draft_request(
                draft, self.model, request, live, tokenizer, assistant_tokenizer, draft_ladder.climb_before
            )
        except NothingEncoded as error:
            nothing = nothing_generated(error.ids, tokenizer is not None, ladder.taken, time.perf_counter() - started)
            told = f"memory was out in the encoder, before the first token ({error})"
            raise OutOfMemory(told, nothing) from error.__cause__
        if draft is not None and draft_request is not None:
            drafts = draft.drafts(request.strategy)
            request = replace(request, drafts=drafts, translation=draft_request.translation)
        known = True
        if live is None:
            if trust_cache:
                raise OptionError("trust_cache=True is about a live cache, and none was given: leave it out")
            chosen = _one_of(cache=cache, cache_implementation=cache_implementation)
            live = self._new_cache(chosen, cache_config, request, budget)
        else:
            if request.use_cache is False:
                raise OptionError("use_cache=False contradicts the live cache that was given: leave one of them out")
            live.check_fits(self.model.config)
            if request.guidance is None:  # else it is empty
                known = check_continues(live, request, self.model)
        self._check_together(live, request)
        read, mask = request.read
        extras = dict(read.extras)
        positions = extras.get("position_ids")
        if positions is not None:
            del extras["position_ids"]
        columns = Columns(mask, request.columns, positions)
        if not known and not trust_cache:
            check_content(self._runner, live, request, columns, extras, tokenizer)
        lane = Lane(
            self._runner,
            live,
            columns,
            rows=len(read.ids),
            before=request.before,
            embeds=request.prompt.embeds,
            unnamed=request.prompt.unnamed,
            extras=extras,
            flags=request.output_flags,
            chunk_tokens=request.chunk_tokens,
            shares=self.config.compile == "off",
            takes_back=verifies(request.strategy),
            check=stop.check,
            recover=ladder.climb,
            make_room=budget.keep,
        )
        run = Run(
            request,
            lane if request.guidance is None else GuidedLane(lane, request.guidance),
            outlet_for(request, tokenizer, streamer, streams),
            tokenizer=tokenizer,
            legacy=bool(return_legacy_cache),
            started=started,
            draft=None
            if draft is None or draft_request is None
            else draft.lane(draft_request, stop.check, draft_ladder.climb),
            fallbacks=ladder.taken,
        )
        return Play(run, stop)

    def _draft_of(self, model: Any) -> Draft | None:
        """The draft that this model is, kept from the last call where it is the same."""
        if model is None:
            return None
        draft = self._draft  # another thread may let go of it
        if draft is None or draft.given is not model:
            draft = self._draft = Draft(model, self.config.linears)
        return draft

    def _said(self, generation_config: GenerationConfig | None, name: str, value: Any) -> Any:
        """An argument of the call, or what its `generation_config` says other than the model's own."""
        in_config = getattr(generation_config, name, None)
        if in_config == getattr(self.model.generation_config, name, None):
            return value
        return _one_of(**{name: value, f"generation_config.{name}": in_config})

    def _check_together(self, live: Driven, request: Request) -> None:
        """Refuse what this model, this cache and this request cannot do together."""
        read, mask = request.read
        check_positions(self.model, live, mask.shape[1], request.columns)
        check_room_for_rows(live, len(request.prompt.ids), len(read.ids), request.rows)
        if isinstance(live, caches.Cache):
            check_takes_masks(self.model, live)
            check_places(live, mask, read.extras.get("position_ids"))
            check_turning(self._runner, live)
        if live.handle is not None and not self._runner.takes_cache:
            raise OptionError(
                f"{type(self.model).__name__} takes no cache of keys and values (it keeps none, or a state of its own "
                f"kind), so the {live.name} cache has nothing to hold: use cache='none'"
            )
        if live.seen > 0 and getattr(request.strategy, "reads_hidden", False):
            raise OptionError(
                f"{request.strategy.name} compares with the hidden states of all tokens, and those of the {live.seen} "
                "in the cache are not known: start with an empty cache"
            )
        if verifies(request.strategy):
            check_takes_back(self._runner, live, request)
        if live.max_tokens is not None and live.max_tokens < request.columns - 1:
            raise caches.CapacityError(
                f"the {live.name} cache holds at most {live.max_tokens} tokens, but {mask.shape[1]} prompt "
                f"tokens and {request.new_tokens} new ones need {request.columns - 1}: raise max_cache_len or ask for "
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
        if request.guidance is not None:
            check_pads(self._runner, request.guidance)

    def _new_cache(
        self,
        choice: CacheChoice | None,
        options: dict[str, Any] | CacheConfig | None,
        request: Request,
        budget: Budget,
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
        if choice == AUTO:
            choice = self._planned(options, request)
        assert isinstance(choice, (str, CacheConfig))
        name = choice if isinstance(choice, str) else choice.name
        try:
            recipe = caches.recipe(name)
        except caches.UnknownCache:
            known = nearest(name, [*caches.names(), AUTO])
            raise caches.UnknownCache(f"there is no cache named {name!r}; {known}") from None
        values = {} if isinstance(choice, str) else choice.to_dict()
        values |= dict(options or {})
        config = budget.fitted(recipe.options.from_dict(values), request.course, self.model)
        return fresh_cache(config, request.course, functools.partial(_built, self.model.config))

    def _planned(self, options: dict[str, Any] | CacheConfig | None, request: Request) -> CacheConfig:
        """What `cache="auto"` is for this request."""
        if options is not None:
            raise OptionError("cache_config has the options of one cache, and cache='auto' chooses which: leave it out")
        from engine.planning import choose_cache  # which needs a Generator's parts

        compiled = self.config.compile != "off"
        try:
            return choose_cache(self.model, replace(request.course, shares=not compiled), compiled)
        except InputError as error:
            _warn_once(f"cache='auto' cannot plan this model, so it is 'dynamic': {error}")
            return caches.recipe("dynamic").options()


def _built(model_config: Any, config: CacheConfig) -> Driven:
    return caches.build(config.name, model_config, config)


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
            f"names: {', '.join([*caches.names(), AUTO])}"
        )
    return caches.driven(chosen)


def _leave(pieces: PieceGenerator[Piece, None, None]) -> None:
    with suppress(ValueError):  # another thread is at work in it
        pieces.close()


class Stream:
    """An iterator of pieces. Leaving it early is fine: `result()` then gives what was generated so far."""

    def __init__(self, play: Play):
        self._play = play
        self._pieces = play.pieces()
        # When it is collected, and before the process ends: what a run cleans up needs an interpreter that is whole.
        weakref.finalize(self, _leave, self._pieces)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def given_up(self) -> bool:
        """Whether Ctrl-C came once more while what there was became a result: there is none."""
        return self._play.given_up

    def result(self) -> Generation:
        """End the stream, if it has not ended: the generation. Raises `EngineError` where it is `given_up`."""
        self._pieces.close()
        return self._play.result()
