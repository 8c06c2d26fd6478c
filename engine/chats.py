"""Chat messages: the text that a tokenizer's template makes of them, its token ids, and where an answer ends."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from engine.errors import InputError, OptionError
from engine.warn_once import warn_once

Message = Mapping[str, Any]
OPTIONS = ("continue_final_message", "add_generation_prompt", "sanitize_control_tokens")

# In a chat that is written to see what a template makes of one.
_QUESTION, _ANSWER = "kvengine's question", "kvengine's answer"
_BREAK = "\ufdd0"  # no character: texts are tokenized for themselves on both sides of it


@dataclass(frozen=True)
class TemplateOptions:
    """How messages are written, by the names of `apply_chat_template`.

    continue_final_message: the answer goes on with the last message; None: if an assistant has said it.
    add_generation_prompt: what makes the model answer comes last; None: unless the last message is continued.
    sanitize_control_tokens: control tokens that messages spell are text. more: further arguments, as `tools`.
    """

    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    sanitize_control_tokens: bool | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, parameters: Any) -> TemplateOptions:
        """Those among the parameters of a call, an object or a mapping. Raises `OptionError`."""
        get = parameters.get if isinstance(parameters, Mapping) else lambda name: getattr(parameters, name)
        found: dict[str, Any] = {name: get(name) for name in OPTIONS}
        if found["continue_final_message"] and found["add_generation_prompt"]:
            raise OptionError(
                "continue_final_message goes on with the last message, and add_generation_prompt begins another one: "
                "leave one of them out"
            )
        return cls(**found)

    def resolved(self, messages: Sequence[Message]) -> TemplateOptions:
        """The same for these messages, with a value for each option."""
        last, continues = messages[-1] if messages else {}, self.continue_final_message
        if continues is None:  # as transformers' pipeline for text generation
            said = last.get("role") == "assistant" and last.get("content") is not None and not last.get("tool_calls")
            continues = said and not self.add_generation_prompt
        asks = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return replace(self, continue_final_message=continues, add_generation_prompt=asks)


DEFAULTS = TemplateOptions()
CLOSED = TemplateOptions(continue_final_message=False, add_generation_prompt=False)


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The tokens that decoders leave out of a text: those with a name (eos, pad), and added ones called special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {token: one.content for token, one in added.items() if one.special}
    return found | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value


def written(tokenizer: Any, messages: Sequence[Message], options: TemplateOptions) -> str:
    """The messages as the tokenizer's template writes them; `ids_of` reads this text. Raises `InputError`."""
    options = options.resolved(messages)
    begins = replace(options, continue_final_message=False, add_generation_prompt=True)
    try:
        messages = _as_read(tokenizer, messages)
        text = _written(tokenizer, messages, options)
        if options.continue_final_message and not _text_of(messages[-1].get("content")).strip():
            # Where templates strip texts, the end of an empty one is not found behind the white space before it.
            with suppress(Exception):  # the messages before it may be refused alone
                begun = _written(tokenizer, messages[:-1], begins)
                text = begun if begun.startswith(text) else text
        return text
    except (MemoryError, InputError):
        raise
    except Exception as error:  # a template raises what it likes
        raise InputError(
            f"the model's chat template refuses these messages: {type(error).__name__}: {error}"
        ) from error


def _written(tokenizer: Any, messages: Sequence[Message], options: TemplateOptions) -> str:
    render = partial(_rendered, tokenizer, options)
    if options.sanitize_control_tokens:
        return _sanitized(tokenizer, messages, options.more, render)
    return render(messages, options.more)


def _as_read(tokenizer: Any, messages: Sequence[Message]) -> Sequence[Message]:
    """With contents as the template reads them: it may write a list of parts as Python does, or leave texts out.

    Raises `InputError` for parts other than texts where the template reads none.
    """
    as_text, as_parts = _probed(tokenizer, str), _probed(tokenizer, _part_of)
    if as_parts is None or "'type'" in as_parts or '"type"' in as_parts:
        return messages if as_text is None else [_with_content(one, _joined) for one in messages]
    if as_text is not None:
        return messages
    return [_with_content(one, _part_of) if isinstance(one.get("content"), str) else one for one in messages]


def _with_content(message: Message, change: Callable[[Any], Any]) -> Message:
    return {**message, "content": change(message.get("content"))}


def _joined(content: Any) -> Any:
    if not isinstance(content, (list, tuple)):
        return content
    for part in content:
        if not isinstance(part, Mapping) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise InputError(f"the model's chat template reads texts alone, and a message has the part {part!r:.80}")
    return _text_of(content)


def _part_of(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _text_of(content: Any) -> str:
    """The text of a content, without parts that are none."""
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")


def _probed(
    tokenizer: Any, as_content: Callable[[str], Any], roles: Sequence[str] = ("user", "assistant")
) -> str | None:
    """What the template writes of a chat; None where it refuses it, or leaves texts out."""
    texts = {"user": _QUESTION, "assistant": _ANSWER}
    with suppress(Exception):  # a template raises what it likes
        chat = [{"role": role, "content": as_content(texts[role])} for role in roles]
        text = _rendered(tokenizer, CLOSED, chat, {})
        return text if _QUESTION in text and _ANSWER in text else None
    return None


def _rendered(tokenizer: Any, options: TemplateOptions, messages: Sequence[Message], more: Mapping[str, Any]) -> str:
    """Fields that are null, as the content beside calls of tools is, are left out; a template that adds texts without a
    look gets an empty content."""
    left_out = [{name: value for name, value in one.items() if value is not None} for one in messages]
    filled = [{"content": ""} | one for one in left_out]
    forms, failure = [left_out] if filled == left_out else [left_out, filled], None
    for form in forms:
        try:
            return str(
                tokenizer.apply_chat_template(
                    form,
                    tokenize=False,
                    continue_final_message=bool(options.continue_final_message),
                    add_generation_prompt=bool(options.add_generation_prompt),
                    **more,
                )
            )
        except Exception as error:  # a template raises what it likes
            failure = error
    assert failure is not None
    raise failure


def ids_of(tokenizer: Any, text: str, options: TemplateOptions) -> list[int]:
    """The token ids of a text that `written` gave with these options, or of a part of it."""
    first, *others = text.split(_BREAK) if options.sanitize_control_tokens else [text]
    ids = list(tokenizer(first, add_special_tokens=False)["input_ids"])
    return ids + [token for piece in others for token in _ids_of_piece(tokenizer, piece)]


def _ids_of_piece(tokenizer: Any, piece: str) -> list[int]:
    """Of a text that does not begin where a line does: some tokenizers put a space there."""
    line, ids = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("\n", f"\n{piece}"))
    if ids[: len(line)] == line:
        return ids[len(line) :]
    return list(tokenizer(piece, add_special_tokens=False)["input_ids"])


# Control tokens in the text of messages.


def _sanitized(
    tokenizer: Any,
    messages: Sequence[Message],
    more: Mapping[str, Any],
    render: Callable[[Sequence[Message], Mapping[str, Any]], str],
) -> str:
    """The text with a `_BREAK` in every control token that a message, a tool or a further argument spells.

    A template may look for words in a text and write another one for the break: then only special tokens are broken;
    where that changes the text too, none.
    """
    special, words = _control_tokens(tokenizer)
    messages, more = _mapped((messages, more), lambda text: text.replace(_BREAK, ""))
    plain = render(messages, more)
    in_answers = _breaking(special)  # thoughts and calls of tools in an answer are those of the model
    for change in (_breaking(special | words) if words - special else in_answers, in_answers):
        own = [_mapped(one, in_answers if one.get("role") == "assistant" else change) for one in messages]
        own_more = _mapped(more, change)
        if own == messages and own_more == more:
            return plain
        with suppress(Exception):  # a template raises what it likes
            if (text := render(own, own_more)).replace(_BREAK, "") == plain:
                return text
    warn_once(
        "messages spell control tokens, and with these broken up the chat template writes another text: they are read "
        "as control tokens"
    )
    return plain


def _control_tokens(tokenizer: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The special tokens, and the other added ones that stand in the chat template, but no white space."""
    added, template = getattr(tokenizer, "added_tokens_decoder", {}).values(), str(tokenizer.chat_template)
    special = frozenset(one for one in special_tokens(tokenizer).values() if len(one) > 1)
    words = (one.content for one in added if one.content in template and not one.content.isspace())
    return special, frozenset(one for one in words if len(one) > 1)


def _breaking(control: frozenset[str]) -> Callable[[str], str]:
    """Puts a `_BREAK` behind the first character of every control token, also of one that only begins at the end: a
    template may write the rest, or the next text, behind it."""
    if not control:
        return lambda text: text
    pattern = re.compile(f"(?=(?:{'|'.join(map(re.escape, sorted(control)))}))")
    longest, first = max(map(len, control)), {one[0] for one in control}

    def broken(text: str) -> str:
        begins, end = [one.start() for one in pattern.finditer(text)], len(text.rstrip())
        for begin in range(max(0, end - longest), end):
            if text[begin] in first and any(one.startswith(text[begin:end]) for one in control):
                begins.append(begin)
        cuts = [0, *(begin + 1 for begin in sorted({*begins})), len(text)]
        return _BREAK.join(text[begin:end] for begin, end in itertools.pairwise(cuts))

    return broken


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every text in it changed, but names of fields and roles, which are single words."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            name if str(name).isidentifier() else _mapped(name, change): (
                one if name == "role" and str(one).isidentifier() else _mapped(one, change)
            )
            for name, one in value.items()
        }
    return [_mapped(one, change) for one in value] if isinstance(value, (list, tuple)) else value


# The ends.


def chat_ends(tokenizer: Any, own: int | Sequence[int] | None) -> list[int]:
    """The tokens that end an answer in a chat: `own`, those of the generation config, the tokenizer's end token, and
    the one that closes an answer in the chat template."""
    ids: list[int | None] = [] if own is None else list(own) if isinstance(own, Sequence) else [own]
    ids += [getattr(tokenizer, "eos_token_id", None), _closing_token(tokenizer)]
    return list(dict.fromkeys(token for token in ids if token is not None))


def _closing_token(tokenizer: Any) -> int | None:
    """What the template writes behind an answer, white space aside, if that begins with a token of its own; some write
    it before the next question alone."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    for roles in (("user", "assistant"), ("user", "assistant", "user")):
        text = _probed(tokenizer, str, roles) or _probed(tokenizer, _part_of, roles) or ""
        token = _first_token(tokenizer, text.rpartition(_ANSWER)[2].lstrip())
        if token is not None:
            return token
    return None


def _first_token(tokenizer: Any, text: str) -> int | None:
    """The added or special token that the text begins with; the longest of several."""
    tokens = {one.content: token for token, one in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    tokens |= {word: token for token, word in special_tokens(tokenizer).items()}
    found = [word for word in tokens if word and text.startswith(word)]
    return tokens[max(found, key=len)] if found else None
