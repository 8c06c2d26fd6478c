"""Checks that the tokens in a cache are the first tokens of the prompt, padding included."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from caches import EngineCache, TokenLog, UnknownContentError, first_layer
from caches.layers.read_by import ReadBy
from caches.transfer.comparison import KeptTokens
from engine.errors import InputError
from engine.model.columns import Columns
from engine.model.model_inputs import ModelInputs
from engine.model.model_runner import ModelRunner
from engine.prompt import PER_TOKEN
from engine.request.inputs.encoder import source_of
from engine.request.inputs.model_kwargs import has_placeholders
from engine.request.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PIECE = 4096  # tokens of all rows that are compared at a time
_OTHER_SOURCE = (
    "the cache holds what the decoder kept of another source: give the same one again, or start with an empty cache"
)


def known_mask(cache: EngineCache | None, ids: torch.Tensor) -> torch.Tensor:
    """The mask [rows, n] of the first columns of `ids` that the cache's log also begins with; n may be 0."""
    log = None if cache is None else cache.log
    if log is None or log.ids.shape[0] != ids.shape[0]:
        return ids[:, :0]
    columns = min(log.ids.shape[1], ids.shape[1])
    equal = (log.ids[:, :columns].to(ids.device) == ids[:, :columns]).all(dim=0)
    agreed = int(equal.long().cumprod(dim=0).sum())
    return log.mask[:, :agreed].to(ids.device)


def check_continues(cache: EngineCache, request: Request) -> bool:
    """Raise `InputError` where the tokens known to be in `cache` do not begin the prompt.

    Returns whether they certainly do; otherwise `check_content` has to compare keys.
    """
    prompt, mask, offset = request.prompt, request.mask, request.lengths.cached
    ids = prompt.ids
    log, cached = cache.log, cache.total_tokens
    if cache.batch_size not in (-1, ids.shape[0]):
        raise InputError(f"the cache holds {cache.batch_size} rows, but the prompt has {ids.shape[0]}")
    if cache.max_rows is not None and len(ids) > cache.max_rows:
        raise InputError(f"the cache has room for {cache.max_rows} rows, but the prompt has {len(ids)}")
    if cached == 0:
        return True
    if log is None or log.ids.shape[1] < cached or prompt.columns_without_ids > 0:
        return False
    source = source_of(prompt.model_kwargs)
    if source is not None and log.source is not None and _is_another(source, log.source):
        raise InputError(_OTHER_SOURCE)
    logged = log.first(cached)
    known_ids, known_mask = logged.ids.to(ids.device), logged.mask.to(mask.device)
    different = (known_ids[:, offset:] != ids[:, : cached - offset]) & (
        (known_mask | mask[:, :cached])[:, offset:] != 0
    )
    if bool(different.any()):
        raise InputError(_differs(different, offset, cached, ids, known_ids[:, offset:], None))
    if not torch.equal(known_mask, mask[:, :cached]):
        raise InputError(
            f"attention_mask says something else about the {cached} tokens in the cache than when they were read or "
            "generated (rows that ended early were filled up with pad tokens): leave it out, and it is remembered"
        )
    if source is not None and log.source is None:
        return False
    positions = prompt.model_kwargs.get("position_ids")
    if positions is None and log.positions is None:
        return True
    usual = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logged_positions = usual if log.positions is None else log.positions.to(usual.device)
    prompt_positions = usual if positions is None else positions
    return bool((logged_positions[..., :cached] == prompt_positions[..., :cached]).all())


def _is_another(source: torch.Tensor, logged: torch.Tensor) -> bool:
    """Whether two outputs of an encoder [rows, columns, width] differ by more than rounding.

    An encoder that reads other rows beside them, or on other threads, rounds differently.
    """
    if source.shape != logged.shape:
        return True
    return bool(KeptTokens(logged[:, None]).differ(source[:, None], 0).any())


def check_reader(cache: EngineCache, now: ReadBy) -> None:
    """Raise `InputError` where the model, as it is now, may compute other keys and values than those in the cache."""
    log = cache.log
    reason = None if log is None or cache.total_tokens == 0 else log.why_other(now)
    if reason is not None:
        raise InputError(
            f"the {cache.name} cache holds {cache.total_tokens} tokens of each row, and this model may compute other "
            f"keys and values of them: {reason}. Start with an empty cache, or say trust_cache=True if you know that "
            "they are the same"
        )


def check_content(
    runner: ModelRunner,
    cache: EngineCache,
    request: Request,
    columns: Columns,
    inputs: ModelInputs,
    tokenizer: PreTrainedTokenizerBase,
    now: ReadBy,
) -> None:
    """Compare the keys of the cache's first layer with the prompt's, and set the cache's log. Raises `InputError`."""
    cached = cache.total_tokens
    try:
        if request.lengths.cached > 0:
            return
        stored = first_layer(cache)
        _check_comparable(runner, request, cached)
        if request.source is None:  # media are not encoded again for this
            per_token = {name: value for name, value in inputs.model_kwargs.items() if name in PER_TOKEN}
            inputs = replace(inputs, model_kwargs=per_token)
        _check_columns(runner, stored[0], request, columns, inputs, cached, tokenizer)
        if request.source is not None:
            _check_source(runner, stored[1], request, columns, inputs)
    except UnknownContentError as reason:
        raise InputError(
            f"the {cache.name} cache holds {cached} tokens of each row, and whether they begin this prompt cannot be "
            f"checked: {reason}. Start with an empty cache, or say trust_cache=True if you know that they do"
        ) from None
    if request.lengths.embedded == 0:
        mask, ids = request.mask[:, :cached].clone(), request.prompt.ids[:, :cached].clone()
        source = source_of(request.prompt.model_kwargs)
        cache.log = TokenLog(ids, mask, columns.own_positions(cached), source, now)


def _check_comparable(runner: ModelRunner, request: Request, cached: int) -> None:
    """Raise `UnknownContentError` where keys depend on more than a token and its position."""
    ids = request.prompt.ids[:, : max(0, cached - request.lengths.embedded)]
    if request.prompt.embeds is None and request.source is None and has_placeholders(runner.model, ids):
        raise UnknownContentError(
            "some of them stand for images or sounds, of which only the cache knows what was there"
        )
    plain = runner.facts.plain_tokens
    if plain is not None and cached > plain:
        raise UnknownContentError(f"behind {plain} tokens the keys of this model also depend on how long the text was")


def _check_columns(
    runner: ModelRunner,
    stored: tuple[KeptTokens, KeptTokens],
    request: Request,
    columns: Columns,
    inputs: ModelInputs,
    cached: int,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    prompt, mask = request.prompt, request.mask != 0
    ids = torch.nn.functional.pad(prompt.ids, (prompt.columns_without_ids, 0))
    step = max(1, _PIECE // len(ids))
    for begin in range(0, cached, step):
        end = min(begin + step, cached)
        computed = runner.first_keys(ids, columns, begin, end, inputs)
        different = [tokens.differ(expected, begin) for tokens, expected in zip(stored, computed, strict=True)]
        differing = (different[0] | different[1]) & mask[:, begin:end]
        if bool(differing.any()):
            raise InputError(_differs(differing, begin, cached, ids[:, begin:], None, tokenizer))
    if request.source is None:
        _check_places_tell(mask[:, :cached])
    if not bool(mask[:, :cached].all()):
        _check_masked(runner, stored[0], request, ids, inputs, cached)


def _check_source(
    runner: ModelRunner,
    stored: tuple[KeptTokens, KeptTokens],
    request: Request,
    columns: Columns,
    inputs: ModelInputs,
) -> None:
    """Raise `InputError` where the cross-attention keys and values in the cache are of another source."""
    keys, values = runner.first_keys(request.prompt.ids, columns, 0, 1, inputs, cross=True)
    different = stored[0].differ(keys, 0) | stored[1].differ(values, 0)
    mask = inputs.model_kwargs.get("attention_mask")
    if mask is not None and mask.shape == different.shape:
        different = different & (mask != 0).to(different.device)
    if stored[0].kept.shape[2] != keys.shape[2] or bool(different.any()):
        raise InputError(_OTHER_SOURCE)


def _check_places_tell(mask: torch.Tensor) -> None:
    """Raise `UnknownContentError` where positions do not tell the mask [rows, cached tokens] that was used."""
    holes = (mask[:, :-1] & ~mask[:, 1:]).any(dim=1).nonzero().flatten().tolist()
    if holes:
        raise UnknownContentError(
            f"row {holes[0]} has padding after its first token, which may have been read in other places"
        )
    alone = (mask.sum(dim=1) == 1).nonzero().flatten().tolist()
    if alone:
        raise UnknownContentError(f"a single token of row {alone[0]} is there, which may have been read as a pad")


def _check_masked(
    runner: ModelRunner, keys: KeptTokens, request: Request, ids: torch.Tensor, inputs: ModelInputs, cached: int
) -> None:
    """Raise `UnknownContentError` where keys are the same with and without a mask on the padding."""
    row = int((request.mask[:, :cached] == 0).any(dim=1).int().argmax())
    end = min(cached, int((request.mask[row] == 0).nonzero()[-1]) + 2)  # the token after its last pad
    if request.mask[row, end - 1] == 0:
        return  # it ends in padding: no token in the cache has come after them
    plain = Columns(torch.ones_like(request.mask), request.mask.shape[1])
    keys_there = runner.first_keys(ids, plain, end - 1, end, inputs)[0]
    if not bool(keys.differ(keys_there, end - 1)[row, 0]):
        raise UnknownContentError(
            f"row {row} has padding, and the keys of this model do not tell whether it was masked when it was read"
        )


def _differs(
    different: torch.Tensor, offset: int, cached: int, ids: torch.Tensor, there: Any, tokenizer: PreTrainedTokenizerBase
) -> str:
    """The error's message. different, ids, there: [rows, columns] from column `offset` on; `there` where known."""
    column = int(different.any(dim=0).int().argmax())
    row = int(different[:, column].int().argmax())
    difference = f"the prompt has {ids[row, column].item()} there"
    if there is not None:
        difference += f", the cache {there[row, column].item()}"
    around = ids[row, max(0, column - 3) : column + 4]
    difference += f", among {around.tolist()}"
    if tokenizer is not None:
        difference += f" ({tokenizer.decode(around.tolist())!r})"
    return (
        f"the cache holds {cached} tokens that do not begin this prompt: they differ from token {offset + column} on, "
        f"in row {row} ({difference}). Give the whole conversation as it was generated, with the same model, or start "
        "with an empty cache"
    )


def check_goes_on(runner: ModelRunner, cache: EngineCache, request: Request) -> None:
    """Refuse to go on from `cache` where the text would be another one than without it. Trials may run the model."""
    if cache.total_tokens == 0:
        return
    name, cached, log, mask = type(runner.model).__name__, cache.total_tokens, cache.log, request.mask
    padded = (mask[:, 1:] < mask[:, :-1]).any(dim=1).nonzero().flatten().tolist()
    reason = runner.facts.why_not_padding_between(cache) if padded else None
    if reason is not None:
        raise InputError(
            f"row {padded[0]} has padding between its tokens (rows that end early are filled up with them), and in "
            f"{name} {reason}: go on with that row alone, from its own tokens"
        )
    if any("token_type" in name for name in request.prompt.model_kwargs):
        return  # the call says which tokens are read with those behind them in mind
    if (
        request.prompt.embeds is None
        and request.lengths.cached == 0
        and has_placeholders(runner.model, request.prompt.ids)
    ):
        return  # a text without its images is no text that could be read at once
    # The token that a run has generated last is read as that run would have read it.
    is_next = log is not None and mask.shape[1] == cached + 1 == log.ids.shape[1]
    if is_next and log is not None and torch.equal(log.ids[:, -1:].to(mask.device), request.prompt.ids[:, -1:]):
        return
    reason = runner.facts.why_not_cut
    if reason is not None:
        raise InputError(
            f"the {cache.name} cache holds {cached} tokens of the {mask.shape[1]}, and in {name} {reason}: start with "
            "an empty cache"
        )
