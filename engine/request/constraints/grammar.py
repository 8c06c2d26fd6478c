"""`Grammar`: the logits processor of constraints. What may come next is a function of a row's text.

It needs no word of rows that change places or of tokens that are taken back: a state per text is kept, and that of a
new text is made from the nearest one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.chat_template import special_tokens
from engine.errors import OptionError
from engine.request.constraints.constraint import Constraint
from engine.request.constraints.json_limits import Reading, json_tokens

_logger = logging.getLogger("engine")

MOST_FORCED = 16  # tokens that are fed at once: each has logits and scores of its own
_KEPT = 64  # states at least

_Text: TypeAlias = tuple[int, tuple[int, ...]]
"""A constraint by its number, and the tokens after the prompt."""
_ENDED: _Text = (-1, ())


@dataclass(eq=False)
class _State:
    """matcher: after a text. forced, allowed: tokens that have to come next, or a byte for each token: 0 forbids it;
    both None before they are asked for, and where the text has left the grammar. has_ended: it has left with a token
    that ends it. reading: of the numbers in it."""

    matcher: Any
    has_left: bool = False
    has_ended: bool = False
    forced: list[int] | None = None
    allowed: bytearray | None = None
    reading: Reading | None = None


class Grammar(LogitsProcessor):
    """constraints: of each prompt, or None. prompt_columns: columns before the texts.

    ordinary_ends: end tokens that are text elsewhere, as that of "." may be. Where the form can go on with such a token
    it is text; where it cannot and the text is complete, the token ends it.
    """

    def __init__(
        self,
        constraints: Sequence[Constraint | None],
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        eos_ids: Sequence[int],
        prompt_columns: int,
    ):
        self.constraints = tuple(constraints)
        self.__name__ = next(constraint.said for constraint in constraints if constraint is not None)  # in messages
        unique = list(dict.fromkeys(constraint for constraint in constraints if constraint is not None))
        self._kinds = [None if constraint is None else unique.index(constraint) for constraint in constraints]
        self._ends = frozenset(token for token in eos_ids if 0 <= token < vocabulary)
        self._prompt_columns, self._most = prompt_columns, _KEPT
        if not self._ends:
            raise OptionError(
                f"{unique[0].said} ends a text with an end token, and this call has none: give eos_token_id"
            )
        self._unique, self._tokenizer = unique, tokenizer
        special = frozenset(() if tokenizer is None else special_tokens(tokenizer)) & frozenset(range(vocabulary))
        # The library takes its end tokens for no text: where the call has none of these, another one stands in.
        library_ends = (self._ends & special) or special or self._ends
        self.ordinary_ends = self._ends - library_ends
        self._special_ends, self._stand_ins = self._ends & library_ends, library_ends - self._ends
        self._library = _library_tokenizer(tokenizer, vocabulary, sorted(library_ends), unique[0].said)
        self._begin = [_State(_matcher(constraint, self._library)) for constraint in unique]
        self._states: dict[_Text, _State] = {(number, ()): state for number, state in enumerate(self._begin)}
        self._announced: tuple[torch.Tensor, list[_Text | None]] | None = None

    @property
    def differs(self) -> bool:
        """Whether it says something different about the texts of different prompts."""
        return len(set(self._kinds)) > 1

    def check_length(self, new_tokens: int) -> None:
        """Raise `OptionError` if no text of so many tokens is complete, as far as that is known before."""
        for number, state in enumerate(self._begin):
            min_tokens = len(self._certain(state.matcher)) + 1
            if min_tokens > new_tokens:
                parameter = self.constraints[self._kinds.index(number)].said  # type: ignore[union-attr]
                raise OptionError(
                    f"{parameter} takes {min_tokens} tokens or more, of which {min_tokens - 1} are certain and one is "
                    f"the end token, and max_new_tokens leaves {new_tokens}: raise it"
                )

    def announce(self, ids: torch.Tensor) -> None:
        """The texts ids [rows, columns] will be asked about after the next forward. Reading them waits for the device:
        done before the forward, masks are made while the device computes it."""
        self._announced = ids, self._texts(ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        texts = self._reached(input_ids)
        mask = torch.ones(scores.shape, dtype=torch.uint8, device="cpu")
        for row, text in enumerate(texts):
            if text is None:
                continue
            mask[row] = 0
            if text is _ENDED or self._states[text].has_ended:  # a beam may go on for want of others
                mask[row, sorted(self._ends)] = 1
                continue
            state = self._known(text)
            if state.forced:
                mask[row, state.forced[0]] = 1
            elif state.allowed is not None:
                mask[row, : len(state.allowed)] = torch.frombuffer(state.allowed, dtype=torch.uint8)
        return scores.masked_fill(mask.to(scores.device) == 0, -torch.inf)

    def forced(self, ids: torch.Tensor) -> list[list[int]]:
        """For each row the tokens that have to come next, at most `MOST_FORCED`."""
        texts = self._reached(ids)
        return [
            [] if text is None or text is _ENDED else (self._known(text).forced or [])[:MOST_FORCED] for text in texts
        ]

    def belongs(self, ids: torch.Tensor, prompt: int | None = None) -> torch.Tensor:
        """Whether the last token of each text ids [rows, columns] is one of `ordinary_ends` and text of its form, bool
        [rows]. prompt: that of all rows; None where the rows are those of all prompts in turn."""
        verdicts = [tokens[-1] in self.ordinary_ends for tokens in ids[:, -1:].tolist()]
        if any(verdicts):
            texts = self._texts(ids, prompt)
            verdicts = [is_end and self._holds(text) for is_end, text in zip(verdicts, texts, strict=True)]
        return torch.tensor(verdicts, device=ids.device)

    def _holds(self, text: _Text | None) -> bool:
        """Whether all tokens of a text are of its form."""
        if text is None or text is _ENDED:
            return False
        if text not in self._states:
            self._states[text] = self._after(self._nearest(text), text)
        return not self._states[text].has_left

    def parsed(self, texts: Sequence[str], are_complete: Sequence[bool]) -> list[object]:
        """What complete texts mean, by row; None for others, and for what a model of pydantic does not accept."""
        rows_per_prompt, values = len(texts) // len(self.constraints), []
        for row, (text, is_complete) in enumerate(zip(texts, are_complete, strict=True)):
            constraint, value = self.constraints[row // rows_per_prompt], None
            if is_complete and constraint is not None and constraint.parse is not None:
                try:
                    value = constraint.parse(text)
                except Exception as error:  # validators may ask for more than the schema says
                    _logger.warning("row %d follows %s and cannot be read: %s", row, constraint.said, error)
            values.append(value)
        return values

    def _texts(self, ids: torch.Tensor, prompt: int | None = None) -> list[_Text | None]:
        """The text of each row; None where there is no constraint, `_ENDED` behind an end token without text. prompt:
        see `belongs`."""
        indices = self._kinds if prompt is None else self._kinds[prompt : prompt + 1]
        rows_per_prompt, texts = len(ids) // len(indices), list[_Text | None]()
        for row, tokens in enumerate(ids[:, self._prompt_columns :].tolist()):
            number = indices[row // rows_per_prompt if self.differs else 0]
            if number is None:
                texts.append(None)
            else:
                texts.append((number, tuple(tokens)) if self._special_ends.isdisjoint(tokens) else _ENDED)
        return texts

    def _reached(self, ids: torch.Tensor) -> list[_Text | None]:
        """The text of each row, with a state for it."""
        announced, self._announced = self._announced, None
        texts = announced[1] if announced is not None and announced[0] is ids else self._texts(ids)
        needed = {text for text in texts if text is not None and text is not _ENDED}
        sources = {text: self._nearest(text) for text in needed if text not in self._states}
        for text, source in sources.items():
            self._states[text] = self._after(source, text)
        self._evict(needed)
        return texts

    def _nearest(self, text: _Text) -> _Text:
        """The known text that has the most in common with this one."""
        number, tokens = text
        parent = self._states.get((number, tokens[:-1]))
        if parent is not None and not parent.has_left:
            return number, tokens[:-1]
        candidates = [
            candidate for candidate, state in self._states.items() if candidate[0] == number and not state.has_left
        ]
        return max(candidates, key=lambda candidate: _common(candidate[1], tokens))

    def _after(self, source: _Text, text: _Text) -> _State:
        """The state of `text`, made from that of `source`."""
        matcher, common = self._states[source].matcher.deep_copy(), _common(source[1], text[1])
        if common < len(source[1]) and not matcher.rollback(len(source[1]) - common):
            matcher, common = self._begin[text[0]].matcher.deep_copy(), 0
        appended = list(text[1][common:])
        remaining = appended[matcher.try_consume_tokens(appended) :]
        has_ended = bool(remaining) and remaining[0] in self.ordinary_ends and matcher.is_accepting()
        return _State(matcher, has_left=bool(remaining), has_ended=has_ended)

    def _evict(self, needed: set[_Text]) -> None:
        """Keep the states that are wanted, those of the empty texts, and the newest of the others: searches in groups
        ask about the rows of one group at a time."""
        idle = [text for text in self._states if text[1] and text not in needed]
        self._most = max(self._most, 4 * len(needed))
        for text in idle[: max(0, len(idle) + len(needed) - self._most)]:
            del self._states[text]

    def _certain(self, matcher: Any) -> list[int]:
        """The tokens that have to come next.

        llguidance tokenizes the text that has to come as the tokenizer does: with added tokens, and as a normalizer
        changes it. Where its matcher does not take these tokens for that text, plain ones spell it out.
        """
        tokens: list[int] = matcher.compute_ff_tokens()
        if matcher.validate_tokens(tokens) < len(tokens):
            tokens = self._library.greedy_tokenize(matcher.compute_ff_bytes().decode(errors="ignore"))
            tokens = tokens[: matcher.validate_tokens(tokens)]
        return tokens

    def _known(self, text: _Text) -> _State:
        """The state of a text, with what may come next. Nothing may where the text has left the grammar, as a beam does
        that has nothing left to go on with."""
        state = self._states[text]
        if state.forced is None and not state.has_left:
            state.forced = self._certain(state.matcher)
            if not state.forced:
                state.allowed = bytearray(self._allowed(text, state))
                if state.matcher.is_accepting():
                    for token in self.ordinary_ends | self._stand_ins:
                        state.allowed[token] = token in self._ends
            if state.matcher.is_error():
                parameter = next(
                    constraint.said
                    for constraint, number in zip(self.constraints, self._kinds, strict=True)
                    if constraint is not None and number == text[0]
                )
                raise OptionError(f"{parameter} cannot be followed further: {_in_short(state.matcher.get_error())}")
        return state

    def _allowed(self, text: _Text, state: _State) -> bytes | bytearray:
        """A byte for each token, 0 for those that may not come next."""
        number, tokens = text
        limits = self._unique[number].json_limits
        if limits is not None:
            ends = (len(tokens) - distance for distance in range(1, min(len(tokens), _KEPT) + 1))
            states = ((end, self._states.get((number, tokens[:end]))) for end in ends)
            end, reading = next(
                ((end, entry.reading) for end, entry in states if entry and entry.reading), (0, Reading())
            )
            state.reading, _ = limits.after(reading, self._library.decode_bytes(list(tokens[end:])))
            return json_tokens(self._tokenizer, self._library).allowed(state.matcher, limits, state.reading)
        allowed: bytes = state.matcher.compute_logit_bias()
        return allowed


def _common(tokens: Sequence[int], other_tokens: Sequence[int]) -> int:
    """How many tokens two texts have in common."""
    pairs = zip(tokens, other_tokens, strict=False)
    differs = (number for number, (token, other_token) in enumerate(pairs) if token != other_token)
    return next(differs, min(len(tokens), len(other_tokens)))


_TOKENIZERS: WeakKeyDictionary[object, dict[tuple[int, ...], object]] = WeakKeyDictionary()


def _library_tokenizer(tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: list[int], parameter: str) -> Any:
    """The tokenizer in the form of llguidance, which takes up to a second to make. vocabulary: scores of the model."""
    from llguidance import hf

    if tokenizer is None:
        raise OptionError(f"{parameter} is about the text: pass tokenizer=..., or give the model as a path")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise OptionError(
            f"{parameter} needs a tokenizer of the package tokenizers, whose tokens llguidance can read, and this is a "
            f"{type(tokenizer).__name__}"
        )
    if len(tokenizer) > vocabulary:
        raise OptionError(
            f"{parameter}: the tokenizer has {len(tokenizer)} tokens and the model scores of {vocabulary}, so they do "
            "not belong together: give the model's own tokenizer"
        )
    library_tokenizers = _TOKENIZERS.setdefault(tokenizer, {})
    key = (len(tokenizer), vocabulary, *ends)
    if key not in library_tokenizers:
        try:
            library_tokenizers[key] = hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=ends)
        except ValueError as error:
            raise OptionError(f"{parameter}: llguidance cannot read the tokenizer: {_in_short(str(error))}") from error
    return library_tokenizers[key]


def _matcher(constraint: Constraint, library: object) -> Any:
    """At the beginning of a text. Raises `OptionError` where nothing can follow the constraint."""
    from llguidance import LLMatcher

    matcher = LLMatcher(library, constraint.grammar, log_level=0)
    is_empty = not matcher.is_error() and not any(matcher.compute_logit_bias())
    if matcher.is_error() or is_empty:
        error = matcher.get_error()
        is_empty |= error.startswith("NoExtensionBias")
        reason = "no text can follow it" if is_empty else _in_short(error)
        remedies = (remedy for beginning, remedy in _REMEDIES.items() if reason.startswith(beginning))
        raise OptionError(": ".join((constraint.said, reason, *remedies)))
    return matcher


_REMEDIES = {  # by how the library's words begin
    "Unimplemented keys": "leave them out of the schema, and check the value that comes",
    "Unknown format": "leave it out of the schema, or write it as a pattern",
    "oneOf": "write anyOf, which differs where a value fits more than one entry",
    "Resource": "nothing is fetched, so put what $ref points to into $defs",
}


def _in_short(message: str) -> str:
    return " ".join(message.split())[:300]
