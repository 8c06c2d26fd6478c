"""From results to the objects of OpenAI's protocol."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.chat_template import special_tokens
from engine.output.detokenizer import RowText
from engine.result import Generation, StreamChunk, TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_LEAST = -9999.0  # for no probability at all: JSON has no infinity
_REASONS = {"eos": "stop", "stop_string": "stop", "criteria": "stop", "length": "length", "time": "length"}


@dataclass
class Answer:
    """Writes the objects of one request. is_chat: as a chat's, not as completions. tokenizer: of the model.

    logprobs: as `reading.logprobs_asked`. continues: whether texts go on from their prompts. has_form: whether a form
    was asked for: then texts begin with the space that decoders leave out.
    """

    model: str
    is_chat: bool
    tokenizer: Any
    logprobs: int | None
    continues: bool
    has_form: bool
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    _texts: dict[int, str] = field(default_factory=dict)  # of tokens
    _spaces: dict[int, str] = field(default_factory=dict)  # what is missing before the text of each choice
    _offsets: dict[int, _Offsets] = field(default_factory=dict)  # of each choice

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._special = frozenset(special_tokens(self.tokenizer))

    # A stream.

    def first(self, index: int) -> dict[str, Any]:
        """The chunk that says that a message of a chat begins."""
        return self._chunk([self._choice(index, delta={"role": "assistant", "content": ""})])

    def chunk(self, index: int, chunk: StreamChunk) -> dict[str, object]:
        reason = None if chunk.finish_reason is None else _REASONS[chunk.finish_reason]
        content = self._content(self.with_space(index, chunk.tokens, chunk.text or ""), delta=True)
        return self._chunk([self._choice(index, reason, self._logprobs(index, "", [], chunk.logprobs), **content)])

    def echo(
        self, index: int, text: str, scored: Sequence[TokenLogprob | int], reason: str | None
    ) -> dict[str, object]:
        """The prompt, before the text that continues it; with a reason where none does."""
        return self._chunk([self._choice(index, reason, self._logprobs(index, text, scored, []), text=text)])

    def usage_chunk(self, usage: Mapping[str, object]) -> dict[str, object]:
        return self._chunk([]) | {"usage": usage}

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        return self._object("chat.completion.chunk" if self.is_chat else "text_completion") | {"choices": choices}

    # All at once.

    def complete(self, choices: list[dict[str, object]], usage: Mapping[str, object]) -> dict[str, object]:
        return self._object("chat.completion" if self.is_chat else "text_completion") | {
            "choices": choices,
            "usage": usage,
        }

    def choice(
        self,
        index: int,
        echoed: str,
        scored: Sequence[TokenLogprob | int],
        text: str,
        logprobs_of_text: Sequence[TokenLogprob],
        reason: str | None,
    ) -> dict[str, object]:
        """echoed, scored: the prompt and its tokens. text, logprobs_of_text: what continues it, and its tokens."""
        reason = None if reason is None else _REASONS[reason]
        logprobs = self._logprobs(index, echoed, scored, logprobs_of_text)
        return self._choice(index, reason, logprobs, **self._content(echoed + text, delta=False))

    # Parts.

    def with_space(self, index: int, tokens: Sequence[int], text: str) -> str:
        """`text`, of these tokens of a choice, with the space before its first word: decoders leave it out, as if the
        text began there."""
        if self.continues and not self.has_form and index not in self._spaces:
            token = next((candidate for candidate in tokens if candidate not in self._special), None)
            if token is not None:
                alone = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
                self._spaces[index] = self._token(token).removesuffix(alone)
        if not text:
            return ""
        space, self._spaces[index] = self._spaces.get(index, ""), ""
        return space + text

    def _object(self, name: str) -> dict[str, object]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _choice(
        self, index: int, reason: str | None = None, logprobs: dict[str, object] | None = None, **content: object
    ) -> dict[str, object]:
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _content(self, text: str, delta: bool) -> dict[str, object]:
        if not self.is_chat:
            return {"text": text}
        if delta:
            return {"delta": {"content": text} if text else {}}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(
        self, index: int, echoed: str, scored: Sequence[TokenLogprob | int], following: Sequence[TokenLogprob]
    ) -> dict[str, object] | None:
        """scored: tokens of the prompt `echoed`; those of which there is no log probability by their ids. following:
        tokens that follow in the choice."""
        if self.logprobs is None:
            return None
        tokens = [*scored, *following]
        entries = [TokenLogprob(token, 0.0) if isinstance(token, int) else token for token in tokens]
        has_logprob = [not isinstance(token, int) for token in tokens]
        if self.is_chat:
            return {"content": [self._entry(entry) for entry in entries], "refusal": None}
        if index not in self._offsets:
            self._offsets[index] = _Offsets(self.tokenizer, len(echoed), self.continues or self.has_form)
        offsets = self._offsets_of_prompt(echoed, [entry.token for entry in entries[: len(scored)]])
        offsets += map(self._offsets[index].add, (entry.token for entry in following))
        return {
            "tokens": [self._token(entry.token) for entry in entries],
            "token_logprobs": [
                max(entry.logprob, _LEAST) if is_known else None
                for entry, is_known in zip(entries, has_logprob, strict=True)
            ],
            "top_logprobs": [
                self._top(entry) if is_known else None for entry, is_known in zip(entries, has_logprob, strict=True)
            ]
            if self.logprobs
            else None,
            "text_offset": offsets,
        }

    def _offsets_of_prompt(self, text: str, tokens: Sequence[int]) -> list[int]:
        """Where each token begins in the text. Tokens that are added to it, as the one for its beginning, take no room
        there, nor does a space that tokenizers put in front of it."""
        decoded = RowText(
            self.tokenizer, decoding={"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        )
        offsets, end = [], 0
        for token in tokens:
            offsets.append(end)
            piece = decoded.push(token)
            if not text.startswith(piece, end):
                spaced = f" {piece}"  # the decoder has removed the space at the beginning
                piece = spaced if text.startswith(spaced, end) else piece.removeprefix(" ")
                piece = "" if token in self._special else piece
            end = min(end + len(piece), len(text))
        return offsets

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """By text; of tokens with one text the likeliest. The token of the text is among them."""
        logprobs: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            logprobs.setdefault(self._token(token), max(logprob, _LEAST))
        return logprobs

    def _entry(self, entry: TokenLogprob) -> dict[str, object]:
        top = [self._named(token, logprob) for token, logprob in entry.top]
        return self._named(entry.token, entry.logprob) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, object]:
        text = self._token(token)
        encoded = self._bytes_of_part(token) if "\ufffd" in text else text.encode()
        return {
            "token": text,
            "logprob": max(logprob, _LEAST),
            "bytes": None if encoded is None else list(encoded),
        }

    def _bytes_of_part(self, token: int) -> bytes | None:
        """Of a token that is a part of a character; None where the tokenizer does not tell."""
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if named := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(named[1])
        byte_of = _bytes_of_characters()
        return bytes(byte_of[character] for character in piece) if byte_of.keys() >= set(piece) else None

    def _token(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decoded(token)
        return self._texts[token]

    def _decoded(self, token: int) -> str:
        text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        piece = self.tokenizer.convert_ids_to_tokens(token)
        # SentencePiece's decoder leaves out the space that a text begins with.
        return f" {text}" if isinstance(piece, str) and piece.replace("\u2581", " ") == f" {text}" else text


class _Offsets:
    """Where the tokens of a choice begin in its text, in characters. begin: of the first one. keeps_space: whether the
    text has the space that decoders leave out at its beginning."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, begin: int, keeps_space: bool):
        self._begin, self._text = begin, RowText(tokenizer, keeps_space=keeps_space)

    def add(self, token: int) -> int:
        offset = self._begin + len(self._text.text)
        self._text.push(token)
        return offset


@cache
def _bytes_of_characters() -> dict[str, int]:
    """The bytes that characters stand for in the vocabularies of byte-level tokenizers."""
    return {character: byte for byte, character in bytes_to_unicode().items()}


def usage(prompt_tokens: int, new_tokens: int, cached_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def added(results: Iterable[Generation], prompt_tokens: int) -> dict[str, object]:
    """The usage of all results. prompt_tokens: of all prompts, each counted once."""
    results = list(results)
    new_tokens = sum(result.stats.new_tokens for result in results)
    cached = sum(result.stats.cached_tokens for result in results)
    return usage(prompt_tokens, new_tokens, min(cached, prompt_tokens))


def error(message: str, error_type: str, code: str | None = None, param: str | None = None) -> dict[str, object]:
    """param: the field of the request that is wrong."""
    texts = {"message": message, "type": error_type, "param": param, "code": code}
    # Halves of surrogate pairs, which JSON may bring in any text, cannot be sent back.
    return {"error": {name: text and text.encode("utf-8", "replace").decode() for name, text in texts.items()}}
