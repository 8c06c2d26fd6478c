"""`Chat`: a conversation whose cache is kept between the turns, so that a turn reads its own tokens only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from caches import EngineCache, inspect
from engine.chat_template import OPTIONS, TemplateOptions
from engine.decoding.chunking import FindPauses
from engine.errors import EngineError, InputError, OptionError
from engine.output.hf_streamers import ending
from engine.prompt import EncodedPrompt
from engine.request.inputs.checks import PositionsError
from engine.result import Generation, StreamChunk
from engine.reuse.chat_cache import ChatCache
from engine.reuse.conversation import Conversation, Message, as_message, flat
from engine.reuse.room import HasModel
from engine.reuse.turn import WHEN_FULL, Instead, Turn, checked, with_plain_stop
from engine.streaming import Stream

_ONE_ANSWER = {"num_return_sequences": 1}  # a whole generation config may say more, for other calls


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
        cache: ChatCache,
        parameters: dict[str, Any],
        when_full: str,
    ):
        """start: of a stream of the generator: see `Generator._start_turn`. when_full: see `Generator.chat`."""
        if generator.tokenizer is None:
            raise OptionError("a chat needs a tokenizer: Generator(model, tokenizer)")
        if generator.model.config.is_encoder_decoder:
            raise OptionError("a chat needs a model whose prompt and answer are one text, and this one has an encoder")
        if when_full not in WHEN_FULL:
            raise OptionError(f"when_full={when_full!r}, but it is one of {', '.join(WHEN_FULL)}")
        self._generator, self._start, self.parameters = generator, start, parameters
        self._cache, self._when_full, self.left_out = cache, when_full, 0
        self._conversation = Conversation(generator.tokenizer, messages)
        self._turn_lock = threading.Lock()
        self.last: Generation | None = None

    @property
    def cache(self) -> EngineCache | None:
        return self._cache.live

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
            self._conversation.before_last_answer()
        return self._turn(lambda: self._conversation.before_last_answer(), parameters)

    def edit(self, message: str | Message, **parameters: Any) -> Generation:
        """The answer to another message in place of the last one."""
        with self._ending(parameters):
            asked = as_message(message)
        return self._to_end(self._turn(lambda: (*self._conversation.before_last_question(), asked), parameters))

    def undo(self) -> None:
        """Remove the last message and its answer."""
        with self._between_turns():
            messages = self._conversation.before_last_question()
            self._conversation = replace(self._conversation, messages=messages)

    def clear(self) -> None:
        """Remove all messages but the system message."""
        with self._between_turns():
            messages = self.messages[: int(self.system is not None)]
            self._conversation, self.last = replace(self._conversation, messages=messages, begun={}), None

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
                parameters = with_plain_stop(parameters, self._generator.model)
            turn = Turn(messages, parameters)
            self._read(turn)
        pauses = partial(self._cache.pauses, lambda: self._conversation.ends(turn.messages, turn.ids[0]))
        chunks = self._start(*self._call_of(turn), partial(self._instead, turn), pauses)
        finish = partial(self._finish, turn)
        try:
            yield from chunks
        except (GeneratorExit, KeyboardInterrupt):
            if not chunks.given_up:
                finish(chunks.result())
            raise
        except BaseException:
            self._cache.take(chunks.result())  # what was read stays there
            raise
        finish(chunks.result())

    def _read(self, turn: Turn) -> None:
        """Find the ids of the turn's messages, and go back to where the cache has what they begin with."""
        options = TemplateOptions.of({name: turn.parameters.get(name) for name in OPTIONS}).resolved(turn.messages)
        turn.asked = self._conversation.ids(turn.messages, options)
        turn.continues = bool(options.continue_final_message)
        turn.ids = torch.tensor([flat(turn.asked)], device="cpu")
        self._cache.go_back(turn.ids, turn.parameters)

    def _call_of(self, turn: Turn) -> tuple[EncodedPrompt, dict[str, Any]]:
        """Inputs and arguments of `generate`."""
        prompt = EncodedPrompt(turn.ids, is_chat=True, stops_in_prompt=False)  # which the template has made
        return prompt, self._cache.arguments(turn.starts_anew) | turn.parameters

    def _instead(self, turn: Turn, error: EngineError) -> tuple[EncodedPrompt, dict[str, Any]] | None:
        """Another call for a turn that was refused. Raises `InputError` where the model's length is reached."""
        if isinstance(error, PositionsError):
            turn.leave_out_oldest(self._conversation, error, self._when_full)
            self._read(turn)
            return self._call_of(turn)
        # A strategy may not be able to go on from a cache.
        if not isinstance(error, OptionError) or turn.starts_anew or self.cache is None or not self.cache.total_tokens:
            return None
        turn.starts_anew = True
        return self._call_of(turn)

    def _finish(self, turn: Turn, out: Generation) -> None:
        self.last = out
        self._cache.take(out)
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
        return self._cache.backend

    def use(self, cache: str, **options: Any) -> None:
        """Keep the conversation in another backend, with `options`. Raises as `caches.convert` does.

        A backend of fixed size gets room for at least as much again, if no `max_cache_len` is given.
        """
        with self._between_turns():
            self._cache.use(cache, options)

    def fork(self) -> Chat:
        """A second conversation that begins as this one. Both caches read what there is now in one place."""
        with self._between_turns():
            cache = self._cache.branched()
            chat = Chat(self._generator, self._start, (), cache, self._parameters, self._when_full)
            chat._conversation, chat.last, chat.left_out = self._conversation, self.last, self.left_out
            return chat

    # Files.

    def save(self, path: str | Path) -> None:
        """Write the conversation and its cache to a file: see `Cache.save`. `Generator.chat(resume=path)` goes on.

        A cache that the model as it is now has not filled is left out: the next turn reads the conversation again.
        """
        with self._between_turns():
            self._cache.save(path, self._conversation.notes)

    def resume(self, path: str | Path) -> None:
        """Take the place of the conversation that was saved there. Raises `caches.CacheFileError`."""
        with self._between_turns():
            conversation = Conversation.of_notes(self._generator.tokenizer, inspect(path).notes)
            if conversation is None:
                raise InputError(f"{path} holds a cache, but no conversation: caches.load reads it")
            self._cache.load(path)
            self._conversation, self.last = conversation, None
