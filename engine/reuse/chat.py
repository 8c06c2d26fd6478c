"""`Chat`: a conversation whose cache is kept between the turns, so that a turn reads its own tokens only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
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
from engine.request.inputs.checks import PositionsError
from engine.result import Generation, StreamChunk
from engine.reuse.conversation import Conversation, Message, TemplateText, as_message, flat
from engine.reuse.resume_points import ResumePoints
from engine.reuse.room import SIZES, HasModel, with_room_for
from engine.reuse.token_index import common
from engine.reuse.turn import WHEN_FULL, Instead, Turn, checked
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
    left_out : int
        How many messages were left out where the model's length was reached, with `when_full="drop"`.
    cache : EngineCache or None
        The live cache; None before the first turn and for backends without one.
    last : Generation or None
        The result of the last turn.
    """

    def __init__(
        self,
        generator: HasModel,
        start: Callable[[Any, dict[str, Any], Instead, FindPauses], Stream],
        messages: tuple[Message, ...],
        backend: dict[str, Any],
        parameters: dict[str, Any],
        when_full: str,
    ):
        """start: of a stream of the generator: see `Generator._start_turn`. backend: "cache" and "cache_config"."""
        if generator.tokenizer is None:
            raise OptionError("a chat needs a tokenizer: Generator(model, tokenizer)")
        if generator.model.config.is_encoder_decoder:
            raise OptionError("a chat needs a model whose prompt and answer are one text, and this one has an encoder")
        if when_full not in WHEN_FULL:
            raise OptionError(f"when_full={when_full!r}, but it is one of {', '.join(WHEN_FULL)}")
        self._generator, self._start, self.parameters = generator, start, parameters
        self._backend, self._when_full, self.left_out = backend, when_full, 0
        self._conversation = Conversation(generator.tokenizer, messages)
        self._resume_points = ResumePoints(generator)
        self._turn_lock = threading.Lock()
        self.cache: Any = None
        cache = backend["cache"]
        if isinstance(cache, (EngineCache, TransformersCache)):
            if not can_migrate(cache):
                raise OptionError("a chat keeps a cache of this package: give the name of one, such as cache='dynamic'")
            self.cache = cache
            self._backend = {"cache": cache.stacks[0].layout.config or cache.name, "cache_config": None}
        self.last: Generation | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        return self._conversation.messages

    @property
    def parameters(self) -> dict[str, Any]:
        """Those of every turn. Others may be assigned; a turn that cannot have them raises."""
        return dict(self._parameters)

    @parameters.setter
    def parameters(self, parameters: dict[str, Any]) -> None:
        self._parameters = checked(dict(parameters))

    @property
    def system(self) -> str | None:
        """The system message. Another one may be assigned between two turns: the next one reads all messages again."""
        return self._conversation.system

    @system.setter
    def system(self, system: str | None) -> None:
        with self._between_turns():
            conversation = self._conversation.with_system(system)
            conversation.ids((*conversation.messages, as_message("x")))  # a template may refuse it
            self._conversation = conversation

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
            asked = as_message(message)
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
            asked = as_message(message)
        return self._to_end(self._turn(lambda: (*self._before_last_question(), asked), parameters))

    def undo(self) -> None:
        """Remove the last message and its answer."""
        with self._between_turns():
            self._conversation = replace(self._conversation, messages=self._before_last_question())

    def clear(self) -> None:
        """Remove all messages but the system message."""
        with self._between_turns():
            messages = self.messages[: int(self.system is not None)]
            self._conversation, self.last = replace(self._conversation, messages=messages, begun={}), None

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
            messages, parameters = find_messages(), self._parameters | checked(arguments) | _ONE_ANSWER
            if not self._conversation.has_template:
                parameters = parameters | {"stop_strings": [_PLAIN_STOP, *self._stop_strings(parameters)]}
            turn = Turn(messages, parameters)
            self._read(turn)
        pauses = partial(self._resume_points.pauses, partial(self._ends, turn))
        chunks = self._start(*self._call_of(turn), partial(self._instead, turn), pauses)
        finish = partial(self._finish, turn)
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

    def _read(self, turn: Turn) -> None:
        """Find the ids of the turn's messages, and go back to where the cache has what they begin with."""
        options = TemplateOptions.of({name: turn.parameters.get(name) for name in OPTIONS}).resolved(turn.messages)
        turn.asked, turn.continues = (
            self._conversation.ids(turn.messages, options),
            bool(options.continue_final_message),
        )
        turn.ids = torch.tensor([flat(turn.asked)], device="cpu")
        self.cache = self._resume_points.go_back(self.cache, turn.ids[0])
        if self.cache is not None:
            # Before the turn starts: one that fails ends the caller's streamer.
            prompt = EncodedPrompt(turn.ids, is_chat=True)
            self.cache = with_room_for(self.cache, self._generator, prompt, turn.parameters)

    def _call_of(self, turn: Turn) -> tuple[EncodedPrompt, dict[str, Any]]:
        """Inputs and arguments of `generate`."""
        cache_options = self._backend if self.cache is None else {"cache": self.cache}
        prompt = EncodedPrompt(turn.ids, is_chat=True, stops_in_prompt=False)  # which the template has made
        return prompt, cache_options | turn.parameters | (self._without_size if turn.starts_anew else {})

    def _instead(self, turn: Turn, error: EngineError) -> tuple[EncodedPrompt, dict[str, Any]] | None:
        """Another call for a turn that was refused. Raises `InputError` where the model's length is reached."""
        if isinstance(error, PositionsError):
            turn.leave_out(self._how_many_to_leave_out(turn, error))
            self._read(turn)
            return self._call_of(turn)
        # A strategy may not be able to go on from a cache.
        if not isinstance(error, OptionError) or turn.starts_anew or self.cache is None or not self.cache.total_tokens:
            return None
        turn.starts_anew = True
        return self._call_of(turn)

    def _how_many_to_leave_out(self, turn: Turn, error: PositionsError) -> int:
        reason, _, _ = str(error).partition(":")
        count = self._conversation.how_many_to_leave_out(turn.messages, error.room)
        if not count:
            raise InputError(
                f"{reason}: send a shorter message, or ask for a shorter answer (max_new_tokens)"
            ) from error
        if self._when_full == "stop":
            raise InputError(
                f"the conversation has reached the model's length ({reason}): take turns back with undo() or clear(), "
                "ask for a shorter answer (max_new_tokens), or leave out the oldest turns with when_full='drop'"
            ) from error
        return count

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

    def _finish(self, turn: Turn, out: Generation) -> None:
        self.last, self.cache = out, _engine_cache(out)
        assert out.text is not None
        has_end = out.finish_reasons[0] == "eos"
        self.left_out += turn.left_out
        self._conversation = self._conversation.without(turn.left_out).answered(
            turn.messages, turn.asked, out.text[0], out.tokens[0], has_end, turn.continues
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

    def _ends(self, turn: Turn) -> set[int]:
        """How many of the ids are read up to the end of the system message, and of the last message."""
        messages, ids = turn.messages, turn.ids[0]
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
            chat = Chat(self._generator, self._start, (), self._backend, self._parameters, self._when_full)
            chat.left_out = self.left_out
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


def _as_list(strings: str | Iterable[str] | None) -> list[str]:
    return [] if strings is None else [strings] if isinstance(strings, str) else list(strings)


def _engine_cache(out: Generation) -> EngineCache | None:
    return out.cache if isinstance(out.cache, EngineCache) else None
