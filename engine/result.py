"""What a generation gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache

from engine.notebook import generation_as_html, generation_in_short


@dataclass(frozen=True)
class Fallback:
    """How a run went on after memory was out.

    Attributes
    ----------
    name : str
        Which of the ways was taken: see `configs.EngineConfig.on_oom`.
    what : str
        What was done, in words.
    tokens : int
        Tokens of each row in the cache when it was taken.
    bytes_before, bytes_after : int
        Bytes of the cache on the device that computes.
    """

    name: str
    what: str
    tokens: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.what} (after {self.tokens} tokens per row; cache on the device {self.bytes_before:,} "
            f"-> {self.bytes_after:,} bytes)"
        )


@dataclass(frozen=True)
class Stats:
    """Measured over one call. Rates count the tokens of all rows; a rate is None when nothing was timed for it.

    Attributes
    ----------
    cache : str
        The name of the backend that was used, or the class of a cache of transformers' own.
    prompt_tokens : int
        Tokens read, pads and tokens already in the cache not counted.
    new_tokens : int
        Tokens emitted, pads of ended rows not counted.
    ttft_s : float or None
        Seconds from the call to the first token.
    prefill_tokens_per_s, decode_tokens_per_s : float or None
        Tokens read per second until the first token, and new ones per second from then on.
    total_s : float
        Seconds of the whole call.
    cache_bytes : int
        Size of the cache at the end.
    peak_bytes : int or None
        Most device memory allocated during the call, by all that runs there; None where the device does not report it
        (CPU). Where it stayed below what the process had allocated before, it is the most after any step.
    drafted_tokens, accepted_tokens, verifications : int or None
        Tokens that a draft or the text proposed to the model, those of them that were found right, and forwards of the
        model that looked at some. None where nothing was proposed.
    fallbacks : tuple of Fallback
        How the run went on whenever memory was out.
    linears : str
        Which matrix products the model's linear layers of float32 on a CPU took, by rows and by size of the matrix:
        "torch", "onednn", ... (see `EngineConfig.linears`).
    """

    cache: str
    prompt_tokens: int
    new_tokens: int
    ttft_s: float | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    total_s: float
    cache_bytes: int
    peak_bytes: int | None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    verifications: int | None = None
    fallbacks: tuple[Fallback, ...] = ()
    linears: str = "torch"


@dataclass(frozen=True, eq=False)
class Generation:
    """The result of one call, with the fields of transformers' `return_dict_in_generate`.

    A result equals only itself: compare the fields of two, with `torch.equal` those that are tensors.

    Attributes
    ----------
    sequences : LongTensor [rows, prompt + new]
        Laid out as by transformers' `generate`: prompts with their left pads, rows that ended early filled up with the
        pad id.
    tokens : list of list of int
        The new token ids of every row, without the pads after its end.
    text : list of str or None
        The new text of every row, without special tokens and without the stop string that ended it; None when the
        call had no tokenizer.
    finish_reasons : list of str or None
        Per row "eos", "stop_string", "criteria", "time", "length", or None when the run ended before the row did,
        or where a search has found fewer texts than were asked for: that row has no tokens.
    stats : Stats
        What was measured.
    cache : Cache or None
        The live cache, holding everything but the last token (nothing where guidance took a negative prompt longer
        than the prompts, whose columns are not theirs); None for cache="none", where an encoder had no memory, and
        for one of transformers' own that a failed step has spoilt. (transformers' fixed and sliding layers cannot take
        a token back: after a failure between a forward and the choice of its token they hold that last token too.)
    scores, logits : tuple of Tensor [rows, vocabulary], or None
        Per new token, float32, after / before the logits processors; None unless `output_scores` / `output_logits`.
    attentions, hidden_states, cross_attentions : tuple or None
        What the model (its decoder) returned in each of its forwards; None unless asked for with `output_attentions` /
        `output_hidden_states`, the last one without an encoder too.
    encoder_attentions, encoder_hidden_states : tuple or None
        What the encoder returned, one tensor per layer, [prompts, heads, columns, columns] and [prompts, columns,
        width]: a row per prompt, however many texts it has. None unless asked for, without an encoder, and where
        `encoder_outputs` that were given hold none.
    sequences_scores : Tensor [rows] or None
        Of beam search, what its texts were compared by, float32. None for other strategies.
    beam_indices : LongTensor [rows, new] or None
        Of beam search, in which row of the step each new token was chosen, -1 after the end.
    legacy : bool
        Whether `past_key_values` are tuples: the call said `return_legacy_cache=True`.
    """

    sequences: torch.Tensor
    tokens: list[list[int]]
    text: list[str] | None
    finish_reasons: list[str | None]
    stats: Stats
    cache: TransformersCache | None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[Any, ...] | None = None
    cross_attentions: tuple[Any, ...] | None = None
    hidden_states: tuple[Any, ...] | None = None
    encoder_attentions: tuple[torch.Tensor, ...] | None = None
    encoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    sequences_scores: torch.Tensor | None = None
    beam_indices: torch.Tensor | None = None
    legacy: bool = False

    @property
    def past_key_values(self) -> TransformersCache | tuple | None:
        """transformers' name for `cache`; tuples of keys and values where the call said `return_legacy_cache=True`.

        Raises `caches.UnsupportedLayerError` where tuples cannot say everything that is in it.
        """
        return self.cache.to_legacy_cache() if self.legacy and self.cache is not None else self.cache

    def __repr__(self) -> str:
        return generation_in_short(self)

    def _repr_html_(self) -> str:
        return generation_as_html(self)


def nothing_generated(
    prompts: torch.Tensor, with_text: bool, fallbacks: Sequence[Fallback], total_s: float
) -> Generation:
    """The result of a run that ended before it had a cache. prompts: its rows, [rows, columns]."""
    stats = Stats(
        cache="none",
        prompt_tokens=0,
        new_tokens=0,
        ttft_s=None,
        prefill_tokens_per_s=None,
        decode_tokens_per_s=None,
        total_s=total_s,
        cache_bytes=0,
        peak_bytes=None,
        fallbacks=tuple(fallbacks),
    )
    return Generation(
        sequences=prompts,
        tokens=[[] for _ in prompts],
        text=[""] * len(prompts) if with_text else None,
        finish_reasons=[None] * len(prompts),
        stats=stats,
        cache=None,
    )


@dataclass(frozen=True)
class StreamChunk:
    """One row's share of a stream. What was in a piece is final.

    Attributes
    ----------
    row : int
        Its number in the result.
    tokens : tuple of int
        The new token ids.
    text : str or None
        The new text, held back while it may still change (half a character, the beginning of a stop string); None
        without a tokenizer.
    finish_reason : str or None
        As in `Generation`; set on the row's last piece.
    """

    row: int
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: str | None = None
