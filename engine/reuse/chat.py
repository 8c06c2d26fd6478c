"""`Chat`: a conversation whose cache is kept between the turns, so that a turn reads its own tokens only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache

from caches import EngineCache, branch, convert, inspect, load, recipe
from caches.transfer.convert import can_migrate
from configs import CacheConfig
from configs.cache import DEFAULT_CACHE
from engine.chat_template import OPTIONS, TemplateOptions
from engine.decoding.chunking import FindPauses
from engine.errors import EngineError, InputError, OptionError
from engine.model.model_lock import reader_now
from engine.output.hf_streamers import ending
from engine.prompt import EncodedPrompt
from engine.result import Generation, StreamChunk
from engine.reuse.conversation import Conversation, Message, TemplateText, flat
from engine.reuse.resume_points import ResumePoints
from engine.reuse.room import SIZES, HasModel, with_room_for
from engine.reuse.token_index import common
from engine.streaming import Stream

_LEAST_ROOM = 512  # tokens, of a cache of fixed size
_ONE_ANSWER = {"num_return_sequences": 1}  # a whole generation config may say more, for other calls
_PLAIN_STOP = "\nUser:"  # where there is no template, a model goes on with the next question


class Chat:
    """A conversation with one model.

    What the cache already holds of a turn's prompt is not read again: the longest common beginning of token ids counts.
    Where the history was changed, or a template writes it in another way, tokens behind that are taken back. Caches
    that cannot take them back (states, windows) go on from a branch that was kept: at the end of the system message, of
    the last answer and of the last message.

    Attributes
    ----------
    messages : tuple of dict
        The conversation so far, "role" and "content".
    cache : EngineCache or None
        The live cache; None before the first turn and for backends without one.
    last : Generation or None
        The result of the last turn.
    """

    def __init__(
        self,
        generator: HasModel,
        start: Callable[[Any, dict[str, Any], dict[str, Any], FindPauses], Stream],
        system: str | None,
        cache: Any,
        cache_config: Any,
        parameters: dict[str, Any],
    ):
        """start: of a stream of the generator: see `Generator._start_turn`."""
        if generator.tokenizer is None:
            raise OptionError("a chat needs a tokenizer: Generator(model, tokenizer)")
        if generator.model.config.is_encoder_decoder:
            raise OptionError("a chat needs a model whose prompt and answer are one text, and this one has an encoder")
        if not isinstance(system, str | None):
            raise InputError(f"a system message is a text, not {system!r:.80}")
        self._generator, self._start, self._parameters = generator, start, _checked(parameters)
        self._backend = {"cache": cache, "cache_config": cache_config}
        messages = () if system is None else ({"role": "system", "content": system},)
        self._conversation = Conversation(generator.tokenizer, messages)
        self._resume_points = ResumePoints(generator)
        self._turn_lock = threading.Lock()
        self.cache: Any = None
        if isinstance(cache, (EngineCache, TransformersCache)):
            if not can_migrate(cache):
                raise OptionError("a chat keeps a cache of this package: give the name of one, such as cache='dynamic'")
            self.cache = cache
            self._backend = {"cache": cache.stacks[0].layout.config or cache.name, "cache_config": None}
        self.last: Generation | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        return self._conversation.messages

    def __repr__(self) -> str:
        tokens = 0 if self.cache is None else self.cache.total_tokens
        return f"Chat({len(self.messages)} messages, {tokens} tokens in the cache)"

    def __reduce__(self) -> Any:
        """Raises `TypeError`: copies and pickles would take the model with them, or share the live cache."""
        raise TypeError("a chat has a model and a live cache: fork() makes a second one, save(path) keeps it in a file")

    # Turns.

    def send(self, message: str | Message, **parameters: Any) -> Generation:
        """The answer to a message. parameters: of this turn, over those of the chat: see `engine.generate`.

        Raises as `Generator.generate` does. After an error the conversation is as before.
        """
        return self._to_end(self.stream(message, **parameters))

    def _to_end(self, chunks: Iterator[StreamChunk]) -> Generation:
        for _ in chunks:
            pass
        assert self.last is not None
        return self.last

    def stream(self, message: str | Message, **parameters: Any) -> Iterator[StreamChunk]:
        """`send`, chunk by chunk. When the iterator is closed, the answer so far is the answer."""
        with self._ending(parameters):
            asked = _as_message(message)
        return self._turn(lambda: (*self.messages, asked), parameters)

    def retry(self, **parameters: Any) -> Generation:
        """Another answer to the last message."""
        return self._to_end(self.stream_retry(**parameters))

    def stream_retry(self, **parameters: Any) -> Iterator[StreamChunk]:
        """`retry`, chunk by chunk."""
        with self._ending(parameters):
            self._before_last_answer()
        return self._turn(self._before_last_answer, parameters)

    def edit(self, message: str | Message, **parameters: Any) -> Generation:
        """The answer to another message in place of the last one."""
        with self._ending(parameters):
            asked = _as_message(message)
        return self._to_end(self._turn(lambda: (*self._before_last_question(), asked), parameters))

    def undo(self) -> None:
        """Remove the last message and its answer."""
        with self._between_turns():
            self._conversation = replace(self._conversation, messages=self._before_last_question())

    def _before_last_answer(self) -> tuple[Message, ...]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise InputError("there is no answer to try again: send a message")
        *earlier, answer = self.messages
        begun = self._conversation.begun
        return (*earlier, answer | {"content": begun[len(earlier)]}) if len(earlier) in begun else tuple(earlier)

    def _before_last_question(self) -> tuple[Message, ...]:
        asked = [number for number, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise InputError("there is no message to take back: send one")
        return self.messages[: asked[-1]]

    @contextmanager
    def _between_turns(self) -> Iterator[None]:
        """Hold off other calls. Raises `EngineError` during one."""
        if not self._turn_lock.acquire(blocking=False):
            raise EngineError(
                "a turn of this chat has not ended, in this thread or in another one, and the next one begins with its "
                "answer: wait for it, or close its iterator"
            )
        try:
            yield
        finally:
            self._turn_lock.release()

    def _turn(self, messages: Callable[[], tuple[Message, ...]], parameters: dict[str, Any]) -> Iterator[StreamChunk]:
        with ExitStack() as stack:
            with ending(parameters.get("streamer")):  # that of all turns may be in use
                stack.enter_context(self._between_turns())
            yield from self._answered(messages, parameters)

    def _ending(self, arguments: dict[str, Any]) -> AbstractContextManager[None]:
        return ending((self._parameters | arguments).get("streamer"))

    def _answered(
        self, find_messages: Callable[[], tuple[Message, ...]], arguments: dict[str, Any]
    ) -> Iterator[StreamChunk]:
        with self._ending(arguments):
            messages, parameters = find_messages(), self._parameters | _checked(arguments) | _ONE_ANSWER
            if not self._conversation.has_template:
                parameters = parameters | {"stop_strings": [_PLAIN_STOP, *self._stop_strings(parameters)]}
            options = TemplateOptions.of({name: parameters.get(name) for name in OPTIONS}).resolved(messages)
            asked = self._conversation.ids(messages, options)
            ids = torch.tensor([flat(asked)], device="cpu")
            self.cache = self._resume_points.go_back(self.cache, ids[0])
            if self.cache is not None:
                # Before the turn starts: one that fails ends the caller's streamer.
                self.cache = with_room_for(self.cache, self._generator, EncodedPrompt(ids, is_chat=True), parameters)
        cache_options = self._backend if self.cache is None else {"cache": self.cache}
        # A strategy may not be able to go on from a cache.
        instead = self._without_size if self.cache is not None and self.cache.total_tokens else {}
        pauses = partial(self._resume_points.pauses, partial(self._ends, messages, ids[0]))
        prompt = EncodedPrompt(ids, is_chat=True, stops_in_prompt=False)  # which the template has made
        chunks = self._start(prompt, cache_options | parameters, instead, pauses)
        finish = partial(self._finish, messages, asked, bool(options.continue_final_message))
        try:
            yield from chunks
        except (GeneratorExit, KeyboardInterrupt):
            if not chunks.given_up:
                finish(chunks.result())
            raise
        except BaseException:
            self.cache = _engine_cache(chunks.result())  # what was read stays there
            raise
        finish(chunks.result())

    def _stop_strings(self, parameters: dict[str, Any]) -> list[str]:
        """Those of the parameters, else of their generation config, else of the model's."""
        config = parameters.get("generation_config")
        config = config.get if isinstance(config, dict) else partial(getattr, config)
        model_strings = getattr(self._generator.model.generation_config, "stop_strings", None)
        sources = (parameters.get("stop_strings"), config("stop_strings", None), model_strings)
        return _as_list(next((strings for strings in sources if strings is not None), None))

    @property
    def _without_size(self) -> dict[str, Any]:
        """The backend for a cache that is as large as a call needs."""
        cache, options = self._backend.values()
        options = cache if isinstance(cache, CacheConfig) else options
        options = {} if options is None else options.to_dict() if isinstance(options, CacheConfig) else dict(options)
        name = options.pop("name", cache)
        options = {option: value for option, value in options.items() if option not in SIZES}
        return {"cache": name, "cache_config": options or None}

    def _finish(
        self, messages: tuple[Message, ...], asked: tuple[TemplateText, ...], continues: bool, out: Generation
    ) -> None:
        self.last, self.cache = out, _engine_cache(out)
        assert out.text is not None
        has_end = out.finish_reasons[0] == "eos"
        self._conversation = self._conversation.answered(
            messages, asked, out.text[0], out.tokens[0], has_end, continues
        )

    # The cache.

    @property
    def backend(self) -> str:
        """The name of the cache backend."""
        if self.cache is not None:
            return str(self.cache.name)
        used = None if self.last is None else self.last.stats.cache
        named = (self._backend["cache"], used, self._generator.config.cache, DEFAULT_CACHE)
        chosen = next(choice for choice in named if choice is not None)
        return chosen if isinstance(chosen, str) else str(chosen.name)

    def use(self, cache: str, **options: Any) -> None:
        """Keep the conversation in another backend, with `options`. Raises as `caches.convert` does.

        A backend of fixed size gets room for at least as much again, if no `max_cache_len` is given.
        """
        with self._between_turns():
            if recipe(cache).has_a_size and self.cache is not None:
                options = {"max_cache_len": max(_LEAST_ROOM, 2 * self.cache.total_tokens)} | options
            if self.cache is not None:
                self.cache = convert(self.cache, cache, **options)
            else:
                recipe(cache).options.from_dict(options)
            self._backend = {"cache": cache, "cache_config": options or None}
            self._resume_points.clear()

    def _ends(self, messages: tuple[Message, ...], ids: torch.Tensor) -> set[int]:
        """How many of the ids [tokens] are read up to the end of the system message, and of the last message."""
        system_messages = messages[: int(messages[0]["role"] == "system")]
        return {self._end_of(system_messages, ids), self._end_of(messages, ids)}

    def _end_of(self, messages: tuple[Message, ...], ids: torch.Tensor) -> int:
        """How many of the ids [tokens] are those of the messages, which come first; not all of them."""
        prefix: list[int] = []
        with suppress(Exception):  # a template may refuse them without those that follow
            prefix = flat(self._conversation.ids(messages)) if messages else []
        return min(common(prefix, ids.tolist()), len(ids) - 1)

    def fork(self) -> Chat:
        """A second conversation that begins as this one. Both caches read what there is now in one place."""
        with self._between_turns():
            chat = Chat(self._generator, self._start, None, **self._backend, parameters=self._parameters)
            chat._conversation, chat.last = self._conversation, self.last
            if self.cache is not None:
                chat.cache = branch(self.cache)
            chat._resume_points = self._resume_points.copied()
            return chat

    # Files.

    def save(self, path: str | Path) -> None:
        """Write the conversation and its cache to a file: see `Cache.save`. `Generator.chat(resume=path)` goes on.

        A cache that the model as it is now has not filled is left out: the next turn reads the conversation again.
        """
        if self.cache is None:
            raise InputError(
                "there is nothing to save before the first answer"
                if self.last is None
                else f"the backend {self.backend!r} keeps no cache that could be saved: use() another one"
            )
        with self._between_turns():
            segments = [[segment.text, list(segment.ids)] for segment in self._conversation.segments]
            notes = {"messages": list(self.messages), "segments": segments}
            notes["begun"] = list(self._conversation.begun.items())
            model, log = self._generator.model, self.cache.log
            is_right = log is not None and log.why_other(reader_now(model)) is None
            (self.cache if is_right else self.cache.empty_like()).save(path, model, notes=notes)

    def resume(self, path: str | Path) -> None:
        """Take the place of the conversation that was saved there. Raises `caches.CacheFileError`."""
        with self._between_turns():
            notes = inspect(path).notes
            if not {"messages", "segments"} <= notes.keys():
                raise InputError(f"{path} holds a cache, but no conversation: caches.load reads it")
            self.cache = load(path, self._generator.model)
            segments = tuple(TemplateText(text, tuple(ids)) for text, ids in notes["segments"])
            messages, begun = tuple(notes["messages"]), dict(notes.get("begun") or ())
            self._conversation = Conversation(self._generator.tokenizer, messages, segments, begun)
            self._resume_points.clear()
            self.last = None


def _checked(parameters: dict[str, Any]) -> dict[str, Any]:
    for name, reason in _REFUSED.items():
        if name in parameters:
            raise OptionError(f"{name} cannot apply to a chat, {reason}")
    return parameters


_REFUSED = {
    "num_return_sequences": "whose turn has one answer: leave it out",
    "inputs": "whose turn has a message: give it first",
    "tokenizer": "which has that of its generator: Generator(model, tokenizer)",
    **dict.fromkeys(
        ("cache", "cache_config", "max_cache_len", "cache_implementation", "past_key_values"),
        "whose turns have one cache: Chat.use() puts it in another backend",
    ),
}


def _as_message(message: str | Message) -> Message:
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message, Mapping) or "role" not in message:
        raise InputError(f"a message is a text or a mapping with 'role' and 'content', not {message!r:.80}")
    return dict(message)


def _as_list(strings: str | Iterable[str] | None) -> list[str]:
    return [] if strings is None else [strings] if isinstance(strings, str) else list(strings)


def _engine_cache(out: Generation) -> EngineCache | None:
    return out.cache if isinstance(out.cache, EngineCache) else None
