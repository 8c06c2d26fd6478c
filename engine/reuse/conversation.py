"""The messages of a conversation as token ids. Ids that were read or generated are kept: text that comes again is not
tokenized again, as that may give other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import InputError
from engine.prompt import refused_by_template

Message = dict[str, Any]
_PLAIN = {"system": "{}\n\n", "user": "User: {}\n", "assistant": "Assistant: {}\n"}


@dataclass(frozen=True)
class Segment:
    """A piece of the text of a conversation, and its token ids."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """Messages as a tokenizer's chat template writes them, or "User: ..." and "Assistant: ..." where it has none.

    segments: the text that was read and generated so far, from the beginning, with its ids.
    """

    tokenizer: Any
    messages: tuple[Message, ...] = ()
    segments: tuple[Segment, ...] = ()

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def ids(self, messages: Sequence[Message], is_asked: bool = True) -> tuple[Segment, ...]:
        """The segments of these messages: those known already as long as the text begins with them, then the rest.

        is_asked: whether what makes the model answer comes last.
        """
        text, position, found = self._text(messages, is_asked), 0, []
        for segment in self.segments:
            # Templates remove white space around the text of a message.
            forms = (segment.text, segment.text.strip())
            known = next((one for one in forms if one and text.startswith(one, position)), None)
            if known is None:
                break
            found.append(segment)
            position += len(known)
        if position < len(text):
            found.append(Segment(text[position:], self._tokenized(text[position:], position == 0)))
        return tuple(found)

    def _text(self, messages: Sequence[Message], is_asked: bool) -> str:
        if self.has_template:
            try:
                return str(
                    self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=is_asked)
                )
            except Exception as error:  # a template raises what it likes
                raise refused_by_template(error) from error
        for message in messages:
            if message["role"] not in _PLAIN:
                raise InputError(
                    f"the tokenizer has no chat template, and role={message['role']!r} is none of {', '.join(_PLAIN)}"
                )
        return "".join(_PLAIN[one["role"]].format(one["content"]) for one in messages) + "Assistant:" * is_asked

    def _tokenized(self, text: str, is_first: bool) -> tuple[int, ...]:
        adds_bos = is_first and not self.has_template  # templates write it themselves
        return tuple(self.tokenizer(text, add_special_tokens=adds_bos)["input_ids"])

    def answered(
        self, messages: Sequence[Message], asked: tuple[Segment, ...], answer: str, tokens: Sequence[int], has_end: bool
    ) -> Conversation:
        """The same after an answer of these tokens to `messages`, which were read as the segments `asked`.

        has_end: whether the last token is one that ends a text.
        """
        said, ending = list(tokens), []
        end = self.tokenizer.convert_ids_to_tokens(said[-1]) if said else ""
        is_special = bool(said) and said[-1] in self._special_ids
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        if not is_special and has_end and said[-1] in added and answer.endswith(end):  # a word of the template
            answer, is_special = answer.removesuffix(end), True
        text = answer
        if is_special:
            ending = [Segment(end, (said.pop(),))]
        elif (complete := self._text_of(said)) != answer and complete.startswith(answer):  # a stop string comes last
            while not answer.startswith(text := self._text_of(said)):
                said.pop()
            ending = [Segment(complete[len(text) :], tuple(tokens[len(said) :]))]
        message = {"role": "assistant", "content": answer if self.has_template else answer.strip()}
        return Conversation(self.tokenizer, (*messages, message), (*asked, Segment(text, tuple(said)), *ending))

    def _text_of(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def _special_ids(self) -> set[int]:
        return set(getattr(self.tokenizer, "all_special_ids", ()))


def flat(segments: Sequence[Segment]) -> list[int]:
    """The ids of all segments."""
    return [token for segment in segments for token in segment.ids]
