"""Chat messages: the text that a tokenizer's template makes of them, its token ids, and where an answer ends."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from caches.platform.warn_once import warn_once
from engine.errors import InputError, OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Message = Mapping[str, Any]
OPTIONS = ("continue_final_message", "add_generation_prompt", "sanitize_control_tokens")

# In a chat that is written to see what a template makes of one.
_QUESTION, _ANSWER, _TOOL = "kvengine's question", "kvengine's answer", "kvengines_tool"
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
    more: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, parameters: object) -> TemplateOptions:
        """Those among the parameters of a call, an object or a mapping. Raises `OptionError`."""
        get = parameters.get if isinstance(parameters, Mapping) else lambda name: getattr(parameters, name)
        options: dict[str, Any] = {name: get(name) for name in OPTIONS}
        if options["continue_final_message"] and options["add_generation_prompt"]:
            raise OptionError(
                "continue_final_message goes on with the last message, and add_generation_prompt begins another one: "
                "leave one of them out"
            )
        return cls(**options)

    def resolved(self, messages: Sequence[Message]) -> TemplateOptions:
        """The same for these messages, with a value for each option."""
        message, continues = messages[-1] if messages else {}, self.continue_final_message
        if continues is None:  # as transformers' pipeline for text generation
            is_text = message.get("content") is not None and not message.get("tool_calls")
            continues = message.get("role") == "assistant" and is_text and not self.add_generation_prompt
        asks = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return replace(self, continue_final_message=continues, add_generation_prompt=asks)


DEFAULTS = TemplateOptions()
CLOSED = TemplateOptions(continue_final_message=False, add_generation_prompt=False)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens that decoders leave out of a text: those with a name (eos, pad), and added ones called special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    tokens = {token: entry.content for token, entry in added.items() if entry.special}
    return tokens | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def is_message(value: object) -> bool:
    return isinstance(value, Mapping) and "role" in value


def written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: TemplateOptions) -> str:
    """The messages as the tokenizer's template writes them; `ids_of` reads this text. Raises `InputError`."""
    options, failure = options.resolved(messages), None
    for arguments_as in (_as_objects, _as_json):  # some templates join the arguments of tool calls to texts
        try:
            read = _as_read(tokenizer, _with_calls(messages, arguments_as))
            text = _with_answer_begun(tokenizer, read, options, _written(tokenizer, read, options))
            _check_calls(tokenizer, messages)
            return text
        except (MemoryError, InputError):
            raise
        except Exception as error:  # a template raises what it likes
            failure = failure or error
    raise InputError(
        f"the model's chat template refuses these messages: {type(failure).__name__}: {failure}"
    ) from failure


def _with_answer_begun(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: TemplateOptions, text: str
) -> str:
    """Where templates strip texts, the end of an empty one to go on with is not found behind the white space before."""
    if options.continue_final_message and not _text_of(messages[-1].get("content")).strip():
        begins = replace(options, continue_final_message=False, add_generation_prompt=True)
        with suppress(Exception):  # the messages before it may be refused alone
            begun = _written(tokenizer, messages[:-1], begins)
            return begun if begun.startswith(text) else text
    return text


def _written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: TemplateOptions) -> str:
    render = partial(_rendered, tokenizer, options)
    if options.sanitize_control_tokens:
        return _sanitized(tokenizer, messages, options.more, render)
    return render(messages, options.more)


def _as_read(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Sequence[Message]:
    """With contents as the template reads them: it may write a list of parts as Python does, or leave texts out.

    Raises `InputError` for parts other than texts where the template reads none.
    """
    as_text, as_parts = _probed(tokenizer, str), _probed(tokenizer, _part_of)
    if as_parts is None or "'type'" in as_parts or '"type"' in as_parts:
        return messages if as_text is None else [_with_content(message, _joined) for message in messages]
    if as_text is not None:
        return messages
    return [
        _with_content(message, _part_of) if isinstance(message.get("content"), str) else message for message in messages
    ]


def _with_content(message: Message, change: Callable[[Any], Any]) -> Message:
    return {**message, "content": change(message.get("content"))}


def _joined(content: object) -> object:
    if not isinstance(content, (list, tuple)):
        return content
    for item in content:
        if not isinstance(item, Mapping) or item.get("type", "text") != "text" or not isinstance(item.get("text"), str):
            raise InputError(f"the model's chat template reads texts alone, and a message has the part {item!r:.80}")
    return _text_of(content)


# Calls of tools.


def _with_calls(messages: Sequence[Message], arguments_as: Callable[[object], object]) -> list[Message]:
    """With the arguments of tool calls in another form."""

    def changed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        return {**call, "function": {**function, "arguments": arguments_as(function["arguments"])}}

    calls = [message.get("tool_calls") for message in messages]
    return [
        {**message, "tool_calls": list(map(changed, own))} if isinstance(own, (list, tuple)) else message
        for message, own in zip(messages, calls, strict=True)
    ]


def _as_objects(arguments: object) -> object:
    """Protocols have JSON in a text, which most templates would write as JSON once more."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(arguments)
            return value if isinstance(value, dict) else arguments
    return arguments


def _as_json(arguments: object) -> object:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _check_calls(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> None:
    """Raise `InputError` where messages have calls of tools and the template writes none."""
    place = next((number for number, message in enumerate(messages) if message.get("tool_calls")), None)
    if place is not None and _omits_calls(tokenizer):
        raise InputError(
            f"message {place} calls tools, and the model's chat template leaves calls out: write the call into the "
            "content of the message"
        )


def _omits_calls(tokenizer: PreTrainedTokenizerBase) -> bool:
    call = {"id": "kvengine1", "type": "function", "function": {"name": _TOOL, "arguments": {_TOOL: _TOOL}}}
    chat: list[Message] = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "kvengine1", "name": "", "content": _ANSWER},
    ]
    for arguments_as in (_as_objects, _as_json):
        with suppress(Exception):  # a template raises what it likes
            read = _as_read(tokenizer, _with_calls(chat, arguments_as))
            return _TOOL not in _rendered(tokenizer, CLOSED, read, {})
    return False


def _part_of(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _text_of(content: object) -> str:
    """The text of a content, without parts that are none."""
    if isinstance(content, (list, tuple)):
        return "".join(str(item.get("text", "")) for item in content if isinstance(item, Mapping))
    return str(content or "")


def _probed(
    tokenizer: PreTrainedTokenizerBase,
    as_content: Callable[[str], object],
    roles: Sequence[str] = ("user", "assistant"),
) -> str | None:
    """What the template writes of a chat; None where it refuses it, or leaves texts out."""
    texts = {"user": _QUESTION, "assistant": _ANSWER}
    with suppress(Exception):  # a template raises what it likes
        chat = [{"role": role, "content": as_content(texts[role])} for role in roles]
        text = _rendered(tokenizer, CLOSED, chat, {})
        return text if _QUESTION in text and _ANSWER in text else None
    return None


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    options: TemplateOptions,
    messages: Sequence[Message],
    arguments: Mapping[str, object],
) -> str:
    """Fields that are null, as the content beside calls of tools is, are left out; a template that adds texts without a
    look gets an empty content."""
    left_out = [{name: value for name, value in message.items() if value is not None} for message in messages]
    filled = [{"content": ""} | message for message in left_out]
    forms, failure = [left_out] if filled == left_out else [left_out, filled], None
    for form in forms:
        try:
            return str(
                tokenizer.apply_chat_template(
                    form,
                    tokenize=False,
                    continue_final_message=bool(options.continue_final_message),
                    add_generation_prompt=bool(options.add_generation_prompt),
                    **arguments,
                )
            )
        except Exception as error:  # a template raises what it likes
            failure = error
    assert failure is not None
    raise failure


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str, options: TemplateOptions) -> list[int]:
    """The token ids of a text that `written` gave with these options, or of a part of it."""
    beginning, *pieces = text.split(_BREAK) if options.sanitize_control_tokens else [text]
    ids = list(tokenizer(beginning, add_special_tokens=False)["input_ids"])
    return ids + [token for piece in pieces for token in _ids_of_piece(tokenizer, piece)]


def _ids_of_piece(tokenizer: PreTrainedTokenizerBase, piece: str) -> list[int]:
    """Of a text that does not begin where a line does: some tokenizers put a space there."""
    line, ids = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("\n", f"\n{piece}"))
    if ids[: len(line)] == line:
        return ids[len(line) :]
    return list(tokenizer(piece, add_special_tokens=False)["input_ids"])


# Control tokens in the text of messages.


def _sanitized(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    arguments: Mapping[str, object],
    render: Callable[[Sequence[Message], Mapping[str, object]], str],
) -> str:
    """The text with a `_BREAK` in every control token that a message, a tool or a further argument spells.

    A template may look for words in a text and write another one for the break: then only special tokens are broken;
    where that changes the text too, none.
    """
    special, words = _control_tokens(tokenizer)
    messages, arguments = _mapped((messages, arguments), lambda text: text.replace(_BREAK, ""))
    plain = render(messages, arguments)
    in_answers = _breaking(special)  # thoughts and calls of tools in an answer are those of the model
    for change in (_breaking(special | words) if words - special else in_answers, in_answers):
        broken = [
            _mapped(message, in_answers if message.get("role") == "assistant" else change) for message in messages
        ]
        broken_arguments = _mapped(arguments, change)
        if broken == messages and broken_arguments == arguments:
            return plain
        with suppress(Exception):  # a template raises what it likes
            if (text := render(broken, broken_arguments)).replace(_BREAK, "") == plain:
                return text
    warn_once(
        "messages spell control tokens, and with these broken up the chat template writes another text: they are read "
        "as control tokens"
    )
    return plain


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[frozenset[str], frozenset[str]]:
    """The special tokens, and the other added ones that stand in the chat template, but no white space."""
    added, template = getattr(tokenizer, "added_tokens_decoder", {}).values(), str(tokenizer.chat_template)
    special = frozenset(token for token in special_tokens(tokenizer).values() if len(token) > 1)
    words = (entry.content for entry in added if entry.content in template and not entry.content.isspace())
    return special, frozenset(token for token in words if len(token) > 1)


def _breaking(control: frozenset[str]) -> Callable[[str], str]:
    """Puts a `_BREAK` behind the first character of every control token, also of one that only begins at the end: a
    template may write the rest, or the next text, behind it."""
    if not control:
        return lambda text: text
    pattern = re.compile(f"(?=(?:{'|'.join(map(re.escape, sorted(control)))}))")
    longest, beginnings = max(map(len, control)), {token[0] for token in control}

    def broken(text: str) -> str:
        begins, end = [match.start() for match in pattern.finditer(text)], len(text.rstrip())
        for begin in range(max(0, end - longest), end):
            if text[begin] in beginnings and any(token.startswith(text[begin:end]) for token in control):
                begins.append(begin)
        cuts = [0, *(begin + 1 for begin in sorted({*begins})), len(text)]
        return _BREAK.join(text[begin:end] for begin, end in itertools.pairwise(cuts))

    return broken


def _mapped(value: object, change: Callable[[str], str]) -> Any:
    """The value with every text in it changed, but names of fields and roles, which are single words."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            name if str(name).isidentifier() else _mapped(name, change): (
                entry if name == "role" and str(entry).isidentifier() else _mapped(entry, change)
            )
            for name, entry in value.items()
        }
    return [_mapped(entry, change) for entry in value] if isinstance(value, (list, tuple)) else value


# The ends.


def chat_ends(tokenizer: PreTrainedTokenizerBase, end_ids: int | Sequence[int] | None) -> list[int]:
    """The tokens that end an answer in a chat: `end_ids`, those of the generation config, the tokenizer's end token,
    and the one that closes an answer in the chat template."""
    ids: list[int | None] = [] if end_ids is None else list(end_ids) if isinstance(end_ids, Sequence) else [end_ids]
    ids += [getattr(tokenizer, "eos_token_id", None), _closing_token(tokenizer)]
    return list(dict.fromkeys(token for token in ids if token is not None))


def _closing_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
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


def _first_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """The added or special token that the text begins with; the longest of several."""
    tokens = {entry.content: token for token, entry in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    tokens |= {word: token for token, word in special_tokens(tokenizer).items()}
    words = [word for word in tokens if word and text.startswith(word)]
    return tokens[max(words, key=len)] if words else None
