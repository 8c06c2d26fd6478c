"""`Generator`: one model, and the runs it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

import engine
from caches.platform.accelerate_hooks import prompt_device
from caches.platform.out_of_memory import empty_allocators
from configs import CacheConfig, EngineConfig
from engine.decoding.chunking import FindPauses
from engine.decoding.driver import Driver
from engine.errors import EngineError, OptionError
from engine.kernels.low_bit_linears import ENCODERS
from engine.kernels.weight_conversion import convert_linears, round_inputs, weights_in_words
from engine.loading.load import load
from engine.memory.cache_choice import check_new
from engine.memory.free_memory import find_free
from engine.model.facts import ModelFacts
from engine.model.model_runner import ModelRunner
from engine.output.hf_streamers import ending
from engine.parameters import generate_parameters, takes
from engine.request.call import ONE_TOKEN, Call, read, read_call
from engine.result import Generation
from engine.reuse.chat import Chat, Instead
from engine.reuse.chat_cache import ChatCache
from engine.reuse.conversation import history
from engine.reuse.prefix import Prefix, read_prefix
from engine.reuse.prefix_store import PrefixStore
from engine.run_builder import RunBuilder
from engine.scoring import PIECE, TextScore, read_texts, score
from engine.serving.batch import Batch
from engine.serving.batch_request import BatchRequest
from engine.serving.many import check_common, generate_many, of_one_prompt
from engine.serving.scheduler import Scheduler
from engine.streaming import AsyncStream, Cancelled, Stream

_SHARE_OF_FREE = 0.8  # of the device memory, for the caches of many prompts


class Generator:
    """Generates with one model. Compiled steps and the last draft are kept between calls: see `pools`.

    model: a `PreTrainedModel`, in PEFT's wrapper or not, or a local path or hub id, which also brings its tokenizer.
    tokenizer: needed for text prompts, text results and stop strings. config: how it works.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: EngineConfig | None = None,
    ):
        config = _checked(config)
        self.model, tokenizer = load(model, read("tokenizer", tokenizer), config)
        if config.weights in ENCODERS:
            convert_linears(self.model, config.weights)
        if config.activations != "full":
            round_inputs(self.model)
        self._runner = ModelRunner(self.model, config.compile, config.linears)
        self._store: PrefixStore | None = None
        if config.prefix_store_bytes is not None:
            self._store = PrefixStore(self.model, config.prefix_store_bytes, config.prefix_store_folder)
        self._builder = RunBuilder(self._runner, tokenizer, config, self._store)

    @property
    def config(self) -> EngineConfig:
        """How it works: another one needs another `Generator`."""
        return self._builder.config

    @property
    def facts(self) -> ModelFacts:
        """What is so of the model's forwards, found out by trials of a few tokens when something depends on it."""
        return ModelFacts(self._runner)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of calls that bring none. Assign another one to replace it."""
        return self._builder.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._builder.tokenizer = tokenizer

    @takes(generate_parameters, documented_by=engine.generate)
    def generate(
        self, inputs: object = None, generation_config: GenerationConfig | None = None, **arguments: object
    ) -> Generation:
        """Generate to the end. Parameters: those of `engine.generate`, without its model."""
        return self._builder.start(self._call(inputs, generation_config, arguments), streams=False).to_end()

    @takes(generate_parameters, documented_by=engine.generate)
    def stream(
        self, inputs: object = None, generation_config: GenerationConfig | None = None, **arguments: object
    ) -> Stream:
        """Generate piece by piece: one `StreamChunk` per row and step. Arguments are checked here.

        Parameters: those of `engine.generate`, without its model.
        """
        return Stream(self._builder.start(self._call(inputs, generation_config, arguments), streams=True), self._title)

    def warmup(self, inputs: object, **arguments: Any) -> str:
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
            out = self.generate(inputs, **arguments | {"max_new_tokens": 4, "min_new_tokens": 4})
            self._runner.finish_compiling()
        return out.stats.compiled

    def chat(
        self,
        system: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        cache: object = None,
        cache_config: object = None,
        resume: str | Path | None = None,
        when_full: str = "stop",
        **parameters: object,
    ) -> Chat:
        """A conversation whose cache is kept between its turns. See `Chat`.

        system: the system message. messages: what was said before, mappings with "role" and "content", a system message
        among them; the last one is not a user's. cache, cache_config: the backend, as of `generate`. resume: a file
        that `Chat.save` wrote, to go on from there. when_full: what a turn does where the model's length is reached:
        "stop" raises `InputError`, "drop" leaves out the oldest turns. parameters: of every turn, as of `generate`.
        """
        if resume is not None and (system, messages, cache, cache_config) != (None, None, None, None):
            raise OptionError("resume= brings the messages and the cache of its file: leave these out")
        chat_cache = ChatCache(self, cache, cache_config)
        chat = Chat(self, self._start_turn, history(system, messages), chat_cache, parameters, when_full)
        backend = {"cache": cache, "cache_config": cache_config}
        self._builder.check(backend | parameters | {"num_return_sequences": 1})
        if resume is not None:
            chat.resume(resume)
        return chat

    def prefill(
        self,
        inputs: object = None,
        *,
        cache: object = None,
        cache_config: Any = None,
        resume: str | Path | None = None,
        **parameters: Any,
    ) -> Prefix:
        """Read a prompt once, for many continuations. See `Prefix`.

        inputs: one prompt, as of `generate`; its last token is read too. cache, cache_config: the backend. resume: a
        file that `Prefix.save` wrote, in place of a prompt. parameters: as of `generate`.
        """
        reason = self.facts.why_not_cut
        if reason is not None:
            raise OptionError(
                f"a prefix is read without what comes behind it, and in {type(self.model).__name__} {reason}: give "
                "generate() whole prompts"
            )
        if resume is not None:
            if (inputs, cache, cache_config) != (None, None, None) or parameters:
                raise OptionError("resume= brings the prompt and the cache of its file: leave everything else out")
            return read_prefix(self, resume)
        parameters |= ONE_TOKEN
        return Prefix(self, self.generate(inputs, cache=cache, cache_config=cache_config, **parameters).cache)

    def score(
        self, texts: object, *, rows: int = 4, piece_tokens: int = PIECE, cache: object = None, cache_config: Any = None
    ) -> list[TextScore]:
        """How likely the model finds each of the texts, in their order: see `TextScore`.

        texts: a text, its token ids, or a list of either. Each has 2 tokens or more. rows: texts that are computed
        together. piece_tokens: a text is read in pieces of so many tokens, whose logits [rows, piece, vocabulary] exist
        at once; with a cache that loses something (quantized, with a window, with sinks) each piece sees what the cache
        still has of those before it, and 1 is as in generation. cache, cache_config: the backend, as of `generate`, by
        name. Raises `InputError` for models with an encoder, and for those that read a text otherwise in pieces.
        """
        if not isinstance(cache, str | CacheConfig | None):
            raise OptionError("every run of score() begins with an empty cache: give the name of one as cache=")
        generate = partial(self.generate, cache=cache, cache_config=cache_config)
        return score(generate, self.model, self.facts, read_texts(texts, self.tokenizer), rows, piece_tokens)

    @takes(generate_parameters, documented_by=engine.generate)
    def astream(
        self, inputs: object = None, generation_config: GenerationConfig | None = None, **arguments: Any
    ) -> AsyncStream:
        """`stream` for `async for`: the run is in a thread of its own, and begins with the first chunk asked for.

        Parameters: those of `engine.generate`, without its model.
        """
        stop = Cancelled(read("cancellation", arguments.get("cancellation")))
        begin = partial(self.stream, inputs, generation_config, **arguments | {"cancellation": stop})
        return AsyncStream(begin, stop)

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
        **parameters: object,
    ) -> Iterator[BatchRequest]:
        """Generate for each of many prompts, together; yields their requests as they end: see `BatchRequest`.

        prompts: an iterable, read as there is room, of what `generate` takes as inputs, or of mappings with "prompt"
        and parameters of their own. Each text is that of `generate` with the same arguments; where it draws, it draws
        numbers of its own, from `seed` or a seed drawn for it. A prompt that fails has its error in place of a result.
        Results have no cache. slots, max_cache_bytes: as of `batch`. progress: show a progress bar on standard error.
        parameters: as of `generate`, for all prompts.
        """
        check_common(parameters)
        parameters = self.with_draft(parameters)
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
        call = self._call(request.inputs, None, of_one_prompt(request, self._runner.ranks))
        return self._builder.start(call, streams=True, make_room=make_room)

    def __repr__(self) -> str:
        changed = ", ".join(f"{name}={getattr(self.config, name)!r}" for name in self.config.to_dict(use_diff=True))
        tokenizer = "no tokenizer" if self.tokenizer is None else type(self.tokenizer).__name__
        return f"Generator({self._title}, {tokenizer}, EngineConfig({changed}))"

    @property
    def _title(self) -> str:
        return f"{type(self.model).__name__}, {weights_in_words(self.model)} on {prompt_device(self.model)}"

    @property
    def pools(self) -> dict[str, int]:
        """What is kept between calls. graphs: compiled steps. draft_bytes: the weights of the last assistant_model.
        prefix_bytes: the caches in the prefix store.
        """
        draft = self._builder.draft
        return {
            "graphs": self._runner.graphs,
            "draft_bytes": 0 if draft is None else draft.model.get_memory_footprint(),
            "prefix_bytes": 0 if self._store is None else self._store.bytes,
        }

    @property
    def prefix_failures(self) -> int:
        """How often a cache could not be put into the prefix store or its folder, or taken out."""
        return 0 if self._store is None else self._store.failures

    def release(self) -> None:
        """Free what is kept between calls, and empty the allocators' caches.

        Later calls and running streams compile and load again what they need: no text changes.
        """
        self._runner.discard_graphs()
        self._builder.release()  # after the model's turn, at the end of which a run may store its cache
        empty_allocators()

    def with_draft(self, parameters: dict[str, Any]) -> dict[str, object]:
        """The parameters of a call, in which a path as `assistant_model` is the model that it names."""
        return self._builder.with_draft(parameters)

    def _call(self, inputs: object, generation_config: GenerationConfig, arguments: dict[str, Any]) -> Call:
        with ending(arguments.get("streamer")):
            return read_call(inputs, **{"generation_config": generation_config} | self.with_draft(arguments))

    def _start_turn(self, inputs: object, arguments: dict[str, Any], instead: Instead, pauses: FindPauses) -> Stream:
        """`stream` for a chat. instead: called with the error that refuses them; the inputs and arguments to try."""

        def other_call(error: EngineError) -> Call | None:
            others = instead(error)
            return None if others is None else self._call(others[0], None, others[1])

        call = self._call(inputs, None, arguments)
        return Stream(self._builder.start(call, streams=True, pauses=pauses, instead=other_call), self._title)


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
