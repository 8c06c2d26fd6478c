"""`RunBuilder`: checks what a call asks for, and builds the objects of its run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from caches import EngineCache
from caches.layers.read_by import ReadBy
from caches.platform.accelerate_hooks import prompt_device
from caches.platform.out_of_memory import Exhausted, in_words, recovering
from caches.platform.torch_api import set_grad_enabled
from caches.platform.undo import on_failure
from configs import EngineConfig, checked_fallbacks
from engine.compiling.full_step import makes_graphs
from engine.decoding.chunking import FindPauses
from engine.decoding.draft import Draft
from engine.decoding.driver import Driver
from engine.decoding.feeder import CachedPrefix, SessionOptions
from engine.decoding.guided_session import GuidedSession
from engine.decoding.loop import DecodingLoop
from engine.decoding.model_session import ModelSession
from engine.decoding.run_clock import RunClock
from engine.decoding.stopping import Cancellation
from engine.errors import EngineError, InputError, OptionError, OutOfMemoryError
from engine.loading.load import load
from engine.memory.budget import Budget
from engine.memory.cache_choice import CacheChoice, new_cache, read_cache_choice
from engine.memory.fallbacks import Recovery
from engine.model.columns import Columns
from engine.model.model_inputs import ModelInputs
from engine.model.model_lock import reader_now
from engine.model.model_runner import ModelRunner
from engine.model.model_sizes import vocabulary_of
from engine.output.hf_streamers import adapter_for, ending
from engine.output.stream_buffer import StreamBuffer
from engine.prompt import EncodedPrompt
from engine.request.call import Call, read_call, read_parameters
from engine.request.compatibility import check_together
from engine.request.draft_request import DraftRequest, read_draft_request
from engine.request.inputs.continuation import check_content, check_continues, check_goes_on, check_reader
from engine.request.read_request import read_request
from engine.request.request import Request
from engine.result import Fallback, nothing_generated
from engine.reuse.prefix_store import PrefixStore, Reused, can_reuse


class RunBuilder:
    """Builds the runs of one `Generator`.

    tokenizer: for calls that bring none. store: caches that later calls may begin with, or None.
    """

    def __init__(
        self, runner: ModelRunner, tokenizer: PreTrainedTokenizerBase, config: EngineConfig, store: PrefixStore | None
    ):
        self._runner, self._store = runner, store
        self.config, self.tokenizer = config, tokenizer
        self.draft: Draft | None = None  # of the last call with an assistant_model
        self._loaded: tuple[str, PreTrainedModel, Any] | None = None  # the last one that a path named

    def release(self) -> None:
        """Free the draft and the stored caches."""
        self.draft = self._loaded = None
        self._clear_store()

    def with_draft(self, arguments: dict[str, Any]) -> dict[str, object]:
        """The arguments of a call, in which a path or hub id as `assistant_model` is the model that it names.

        Its tokenizer comes with it where the two vocabularies differ. Raises `OptionError` if it cannot be loaded.
        """
        path = arguments.get("assistant_model")
        if not isinstance(path, (str, Path)):
            return arguments
        loaded = self._loaded  # another thread may release it
        if loaded is None or loaded[0] != str(path):
            try:
                loaded = self._loaded = str(path), *load(path, None, self.config)
            except InputError as error:
                raise OptionError(f"assistant_model: {error}") from error
        _, model, draft_tokenizer = loaded
        tokenizer = self.tokenizer if arguments.get("tokenizer") is None else arguments["tokenizer"]
        is_same = tokenizer is None or draft_tokenizer.get_vocab() == tokenizer.get_vocab()
        is_same &= vocabulary_of(model) == vocabulary_of(self._runner.model)  # one may have more ids, as padding
        return ({} if is_same else {"assistant_tokenizer": draft_tokenizer}) | arguments | {"assistant_model": model}

    def check(self, arguments: dict[str, Any]) -> None:
        """Refuse arguments of the later turns of a chat that no call takes, whatever its prompt."""
        one_token = EncodedPrompt(torch.zeros(1, 1, dtype=torch.long, device="cpu"), is_chat=True)
        call = read_parameters(read_call(one_token, **{"tokenizer": self.tokenizer} | self.with_draft(arguments)))
        read_cache_choice(self._runner.model, call, self.config)
        self._read(call, None, self._draft_of(call.assistant_model))

    def start(
        self,
        call: Call,
        streams: bool,
        make_room: Callable[[], bool] = lambda: False,
        pauses: FindPauses = lambda cache: (),
        instead: Callable[[EngineError], Call | None] = lambda error: None,
    ) -> Driver:
        """The run of a call. The other ranks begin one too.

        streams: whether the run is a `Stream`. make_room: called first when memory is out; it says whether it has freed
        some. pauses: in reading the prompt. instead: called with the `InputError` or `OptionError` that refuses a call;
        it returns another one to try, or None. Raises `OutOfMemoryError` without tokens where memory is out by now.
        """
        ranks, grad = self._runner.ranks, torch.is_grad_enabled()
        requests: list[Request] = []
        try:
            with recovering() as outcome, on_failure(ranks.end), ending(call.streamer):
                ranks.resume()
                while True:
                    try:
                        return self._build(call, streams, make_room, pauses, requests)
                    except (InputError, OptionError) as error:
                        other_call = instead(error)
                        if other_call is None:
                            raise
                    ranks.end()
                    ranks.resume()
                    call = other_call
        finally:
            set_grad_enabled(grad)  # Ctrl-C may have come where torch.no_grad() ended
        failure = outcome.failure
        assert failure is not None
        prompts = requests[-1].prompt.ids if requests else torch.empty(1, 0, dtype=torch.long, device="cpu")
        with_text, has_form = (
            (call.tokenizer or self.tokenizer) is not None,
            bool(requests) and requests[-1].grammar is not None,
        )
        nothing = nothing_generated(prompts, with_text, (), 0.0, has_form)
        message = f"memory was out while the run was prepared, before the first token ({in_words(failure)})"
        raise OutOfMemoryError(message, nothing) from failure

    def _build(
        self, call: Call, streams: bool, make_room: Callable[[], bool], pauses: FindPauses, requests: list[Request]
    ) -> Driver:
        """The run that `call` asks for. Checks come first, then the encoder's forward, then the run's objects.

        requests: the list to which the request is added once it is known.
        """
        started = time.perf_counter()
        call = read_parameters(call)
        if call.tokenizer is None:
            call = replace(call, arguments=call.arguments | {"tokenizer": self.tokenizer})
        runner, config, ranks = self._runner, self.config, self._runner.ranks
        stop = Cancellation(call.cancellation, ranks)
        fallbacks = config.on_oom if call.on_oom is None else checked_fallbacks(call.on_oom)
        applied: list[Fallback] = []
        recovery, draft_recovery = (Recovery(fallbacks, applied, self._clear_store, make_room) for _ in range(2))
        budget = Budget(config.max_cache_bytes, config.over_budget, applied)
        draft, now = self._draft_of(call.assistant_model), reader_now(runner.model)
        if now.version is not None:
            runner.facts.renew(now.version)
        choice = read_cache_choice(runner.model, call, config)
        request, draft_request = self._read(call, choice.live, draft)
        requests.append(request)
        agreed = fallbacks, choice.name, request.lengths.ids, request.chunk_tokens, request.strategy.name, request.rows
        with stop.noting_keys():
            ranks.begin(prompt_device(runner.model), request.prompt.ids.tolist(), *agreed)
        reader = None if call.trust_cache else now
        cache, checked = self._cache_for(choice, request, budget, reader)
        if request.source is not None:
            with _reporting_out_of_memory(request, call, applied, started):
                request = request.encoded(runner.model, recovery.apply_before)
                if draft is not None and draft_request is not None:
                    draft_request = draft_request.encoded(draft.model, draft_recovery.apply_before)
            cache, checked = self._cache_for(choice, request, budget, reader)
        reused = self._reused(cache, request, now) if choice.live is None else Reused(cache)
        fed, mask = request.read
        model_kwargs = dict(fed.model_kwargs)
        columns = Columns(mask, request.columns, model_kwargs.pop("position_ids", None))
        inputs = ModelInputs(request.prompt.embeds, model_kwargs, flags=request.output_flags)
        if not checked and not call.trust_cache:
            check_content(runner, cache, request, columns, inputs, call.tokenizer, now)
        own_pauses = () if request.guidance is not None or request.output_flags else pauses(reused.cache)
        options = SessionOptions(
            request.chunk_tokens,
            stop.check,
            recovery.apply_next,
            ranks,
            shares_prefixes=not makes_graphs(config.compile),  # a graph cannot read shared prefixes
            rolls_back=request.needs.verifies,
            make_room=None if config.max_cache_bytes is None else budget.keep,
            compiled=not request.config.disable_compile,
            read_by=now,
        )
        prefix = CachedPrefix(request.lengths.cached, request.lengths.embedded)
        all_pauses = sorted((*own_pauses, *reused.pauses), key=lambda pause: pause.columns)
        arguments = runner, reused.cache, columns, inputs, prefix, options, all_pauses
        guidance = request.guidance
        session = ModelSession(*arguments) if guidance is None else GuidedSession(guidance, *arguments)
        draft_session = None
        if draft is not None and draft_request is not None:
            options = SessionOptions(request.chunk_tokens, stop.check, draft_recovery.apply_next, ranks)
            draft_session = draft.session(draft_request, options)
        loop = DecodingLoop(
            request,
            session,
            _stream_buffer(request, call, streams),
            RunClock(started),
            tokenizer=call.tokenizer,
            legacy=bool(call.return_legacy_cache),
            draft=draft_session,
            fallbacks=applied,
            ranks=ranks,
        )

        def finish() -> None:
            reused.keep(session.cache)
            if draft is not None:
                draft.judge(request.drafts)

        return Driver(loop, stop, finish, budget.planned_bytes)

    def _read(self, call: Call, live: EngineCache | None, draft: Draft | None) -> tuple[Request, DraftRequest | None]:
        """The requests to the model and to its draft. live: the cache that was given."""
        model, chunk_tokens = self._runner.model, self.config.prefill_chunk_tokens
        request = read_request(
            model, call, live, draft=None if draft is None else draft.model, chunk_tokens=chunk_tokens
        )
        if draft is None:
            return request, None
        draft_request = read_draft_request(draft.model, model, request, live, call)
        request = replace(request, drafts=draft.drafts(request.strategy, model), translation=draft_request.translation)
        return request, draft_request

    def _draft_of(self, model: PreTrainedModel) -> Draft | None:
        """The draft with this model, kept from the last call where it is the same."""
        if model is None:
            return None
        draft = self.draft  # another thread may release it
        if draft is None or draft.given is not model:
            draft = self.draft = Draft(model, self.config.linears if self._runner.ranks.size == 1 else "default")
        return draft

    def _cache_for(
        self, choice: CacheChoice, request: Request, budget: Budget, reader: ReadBy | None
    ) -> tuple[EngineCache, bool]:
        """The cache, checked with the request as far as possible, and whether its content surely begins the prompt.

        reader: the model that goes on from it; None where the caller has vouched for it.
        """
        runner, cache, checked = self._runner, choice.live, True
        if cache is None:
            cache = new_cache(runner.model, choice, request, self.config, budget, runner.takes_cache)
        elif request.guidance is None:  # else it is empty
            checked = check_continues(cache, request)
            if reader is not None:
                check_reader(cache, reader)
            check_goes_on(runner, cache, request)
        check_together(runner, cache, request, self.config.compile)
        return cache, checked

    def _reused(self, cache: EngineCache, request: Request, now: ReadBy) -> Reused:
        """A stored cache of the same kind that the prompt begins with, or the new one."""
        store, ranks = self._store, self._runner.ranks
        if store is None or not can_reuse(self._runner, request):
            return Reused(cache)
        reused = store.find(cache, request.prompt.ids[0], request.needs.rows_per_prompt > 1, now)
        last_pause = max((pause.columns for pause in reused.pauses), default=0)
        # Memory may have been out on one of them.
        agreed = ranks.agree(reused.cache.total_tokens) and ranks.agree(last_pause)
        return reused if agreed else Reused(cache)

    def _clear_store(self) -> None:
        if self._store is not None:
            self._store.clear()


@contextmanager
def _reporting_out_of_memory(request: Request, call: Call, applied: list[Fallback], started: float) -> Iterator[None]:
    """Where memory is out in the encoder the error has a result without tokens, which says what was tried."""
    try:
        yield
    except Exhausted as error:
        seconds, with_text = time.perf_counter() - started, call.tokenizer is not None
        nothing = nothing_generated(request.prompt.ids, with_text, applied, seconds, request.grammar is not None)
        message = f"memory was out in the encoder, before the first token ({error})"
        raise OutOfMemoryError(message, nothing) from error.__cause__


def _stream_buffer(request: Request, call: Call, streams: bool) -> StreamBuffer:
    prompts, stops = request.prompt.ids, (request.stop_strings, request.stops_from)
    has_form = [False] * len(prompts)
    if request.grammar is not None:
        has_form = [constraint is not None for constraint in request.grammar.constraints]
    adapter = adapter_for(
        call.streamer,
        prompts,
        request.mask[:, request.lengths.first_id :],
        returned=request.needs.texts_per_prompt,
        pad_id=request.pad_id,
        stops=stops,
        has_form=has_form,
    )
    wants_text = streams or request.stop_strings or request.grammar is not None
    tokenizer = call.tokenizer if wants_text else None
    return StreamBuffer(prompts, tokenizer, stops, adapter, has_form, streams)
