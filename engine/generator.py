"""`Generator`: one model, and the runs it starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import engine
from caches import EngineCache
from caches.spec.accelerate_hooks import prompt_device
from caches.torch_api import set_grad_enabled
from configs import CacheConfig, EngineConfig, checked_fallbacks
from engine.decoding.cancellation import Cancellation
from engine.decoding.draft import Draft
from engine.decoding.driver import Driver
from engine.decoding.fed_ids import CachedPrefix
from engine.decoding.guided_session import GuidedSession
from engine.decoding.loop import DecodingLoop
from engine.decoding.model_session import ModelSession
from engine.decoding.pauses import FindPauses
from engine.decoding.run_clock import RunClock
from engine.decoding.session_options import SessionOptions
from engine.errors import OptionError, OutOfMemoryError
from engine.memory.budget import Budget
from engine.memory.cache_choice import CacheChoice, check_new, new_cache, read_cache_choice
from engine.memory.fallbacks import Recovery
from engine.model.columns import Columns
from engine.model.compiled_step import makes_graphs
from engine.model.loading import load
from engine.model.low_bit_linears import convert_linears
from engine.model.model_inputs import ModelInputs
from engine.model.model_runner import ModelRunner
from engine.out_of_memory import Exhausted, empty_allocators
from engine.output.hf_streamers import adapter_for, ending
from engine.output.stream_buffer import StreamBuffer
from engine.planning.free_memory import find_free
from engine.prompt import without_padding
from engine.request.call import ONE_TOKEN, Call, parameters, read_call, takes
from engine.request.compatibility import check_together
from engine.request.continuation import check_content, check_continues, check_padding_ahead
from engine.request.draft import DraftRequest, read_draft_request
from engine.request.logits_processors import with_own_processors
from engine.request.parameters import read, read_parameters
from engine.request.read_request import read_request
from engine.request.request import Request
from engine.result import Fallback, Generation, nothing_generated
from engine.reuse.chat import Chat
from engine.reuse.prefix import Prefix, read_prefix
from engine.reuse.prefix_store import PrefixStore, Reused, can_reuse
from engine.serving.batch import Batch
from engine.serving.many import check_common, generate_many
from engine.serving.request import BatchRequest
from engine.serving.scheduler import Scheduler
from engine.streaming import Stream

_SHARE_OF_FREE = 0.8  # of the device memory, for the caches of many prompts


class Generator:
    """Generates with one model. Compiled steps and the last draft are kept between calls: see `pools`.

    model: a `PreTrainedModel`, in PEFT's wrapper or not, or a local path or hub id, which also brings its tokenizer.
    tokenizer: needed for text prompts, text results and stop strings. config: how it works.
    """

    def __init__(self, model: PreTrainedModel | str | Path, tokenizer: Any = None, config: EngineConfig | None = None):
        self.config = _checked(config)
        self.model, self.tokenizer = load(model, read("tokenizer", tokenizer), self.config)
        if self.config.weights != "full":
            convert_linears(self.model, self.config.weights)
        self._runner = ModelRunner(self.model, self.config.compile, self.config.linears)
        self._draft: Draft | None = None
        self._store: PrefixStore | None = None
        if self.config.prefix_store_bytes is not None:
            self._store = PrefixStore(self.model, self.config.prefix_store_bytes, self.config.prefix_store_folder)

    @takes(parameters, documented_by=engine.generate)
    def generate(self, inputs: Any = None, generation_config: Any = None, **arguments: Any) -> Generation:
        """Generate to the end. Parameters: those of `engine.generate`, without its model."""
        return self._start(read_call(inputs, generation_config, **arguments), streams=False).to_end()

    @takes(parameters, documented_by=engine.generate)
    def stream(self, inputs: Any = None, generation_config: Any = None, **arguments: Any) -> Stream:
        """Generate piece by piece: one `StreamChunk` per row and step. Arguments are checked here.

        Parameters: those of `engine.generate`, without its model.
        """
        return Stream(self._start(read_call(inputs, generation_config, **arguments), streams=True), self._title)

    def warmup(self, inputs: Any, **arguments: Any) -> str:
        """Prepare what calls of this kind need, and wait for it: with `EngineConfig(compile="auto")` compiled layers.

        inputs, arguments: as of a later call of `generate`; a cache by name. Generates a few tokens. What cannot be
        compiled is tried again. Returns `Stats.compiled` of later calls.
        """
        for name in ("cache", "past_key_values"):
            if not isinstance(arguments.get(name), str | CacheConfig | None):
                raise OptionError(
                    f"{name}= brings a live cache, and warmup would write into that: give the name of a cache as cache="
                )
        if arguments.get("streamer") is not None:
            raise OptionError("a warmup shows no text: leave streamer out")
        self._runner.retry_compiling()
        for _ in range(2):
            found = self.generate(inputs, **arguments | {"max_new_tokens": 4, "min_new_tokens": 4})
            self._runner.finish_compiling()
        return found.stats.compiled

    def chat(
        self,
        system: str | None = None,
        *,
        cache: Any = None,
        cache_config: Any = None,
        resume: str | Path | None = None,
        **parameters: Any,
    ) -> Chat:
        """A conversation whose cache is kept between its turns. See `Chat`.

        system: the system message. cache, cache_config: the backend, as of `generate`. resume: a file that `Chat.save`
        wrote, to go on from there. parameters: of every turn, as of `generate`.
        """
        if resume is not None and (system, cache, cache_config) != (None, None, None):
            raise OptionError("resume= brings the system message and the cache of its file: leave these out")
        chat = Chat(self, self._start_turn, system, cache, cache_config, parameters)
        self._check({"cache": cache, "cache_config": cache_config} | parameters | {"num_return_sequences": 1})
        if resume is not None:
            chat.resume(resume)
        return chat

    def prefill(
        self,
        inputs: Any = None,
        *,
        cache: Any = None,
        cache_config: Any = None,
        resume: str | Path | None = None,
        **parameters: Any,
    ) -> Prefix:
        """Read a prompt once, for many continuations. See `Prefix`.

        inputs: one prompt, as of `generate`; its last token is read too. cache, cache_config: the backend. resume: a
        file that `Prefix.save` wrote, in place of a prompt. parameters: as of `generate`.
        """
        if resume is not None:
            if (inputs, cache, cache_config) != (None, None, None) or parameters:
                raise OptionError("resume= brings the prompt and the cache of its file: leave everything else out")
            return read_prefix(self, resume)
        parameters |= ONE_TOKEN
        return Prefix(self, self.generate(inputs, cache=cache, cache_config=cache_config, **parameters).cache)

    def batch(
        self,
        *,
        slots: int = 32,
        piece_tokens: int | None = None,
        reads_first: bool = False,
        max_cache_bytes: int | None = None,
    ) -> Batch:
        """A queue of prompts that run together, for `submit` from any thread. See `Batch`.

        slots: rows that are computed at once; a search has several. piece_tokens: tokens of new prompts that are read
        between two steps of the others; None for as many as take about as long as a step, for each of at most eight
        prompts. reads_first: new prompts are read before the next step instead, which takes the least time in all; the
        others wait. max_cache_bytes: of all caches together: a prompt waits until its own has room as planned;
        default: 80 % of the device memory that is free now. What a prompt's result is: see `generate_many`.
        """
        return Batch(self._scheduler(slots, max_cache_bytes, piece_tokens, reads_first))

    def generate_many(
        self,
        prompts: Any,
        *,
        slots: int = 32,
        max_cache_bytes: int | None = None,
        progress: bool = False,
        **parameters: Any,
    ) -> Iterator[BatchRequest]:
        """Generate for each of many prompts, together; yields their requests as they end: see `BatchRequest`.

        prompts: an iterable, read as there is room, of what `generate` takes as inputs, or of mappings with "prompt"
        and parameters of their own. Each text is that of `generate` with the same arguments; where it draws, it draws
        numbers of its own, from `seed` or a seed drawn for it. A prompt that fails has its error in place of a result.
        Results have no cache. slots, max_cache_bytes: as of `batch`. progress: show a progress bar on standard error.
        parameters: as of `generate`, for all prompts.
        """
        check_common(parameters)
        return generate_many(self._scheduler(slots, max_cache_bytes, reads_first=True), prompts, parameters, progress)

    def _scheduler(
        self, slots: int, max_cache_bytes: int | None, piece_tokens: int | None = None, reads_first: bool = False
    ) -> Scheduler:
        for name, value in (("slots", slots), ("piece_tokens", piece_tokens), ("max_cache_bytes", max_cache_bytes)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise OptionError(f"{name}={value!r}: give a whole number of 1 or more")
        self._runner.ranks.resume()
        if max_cache_bytes is None:
            free = find_free(prompt_device(self.model)).device
            max_cache_bytes = None if free is None else -self._runner.ranks.most(-int(free * _SHARE_OF_FREE))
        return Scheduler(self._runner, self._start_request, slots, piece_tokens, reads_first, max_cache_bytes)

    def _start_request(self, request: BatchRequest, make_room: Callable[[], bool]) -> Driver:
        """The run of one prompt among many, with random numbers and processors of its own."""
        own = dict(request.parameters)
        check_common({name: own.get(name) for name in ("streamer", "return_legacy_cache")})
        if own.get("seed") is None:
            own["seed"] = self._runner.ranks.most(int(torch.randint(2**31, ())))
        own["cancellation"] = request
        return self._start(read_call(request.inputs, **with_own_processors(own)), streams=True, make_room=make_room)

    def __repr__(self) -> str:
        changed = ", ".join(f"{name}={getattr(self.config, name)!r}" for name in self.config.to_dict(use_diff=True))
        tokenizer = "no tokenizer" if self.tokenizer is None else type(self.tokenizer).__name__
        return f"Generator({self._title}, {tokenizer}, EngineConfig({changed}))"

    @property
    def _title(self) -> str:
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"{type(self.model).__name__}, {dtype} on {prompt_device(self.model)}"

    @property
    def pools(self) -> dict[str, int]:
        """What is kept between calls. graphs: compiled steps. draft_bytes: the weights of the last assistant_model.
        prefix_bytes: the caches in the prefix store.
        """
        draft = self._draft
        return {
            "graphs": self._runner.graphs,
            "draft_bytes": 0 if draft is None else draft.model.get_memory_footprint(),
            "prefix_bytes": 0 if self._store is None else self._store.bytes,
        }

    def release(self) -> None:
        """Free what is kept between calls, and empty the allocators' caches.

        Later calls and running streams compile and load again what they need: no text changes.
        """
        self._draft = None
        self._runner.discard_graphs()
        self._clear_store()
        empty_allocators()

    def _clear_store(self) -> None:
        if self._store is not None:
            self._store.clear()

    def _start_turn(
        self, inputs: Any, arguments: dict[str, Any], instead: dict[str, Any], pauses: FindPauses
    ) -> Stream:
        """`stream` for a chat. instead: what takes the place of arguments that an `OptionError` refuses."""
        other = read_call(inputs, **arguments | instead) if instead else None
        run = self._start(read_call(inputs, **arguments), streams=True, pauses=pauses, instead=other)
        return Stream(run, self._title)

    def _start(
        self,
        call: Call,
        streams: bool,
        make_room: Callable[[], bool] = lambda: False,
        pauses: FindPauses = lambda cache: (),
        instead: Call | None = None,
    ) -> Driver:
        """The run of a call; that of `instead` where an `OptionError` refuses it.

        make_room: called first when memory is out; it says whether it has freed some. pauses: in reading the prompt.
        """
        grad = torch.is_grad_enabled()
        try:
            with ending(call.streamer):
                self._runner.ranks.resume()
                try:
                    return self._prepare(call, streams, make_room, pauses)
                except OptionError:
                    if instead is None:
                        raise
                    self._runner.ranks.end()
                    self._runner.ranks.resume()
                return self._prepare(instead, streams, make_room, pauses)
        except BaseException:
            self._runner.ranks.end()
            raise
        finally:
            set_grad_enabled(grad)  # Ctrl-C may have come where torch.no_grad() ended

    def _prepare(self, call: Call, streams: bool, make_room: Callable[[], bool], pauses: FindPauses) -> Driver:
        """The run that `call` asks for. Checks come first, then the encoder's forward, then the run's objects."""
        started = time.perf_counter()
        call = read_parameters(call)
        call = replace(call, tokenizer=self.tokenizer) if call.tokenizer is None else call
        ranks = self._runner.ranks
        stop = Cancellation(call.cancellation, ranks)
        fallbacks = self.config.on_oom if call.on_oom is None else checked_fallbacks(call.on_oom)
        taken: list[Fallback] = []
        recovery = Recovery(fallbacks, taken, self._clear_store, make_room)
        draft_recovery = Recovery(fallbacks, taken, self._clear_store, make_room)
        budget = Budget(self.config.max_cache_bytes, self.config.over_budget, taken)
        draft = self._draft_of(call.assistant_model)
        choice = read_cache_choice(self.model, call, self.config)
        request, draft_request = self._read(call, choice.live, draft)
        said = fallbacks, choice.name, request.max_columns, request.chunk_tokens, request.strategy.name, request.rows
        with stop.noting_keys():
            ranks.begin(prompt_device(self.model), request.prompt.ids.tolist(), *said)
        cache, known = self._cache_for(choice, request, budget)
        if request.source is not None:
            try:
                request = request.encoded(self.model, recovery.apply_before)
                if draft is not None and draft_request is not None:
                    draft_request = draft_request.encoded(draft.model, draft_recovery.apply_before)
            except Exhausted as error:
                seconds = time.perf_counter() - started
                nothing = nothing_generated(
                    request.prompt.ids, call.tokenizer is not None, taken, seconds, request.grammar is not None
                )
                message = f"memory was out in the encoder, before the first token ({error})"
                raise OutOfMemoryError(message, nothing) from error.__cause__
            cache, known = self._cache_for(choice, request, budget)
        reused = Reused(cache)
        if choice.live is None and self._store is not None and can_reuse(self._runner, request):
            found = self._store.find(cache, request.prompt.ids[0], request.needs.rows_per_prompt > 1)
            pause = max((one.columns for one in found.pauses), default=0)
            if ranks.agree(found.cache.total_tokens) and ranks.agree(pause):  # else memory was out on one of them
                reused = found
        read, mask = request.read
        model_kwargs = dict(read.model_kwargs)
        columns = Columns(mask, request.columns, model_kwargs.pop("position_ids", None))
        inputs = ModelInputs(request.prompt.embeds, model_kwargs, flags=request.output_flags)
        if not known and not call.trust_cache:
            check_content(self._runner, cache, request, columns, inputs, call.tokenizer)
        keep = None if self.config.max_cache_bytes is None else budget.keep
        prefix = CachedPrefix(request.before, request.prompt.columns_without_ids)
        own = () if request.guidance is not None or request.output_flags else pauses(reused.cache)
        shares = not makes_graphs(self.config.compile)  # a graph cannot read shared prefixes
        options = SessionOptions(
            request.chunk_tokens,
            stop.check,
            recovery.apply_next,
            ranks,
            shares_prefixes=shares,
            rolls_back=request.needs.verifies,
            make_room=keep,
            pauses=sorted((*own, *reused.pauses), key=lambda one: one.columns),
        )
        session = ModelSession(self._runner, reused.cache, columns, inputs, prefix, options)
        draft_session = None
        if draft is not None and draft_request is not None:
            options = SessionOptions(request.chunk_tokens, stop.check, draft_recovery.apply_next, ranks)
            draft_session = draft.session(draft_request, options)
        loop = DecodingLoop(
            request,
            session if request.guidance is None else GuidedSession(session, request.guidance),
            _stream_buffer(request, call, streams),
            RunClock(started),
            tokenizer=call.tokenizer,
            legacy=bool(call.return_legacy_cache),
            draft=draft_session,
            fallbacks=taken,
            ranks=ranks,
        )
        return Driver(loop, stop, lambda: reused.keep(session.cache), budget.planned_bytes)

    def _check(self, arguments: dict[str, Any]) -> None:
        """Refuse arguments of later calls that no call takes, whatever its prompt."""
        one_token = without_padding(torch.zeros(1, 1, dtype=torch.long))
        call = read_parameters(read_call(one_token, **{"tokenizer": self.tokenizer} | arguments))
        read_cache_choice(self.model, call, self.config)
        self._read(call, None, self._draft_of(call.assistant_model))

    def _read(self, call: Call, live: EngineCache | None, draft: Draft | None) -> tuple[Request, DraftRequest | None]:
        """The requests to the model and to its draft. live: the cache that was given."""
        chunk_tokens = self.config.prefill_chunk_tokens
        request = read_request(
            self.model, call, live, draft=None if draft is None else draft.model, chunk_tokens=chunk_tokens
        )
        if draft is None:
            return request, None
        read = read_draft_request(draft.model, self.model, request, live, call)
        return replace(request, drafts=draft.drafts(request.strategy), translation=read.translation), read

    def _cache_for(self, choice: CacheChoice, request: Request, budget: Budget) -> tuple[EngineCache, bool]:
        """The cache, checked with the request as far as possible, and whether its content surely begins the prompt."""
        cache, known = choice.live, True
        if cache is None:
            cache = new_cache(self.model, choice, request, self.config, budget, self._runner.takes_cache)
        elif request.guidance is None:  # else it is empty
            known = check_continues(cache, request, self.model)
            check_padding_ahead(self._runner, cache, request.mask)
        check_together(self._runner, cache, request, self.config.compile)
        return cache, known

    def _draft_of(self, model: Any) -> Draft | None:
        """The draft with this model, kept from the last call where it is the same."""
        if model is None:
            return None
        draft = self._draft  # another thread may release it
        if draft is None or draft.given is not model:
            draft = self._draft = Draft(model, self.config.linears if self._runner.ranks.size == 1 else "default")
        return draft


def _stream_buffer(request: Request, call: Call, streams: bool) -> StreamBuffer:
    """streams: whether the run is a `Stream`."""
    prompts = request.prompt.ids
    adapter = adapter_for(
        call.streamer,
        prompts,
        request.mask[:, request.first_known_column :],
        returned=request.needs.texts_per_prompt,
        pad_id=request.pad_id,
        stop_strings=request.stop_strings,
    )
    wants_text = streams or request.stop_strings or request.grammar is not None
    has_form = [False] * len(prompts)
    if request.grammar is not None:
        has_form = [constraint is not None for constraint in request.grammar.constraints]
    tokenizer = call.tokenizer if wants_text else None
    return StreamBuffer(prompts, tokenizer, request.stop_strings, adapter, has_form, request.eos_ids, streams)


def _checked(config: EngineConfig | None) -> EngineConfig:
    """The configuration that was given, or the default one. Raises `OptionError`, and what `check_new` raises."""
    if config is None:
        return EngineConfig()
    if not isinstance(config, EngineConfig):
        raise OptionError(
            f"config={config!r:.80}, but it is an EngineConfig: EngineConfig(...), EngineConfig.from_dict({{...}}) or "
            "configs.preset(name) makes one"
        )
    if config.cache is not None:
        check_new(config.cache, None)
    return config
