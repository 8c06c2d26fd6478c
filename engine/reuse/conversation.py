"""The messages of a conversation as token ids. Ids that were read or generated are kept: text that comes again is not
tokenized again, as that may give other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from engine.chat_template import CLOSED, DEFAULTS, TemplateOptions, ids_of, special_tokens, written
from engine.errors import InputError
from engine.reuse.token_index import common

Message = dict[str, Any]
_CONTEXT = 8  # tokens that a decoder is shown before others, so that it does not take them for the beginning of a text
_PLAIN = {"system": "{}\n\n", "user": "User: {}\n", "assistant": "Assistant: {}\n"}


@dataclass(frozen=True)
class TemplateText:
    """A piece of the text of a conversation, and its token ids."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """Messages as a tokenizer's chat template writes them, or "User: ..." and "Assistant: ..." where it has none.

    segments: the text that was read and generated so far, from the beginning, with its ids. begun: by the numbers of
    messages with which the model went on, their contents before that.
    """

    tokenizer: Any
    messages: tuple[Message, ...] = ()
    segments: tuple[TemplateText, ...] = ()
    begun: Mapping[int, Any] = field(default_factory=dict)

    @property
    def system(self) -> str | None:
        """The content of the system message; None without one."""
        is_first = bool(self.messages) and self.messages[0]["role"] == "system"
        return self.messages[0].get("content") if is_first else None

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def notes(self) -> dict[str, Any]:
        """What a file keeps of it."""
        segments = [[segment.text, list(segment.ids)] for segment in self.segments]
        return {"messages": list(self.messages), "segments": segments, "begun": list(self.begun.items())}

    @classmethod
    def of_notes(cls, tokenizer: Any, notes: Mapping[str, Any]) -> Conversation | None:
        """The one that a file has kept; None if these are notes of something else."""
        if not {"messages", "segments"} <= notes.keys():
            return None
        segments = tuple(TemplateText(text, tuple(ids)) for text, ids in notes["segments"])
        return cls(tokenizer, tuple(notes["messages"]), segments, dict(notes.get("begun") or ()))

    def before_last_answer(self) -> tuple[Message, ...]:
        """The messages without the last answer, or without what it added to a message. Raises `InputError`."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise InputError("there is no answer to try again: send a message")
        *earlier, answer = self.messages
        number = len(earlier)
        return (*earlier, answer | {"content": self.begun[number]}) if number in self.begun else tuple(earlier)

    def before_last_question(self) -> tuple[Message, ...]:
        """The messages before the last one of the user. Raises `InputError`."""
        asked = [number for number, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise InputError("there is no message to take back: send one")
        return self.messages[: asked[-1]]

    def ends(self, messages: Sequence[Message], ids: torch.Tensor) -> set[int]:
        """How many of the ids [tokens] are read up to the end of the system message, and of the last message."""
        system_messages = messages[: int(messages[0]["role"] == "system")]
        return {self._end_of(system_messages, ids), self._end_of(messages, ids)}

    def _end_of(self, messages: Sequence[Message], ids: torch.Tensor) -> int:
        """How many of the ids [tokens] are those of the messages, which come first; not all of them."""
        prefix: list[int] = []
        with suppress(Exception):  # a template may refuse them without those that follow
            prefix = flat(self.ids(messages)) if messages else []
        return min(common(prefix, ids.tolist()), len(ids) - 1)

    def ids(self, messages: Sequence[Message], options: TemplateOptions = CLOSED) -> tuple[TemplateText, ...]:
        """The segments of these messages: those known already as long as the text begins with them, then the rest."""
        text, position, segments = self._text(messages, options), 0, []
        for segment in self.segments:
            # Templates remove white space around the text of a message.
            forms = (segment.text, segment.text.strip())
            form = next((form for form in forms if form and text.startswith(form, position)), None)
            if form is None:
                break
            segments.append(segment)
            position += len(form)
        if position < len(text):
            suffix = text[position:]
            # Templates write the token that begins a text themselves.
            begins = position == 0
            ids = ids_of(self.tokenizer, suffix, options) if self.has_template else self._plain_ids(suffix, begins)
            segments.append(TemplateText(suffix, tuple(ids)))
        return tuple(segments)

    def how_many_to_leave_out(self, messages: Sequence[Message], room: int) -> int:
        """How many messages behind the system message to leave out, whole turns, where `room` tokens are too few.

        The others take half of these, so that not every turn leaves some out and reads the rest again; the last turn
        stays. 0 if there is no other.
        """
        begins, count = _begin_of_turns(messages), 0
        for begin in begins[1:]:
            count = begin - begins[0]
            rest = [*messages[: begins[0]], *messages[begin:]]
            if len(flat(self.ids(rest, DEFAULTS))) <= room // 2:
                break
        return count

    def without(self, count: int) -> Conversation:
        """The same without the first `count` messages behind the system message."""
        first = int(self.system is not None)
        end = first + count
        begun = {
            number - count * (number >= end): content
            for number, content in self.begun.items()
            if not first <= number < end
        }
        return replace(self, messages=(*self.messages[:first], *self.messages[end:]), begun=begun)

    def with_system(self, system: str | None) -> Conversation:
        """The same with another system message. Raises `InputError` if it is no text."""
        others, first = self.messages[int(self.system is not None) :], history(system, None)
        moved = len(first) + len(others) - len(self.messages)
        begun = {number + moved: content for number, content in self.begun.items()}
        return replace(self, messages=(*first, *others), begun=begun)

    def _text(self, messages: Sequence[Message], options: TemplateOptions) -> str:
        if self.has_template:
            return written(self.tokenizer, messages, options)
        for message in messages:
            if message["role"] not in _PLAIN:
                raise InputError(
                    f"the tokenizer has no chat template, and role={message['role']!r} is none of {', '.join(_PLAIN)}"
                )
        options = options.resolved(messages)
        text = "".join(_PLAIN[message["role"]].format(message.get("content") or "") for message in messages)
        text = text.removesuffix("\n") if options.continue_final_message else text
        return text + "Assistant:" * bool(options.add_generation_prompt)

    def _plain_ids(self, text: str, is_first: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=is_first)["input_ids"])

    def answered(
        self,
        messages: Sequence[Message],
        asked: tuple[TemplateText, ...],
        answer: str,
        tokens: Sequence[int],
        has_end: bool,
        continues: bool,
    ) -> Conversation:
        """The same after an answer of these tokens to `messages`, which were read as the segments `asked`.

        has_end: whether the last token is one that ends a text. continues: whether the answer goes on with the last
        message.
        """
        answer_tokens, ending = list(tokens), []
        end = self.tokenizer.convert_ids_to_tokens(answer_tokens[-1]) if answer_tokens else ""
        is_special = bool(answer_tokens) and answer_tokens[-1] in special_tokens(self.tokenizer)
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        if not is_special and has_end and answer_tokens[-1] in added and answer.endswith(end):  # a word of the template
            answer, is_special = answer.removesuffix(end), True
        gap = self._space_before(answer_tokens, asked)
        text = answer
        if is_special:
            ending = [TemplateText(end, (answer_tokens.pop(),))]
        elif (complete := self._text_of(answer_tokens)) != answer and complete.startswith(answer):  # a stop string
            while not answer.startswith(text := self._text_of(answer_tokens)):
                answer_tokens.pop()
            ending = [TemplateText(complete[len(text) :], tuple(tokens[len(answer_tokens) :]))]
        segments = (*asked, TemplateText(gap + text, tuple(answer_tokens)), *ending)
        message: Message = {"role": "assistant", "content": answer if self.has_template else answer.strip()}
        begun = {number: content for number, content in self.begun.items() if number < len(messages)}
        if continues:
            *messages, last_message = messages
            content, shown = last_message.get("content"), asked[-1].text if asked else ""
            message = dict(last_message, content=_joined(content, shown, gap + answer))
            begun[len(messages)] = content
        return Conversation(self.tokenizer, (*messages, message), segments, begun)

    def _space_before(self, tokens: list[int], asked: Sequence[TemplateText]) -> str:
        """The space before the text of these tokens, which decoders leave out as if the text began there."""
        context = flat(asked)[-_CONTEXT:]
        return self._text_of(context + tokens).removeprefix(self._text_of(context)).removesuffix(self._text_of(tokens))

    def _text_of(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def as_message(message: str | Mapping[str, Any]) -> Message:
    """A text is a user's. Raises `InputError`."""
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message, Mapping) or "role" not in message:
        raise InputError(f"a message is a text or a mapping with 'role' and 'content', not {message!r:.80}")
    return dict(message)


def history(system: str | None, messages: Sequence[Mapping[str, Any]] | None) -> tuple[Message, ...]:
    """The messages that a chat begins with. Raises `InputError`."""
    if not isinstance(system, str | None):
        raise InputError(f"a system message is a text, not {system!r:.80}")
    if messages is not None and (isinstance(messages, str | Mapping) or not isinstance(messages, Sequence)):
        raise InputError(f"messages= is a list of mappings with 'role' and 'content', not {messages!r:.80}")
    earlier = tuple(map(as_message, messages or ()))
    if system is not None and any(message["role"] == "system" for message in earlier):
        raise InputError("the system message was given twice: as system and in messages: leave one of them out")
    if earlier and earlier[-1]["role"] == "user":
        raise InputError("the last of the messages is a user's and has no answer yet: leave it out, and send() it")
    return earlier if system is None else ({"role": "system", "content": system}, *earlier)


def _begin_of_turns(messages: Sequence[Message]) -> list[int]:
    """The numbers of the messages with which turns begin: the first behind the system message, and each of a user."""
    first = int(bool(messages) and messages[0]["role"] == "system")
    return [first, *(number for number in range(first + 1, len(messages)) if messages[number]["role"] == "user")]


def _joined(content: Any, shown: str, answer: str) -> Any:
    """The content of a message that an answer has continued, a text or parts. shown: the text that ends with it, maybe
    without white space at its end."""
    if not isinstance(content, str):
        *earlier, continued = content or [{"type": "text", "text": ""}]
        return [*earlier, dict(continued, text=_joined(continued.get("text", ""), shown, answer))]
    return (content if shown.endswith(content) else content.rstrip()) + answer


def flat(segments: Sequence[TemplateText]) -> list[int]:
    """The ids of all segments."""
    return [token for segment in segments for token in segment.ids]
