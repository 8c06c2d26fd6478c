"""`Generator`: one model, and the runs it starts."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import caches
import engine
from caches import EngineCache
from configs import EngineConfig, checked_fallbacks
from engine.decoding.assistant import Draft, DraftRequest, check_takes_back, read_draft_request, verifies
from engine.decoding.cancellation import Cancellation
from engine.decoding.driver import Driver
from engine.decoding.guidance import GuidedSession, check_texts_bear_pads
from engine.decoding.loop import DecodingLoop
from engine.decoding.model_session import ModelSession
from engine.errors import OptionError, OutOfMemoryError
from engine.memory.budget import Budget
from engine.memory.cache_choice import CacheChoice, check_new, new_cache, read_cache_choice
from engine.memory.fallbacks import Recovery
from engine.model.accelerate_hooks import prompt_device
from engine.model.forward import ModelRunner
from engine.model.loading import load
from engine.model.masks import Columns, check_takes_masks
from engine.model.rope_probe import check_rope
from engine.out_of_memory import Exhausted, empty_allocators
from engine.output.stream_buffer import stream_buffer_for
from engine.request.call import Call, parameters, read_call, takes
from engine.request.checks import check_places, check_positions, check_room_for_rows
from engine.request.continuation import check_content, check_continues, check_pads_ahead
from engine.request.parameters import read, read_parameters
from engine.request.request import Request, read_request
from engine.result import Generation, nothing_generated
from engine.streaming import Stream


class Generator:
    """Generates with one model. Keeps what is worth keeping between calls: see `pools`.

    model: a `PreTrainedModel`, in PEFT's wrapper or not, or a local path or hub id, which also brings its tokenizer.
    tokenizer: needed for text prompts, text results and stop strings. config: how it works.
    """

    def __init__(self, model: PreTrainedModel | str | Path, tokenizer: Any = None, config: EngineConfig | None = None):
        self.config = _checked(config)
        self.model, self.tokenizer = load(model, read("tokenizer", tokenizer), self.config)
        self._runner = ModelRunner(self.model, self.config.compile, self.config.linears)
        self._draft: Draft | None = None

    @takes(parameters, as_told_by=engine.generate)
    def generate(self, inputs: Any = None, **arguments: Any) -> Generation:
        """Generate to the end. Parameters: those of `engine.generate`, without its model."""
        return self._start(read_call(inputs, **arguments), streams=False).to_end()

    @takes(parameters, as_told_by=engine.generate)
    def stream(self, inputs: Any = None, **arguments: Any) -> Stream:
        """Generate piece by piece: one `StreamChunk` per row and step. Arguments are checked here, before the first
        piece.

        Parameters: those of `engine.generate`, without its model.
        """
        return Stream(self._start(read_call(inputs, **arguments), streams=True), self._title)

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

    def _start(self, call: Call, streams: bool) -> Driver:
        grad = torch.is_grad_enabled()
        try:
            return self._prepare(call, streams)
        except BaseException:  # a thread that waits for what the streamer gets would wait for ever
            with suppress(Exception):
                call.streamer.end()  # type: ignore[union-attr]
            raise
        finally:
            torch._C._set_grad_enabled(grad)  # Ctrl-C may have come where torch.no_grad() ended

    def _prepare(self, call: Call, streams: bool) -> Driver:
        started = time.perf_counter()
        call = read_parameters(call)
        stop = Cancellation(call.cancellation)
        fallbacks = self.config.on_oom if call.on_oom is None else checked_fallbacks(call.on_oom)
        recovery, draft_recovery = Recovery(fallbacks), Recovery(fallbacks)
        draft_recovery.taken = recovery.taken
        budget = Budget(self.config.max_cache_bytes, self.config.over_budget, recovery.taken)
        tokenizer = call.tokenizer if call.tokenizer is not None else self.tokenizer
        draft = self._draft_of(call.assistant_model)
        choice = read_cache_choice(self.model, call, self.config)
        request, draft_request = self._read(call, tokenizer, choice.live, draft)
        live, known = self._cache_for(choice, request, budget)
        if request.source is not None:  # the first work, after all that can be checked without
            try:
                request = request.encoded(self.model, recovery.apply_before)
                if draft is not None and draft_request is not None:
                    draft_request = draft_request.encoded(draft, draft_recovery.apply_before)
            except Exhausted as error:
                taken, seconds = recovery.taken, time.perf_counter() - started
                nothing = nothing_generated(request.prompt.ids, tokenizer is not None, taken, seconds)
                told = f"memory was out in the encoder, before the first token ({error})"
                raise OutOfMemoryError(told, nothing) from error.__cause__
            live, known = self._cache_for(choice, request, budget)
        columns, model_kwargs = _columns_of(request)
        if not known and not call.trust_cache:
            check_content(self._runner, live, request, columns, model_kwargs, tokenizer)
        session = self._lane(
            request, live, columns, model_kwargs, check=stop.check, recover=recovery.apply_next, make_room=budget.keep
        )
        run = DecodingLoop(
            request,
            session if request.guidance is None else GuidedSession(session, request.guidance),
            stream_buffer_for(request, tokenizer, call.streamer, streams),
            tokenizer=tokenizer,
            legacy=bool(call.return_legacy_cache),
            started=started,
            draft=None
            if draft is None or draft_request is None
            else draft.session(draft_request, stop.check, draft_recovery.apply_next),
            fallbacks=recovery.taken,
        )
        return Driver(run, stop)

    def _read(
        self, call: Call, tokenizer: Any, live: EngineCache | None, draft: Draft | None
    ) -> tuple[Request, DraftRequest | None]:
        """What the call asks for, of the model and of its draft. live: the cache that was given."""
        request = read_request(
            self.model,
            call,
            tokenizer,
            live,
            assistant=None if draft is None else draft.model,
            chunk_tokens=self.config.prefill_chunk_tokens,
        )
        read = read_draft_request(draft, self.model, request, live, tokenizer, call.assistant_tokenizer)
        if draft is None or read is None:
            return request, None
        return replace(request, drafts=draft.drafts(request.strategy), translation=read.translation), read

    def _cache_for(self, choice: CacheChoice, request: Request, budget: Budget) -> tuple[EngineCache, bool]:
        """The cache, checked with all else, and whether it is certain that what it holds begins the prompt.

        Before an encoder has read its source, as far as that can be told without.
        """
        live, known = choice.live, True
        if live is None:
            live = new_cache(self.model, choice, request, self.config, budget, self._runner.takes_cache)
        elif request.guidance is None:  # else it is empty
            known = check_continues(live, request, self.model)
            check_pads_ahead(self._runner, live, request.mask)
        self._check_together(live, request)
        return live, known

    def _lane(
        self, request: Request, live: EngineCache, columns: Columns, model_kwargs: dict[str, Any], **hooks: Any
    ) -> ModelSession:
        """hooks: `check`, `recover` and `make_room`, see `ModelSession`."""
        return ModelSession(
            self._runner,
            live,
            columns,
            rows=len(request.read[0].ids),
            before=request.before,
            embeds=request.prompt.embeds,
            columns_without_ids=request.prompt.columns_without_ids,
            model_kwargs=model_kwargs,
            flags=request.output_flags,
            chunk_tokens=request.chunk_tokens,
            shares=self.config.compile == "off",
            takes_back=verifies(request.strategy),
            **hooks,
        )

    def _draft_of(self, model: Any) -> Draft | None:
        """The draft that this model is, kept from the last call where it is the same."""
        if model is None:
            return None
        draft = self._draft  # another thread may let go of it
        if draft is None or draft.given is not model:
            draft = self._draft = Draft(model, self.config.linears)
        return draft

    def _check_together(self, live: EngineCache, request: Request) -> None:
        """Refuse what this model, this cache and this request cannot do together."""
        read, mask = request.read
        check_positions(self.model, live, mask.shape[1], request.columns)
        check_room_for_rows(live, len(request.prompt.ids), len(read.ids), request.rows)
        check_takes_masks(self.model, live)
        check_places(live, mask, read.model_kwargs.get("position_ids"))
        check_rope(self._runner, live)
        if live.handle is not None and not self._runner.takes_cache:
            raise OptionError(
                f"{type(self.model).__name__} takes no cache of keys and values (it keeps none, or a state of its own "
                f"kind), so the {live.name} cache has nothing to hold: use cache='none'"
            )
        if live.total_tokens > 0 and getattr(request.strategy, "reads_hidden", False):
            raise OptionError(
                f"{request.strategy.name} compares with the hidden states of all tokens, and those of the "
                f"{live.total_tokens} "
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
            check_texts_bear_pads(self._runner, request.guidance)


def _columns_of(request: Request) -> tuple[Columns, dict[str, Any]]:
    """The columns of what the model reads, and its inputs beside ids, mask and positions."""
    read, mask = request.read
    model_kwargs = dict(read.model_kwargs)
    return Columns(mask, request.columns, model_kwargs.pop("position_ids", None)), model_kwargs


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
