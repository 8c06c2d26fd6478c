"""The result of a call: tokens, text, statistics, and chunks of a stream."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache

from configs.cache import NO_CACHE
from engine.tables import counted, duration, facts, html_table

_SHORT = 50  # characters of a text in a line
_LONG, _MOST_ROWS = 500, 20  # characters of a text in a table, and its rows
_WIDTH = 80  # characters of a line of measurements
_NO_TEXT = "none: no tokenizer was given (tokenizer=..., or the model as a path)"


@dataclass(frozen=True)
class Fallback:
    """A fallback that a run applied when memory was out.

    Attributes
    ----------
    name : str
        Which one: see `configs.EngineConfig.on_oom`.
    what : str
        What it did, in words.
    tokens : int
        Tokens per row in the cache at that time.
    bytes_before, bytes_after : int
        Bytes of the cache on the compute device.
    """

    name: str
    what: str
    tokens: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.what} (after {counted(self.tokens, 'token')} per row; cache on the device "
            f"{self.bytes_before:,} -> {self.bytes_after:,} bytes)"
        )


@dataclass(frozen=True)
class Stats:
    """Measurements of one call. Rates are over all rows; a rate is None if nothing was timed for it.

    Attributes
    ----------
    cache : str
        The name of the cache backend, or the class of one of transformers' caches.
    prompt_tokens : int
        Prompt tokens that were computed, without padding and tokens that were already in the cache.
    cached_tokens : int
        Prompt tokens that were not computed, as the cache held them already.
    new_tokens : int
        Tokens emitted, without the padding of ended rows.
    ttft_s : float or None
        Seconds from the call to the first token.
    prefill_tokens_per_s, decode_tokens_per_s : float or None
        Prompt tokens per second until the first token, and new tokens per second after it.
    total_s : float
        Seconds of the call.
    cache_bytes : int
        Bytes of the cache at the end.
    peak_bytes : int or None
        The most bytes allocated on the device during the call, by the whole process; None if the device does not report
        it (CPU). If an earlier peak of the process was higher, it is the most after any step.
    drafted_tokens, accepted_tokens, verifications : int or None
        Speculative decoding: tokens proposed by a draft model or prompt lookup, those accepted, and forwards of the
        model that verified some. None without it.
    fallbacks : tuple of Fallback
        The fallbacks that were applied when memory was out, in order.
    linears : str
        The matrix products of linear layers on a CPU, by rows and by size of the matrix: "torch", "onednn", ...
        (see `EngineConfig.linears`).
    compiled : str
        What of the decode steps was compiled code at the end: "off", "12 layers", or why not (see
        `EngineConfig.compile`).
    """

    cache: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    ttft_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    total_s: float = 0.0
    cache_bytes: int = 0
    peak_bytes: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    verifications: int | None = None
    fallbacks: tuple[Fallback, ...] = ()
    linears: str = "torch"
    compiled: str = "off"

    def to_dict(self) -> dict[str, object]:
        """The fields, as values of JSON."""
        return asdict(self) | {"fallbacks": [asdict(fallback) for fallback in self.fallbacks]}

    def __str__(self) -> str:
        """A short table of what was measured."""
        return facts(self.facts(), _WIDTH)

    def facts(self) -> list[tuple[str, str]]:
        """Names and values of what was measured, in words."""
        cached = f"{self.cached_tokens} in the cache, " if self.cached_tokens else ""
        pairs = [("cache", self.cache), ("tokens", f"{cached}{self.prompt_tokens} read, {self.new_tokens} new")]
        if self.ttft_s is not None:
            pairs += [("time to first token", duration(self.ttft_s))]
        if self.decode_tokens_per_s is not None:
            pairs += [("speed", f"{self.decode_tokens_per_s:.1f} tokens/s")]
        if self.drafted_tokens and self.accepted_tokens is not None:
            share = self.accepted_tokens / self.drafted_tokens
            pairs += [("proposed", f"{self.drafted_tokens} tokens, {self.accepted_tokens} accepted ({share:.0%})")]
        if self.compiled != "off":
            pairs += [("compiled", self.compiled)]
        pairs += [("cache size", f"{self.cache_bytes:,} bytes")]
        return pairs + [("out of memory", str(fallback)) for fallback in self.fallbacks]


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model found a token: natural logarithms of probabilities, before logits processors.

    Attributes
    ----------
    token : int
        The token id.
    logprob : float
        Its log probability.
    top : tuple of (int, float)
        The likeliest tokens in its place with theirs, best first, as many as `top_logprobs` asks for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def as_json(entry: TokenLogprob) -> dict[str, object]:
    """The fields, with None for a log probability that is no number of JSON."""
    return {
        "token": entry.token,
        "logprob": finite(entry.logprob),
        "top": [(token, finite(logprob)) for token, logprob in entry.top],
    }


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True, eq=False)
class Generation:
    """The result of one call, with the fields of transformers' `return_dict_in_generate`.

    `==` compares identity. To compare two results, compare their fields, tensors with `torch.equal`.

    Attributes
    ----------
    sequences : LongTensor [rows, prompt + new]
        As from transformers' `generate`: prompts with their left padding, and ended rows filled with the pad id.
    tokens : list of list of int
        The new token ids of every row, without padding.
    text : list of str or None
        The new text of every row, without special tokens and without the stop string that ended it; None without a
        tokenizer.
    finish_reasons : list of str or None
        Per row "eos", "stop_string", "criteria", "time" or "length". None if the run ended before the row did, or if a
        search found fewer texts than `num_return_sequences`: that row has no tokens.
    stats : Stats
        Measurements.
    cache : Cache or None
        The live cache, with all tokens but the last one. After a search it has a row per text, and only the first
        columns, those of which the search had read the tokens of all its texts. It is empty after guidance with a
        negative prompt longer than the prompts. None for cache="none", if memory ran out before the first forward, and
        for a cache of transformers' own that a failed step left inconsistent. (transformers' static and sliding layers
        cannot remove a token: after a failure between a forward and the choice of its token they have the last token
        too.)
    scores, logits : tuple of Tensor [rows, vocabulary], or None
        Per new token, float32, after / before the logits processors; None unless `output_scores` / `output_logits`.
    attentions, hidden_states, cross_attentions : tuple or None
        The outputs of the decoder, one entry per forward; None unless `output_attentions` / `output_hidden_states`.
        cross_attentions: only for encoder-decoder models.
    encoder_attentions, encoder_hidden_states : tuple or None
        The outputs of the encoder, a tensor per layer, [prompts, heads, columns, columns] and [prompts, columns,
        width]; one row per prompt. None unless requested as above, without an encoder, and if the given
        `encoder_outputs` have none.
    sequences_scores : Tensor [rows] or None
        For beam search: the scores of the texts, float32.
    beam_indices : LongTensor [rows, new] or None
        For beam search: the row from which each new token was chosen, -1 after the end.
    parsed : list or None
        With `json_schema` or `response_format`: what each text says, as Python values or an object of the pydantic
        model; None for a row that did not end by itself, and for other constraints. None without a constraint.
    logprobs : list of list of TokenLogprob, or None
        Of the new tokens of every row; None unless `top_logprobs` was given.
    legacy : bool
        Whether `past_key_values` is a tuple, as requested with `return_legacy_cache=True`.
    """

    sequences: torch.Tensor
    tokens: list[list[int]]
    text: list[str] | None
    finish_reasons: list[str | None]
    stats: Stats
    cache: TransformersCache | None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[object, ...] | None = None
    cross_attentions: tuple[object, ...] | None = None
    hidden_states: tuple[object, ...] | None = None
    encoder_attentions: tuple[torch.Tensor, ...] | None = None
    encoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    sequences_scores: torch.Tensor | None = None
    beam_indices: torch.Tensor | None = None
    parsed: list[Any] | None = None
    logprobs: list[list[TokenLogprob]] | None = None
    legacy: bool = False

    @property
    def past_key_values(self) -> TransformersCache | tuple | None:
        """transformers' name for `cache`; a tuple of keys and values per layer with `return_legacy_cache=True`.

        Raises `caches.UnsupportedLayerError` if tuples cannot represent the cache.
        """
        return self.cache.to_legacy_cache() if self.legacy and self.cache is not None else self.cache

    def to_dict(self) -> dict[str, object]:
        """Values of JSON: `rows`, each with `tokens`, `finish_reason`, `text` with a tokenizer and `logprobs` where
        they were asked for (None for no probability at all), and `stats`, the fields of `Stats`."""
        rows: list[dict[str, Any]] = []
        for row, (tokens, reason) in enumerate(zip(self.tokens, self.finish_reasons, strict=True)):
            text = {} if self.text is None else {"text": self.text[row]}
            scored = {} if self.logprobs is None else {"logprobs": list(map(as_json, self.logprobs[row]))}
            rows.append(text | {"tokens": tokens, "finish_reason": reason} | scored)
        return {"rows": rows, "stats": self.stats.to_dict()}

    def __repr__(self) -> str:
        """Two or three lines for a result of any size."""
        text = f"text={_NO_TEXT}" if self.text is None else f"text[0]={_cut(self.text[0], _SHORT)!r}"
        optional = [field.name for field in fields(self) if field.default is None]
        records = [name for name in optional if getattr(self, name) is not None]
        separator = ",\n  "
        lines = [_summary(self), text] + ([f"with {', '.join(records)}"] if records else [])
        return f"Generation({separator.join(lines)})"

    def _repr_html_(self) -> str:
        """A table of the first rows, and the measurements."""
        texts: Sequence[str | None] = self.text or [None] * len(self.tokens)
        rows = []
        for row, text in enumerate(texts[:_MOST_ROWS]):
            tokens, reason = self.tokens[row], self.finish_reasons[row] or "unfinished"
            rows.append([row, _cut(str(tokens) if text is None else text, _LONG), len(tokens), reason])
        below = [_summary(self), *map(str, self.stats.fallbacks)]
        if len(self.tokens) > len(rows):
            below.insert(0, f"and {counted(len(self.tokens) - len(rows), 'row')} more")
        if self.text is None:
            below.append(f"text: {_NO_TEXT}")
        return html_table(["row", "text" if self.text is not None else "token ids", "tokens", "ended by"], rows, below)


def _summary(out: Generation) -> str:
    """Rows, tokens, why they ended, the cache and the speed."""
    stats, ended = out.stats, Counter(reason or "unfinished" for reason in out.finish_reasons)
    reasons = ", ".join(f"{count} {reason}" for reason, count in ended.most_common())
    speed = stats.decode_tokens_per_s
    phrases = [counted(len(out.tokens), "row"), counted(stats.new_tokens, "new token"), f"ended: {reasons}"]
    phrases.append(f"cache={stats.cache!r}")
    return ", ".join(phrases if speed is None else [*phrases, f"{speed:.1f} tokens/s"])


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def nothing_generated(
    prompts: torch.Tensor, with_text: bool, fallbacks: Sequence[Fallback], total_s: float, constrained: bool = False
) -> Generation:
    """The result of a run that ended before its first forward. prompts: [rows, columns]."""
    parsed = [None] * len(prompts) if constrained else None
    stats = Stats(NO_CACHE, total_s=total_s, fallbacks=tuple(fallbacks))
    text = [""] * len(prompts) if with_text else None
    return Generation(prompts, [[] for _ in prompts], text, [None] * len(prompts), stats, cache=None, parsed=parsed)


@dataclass(frozen=True)
class StreamChunk:
    """New tokens and text of one row of a stream. They are final.

    Attributes
    ----------
    row : int
        The row's index in the result.
    tokens : tuple of int
        The new token ids.
    text : str or None
        The new text; withheld while it may change (an incomplete character, the beginning of a stop string). None
        without a tokenizer.
    finish_reason : str or None
        As in `Generation`; set in the row's last chunk.
    logprobs : tuple of TokenLogprob
        Of these tokens; empty unless `top_logprobs` was given.
    """

    row: int
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields, as values of JSON; `logprobs` where they were asked for."""
        entries = {name: value for name, value in asdict(self).items() if name != "logprobs"}
        return entries | ({"logprobs": list(map(as_json, self.logprobs))} if self.logprobs else {})
