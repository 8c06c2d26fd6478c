"""A step of one token per row for several caches at once: the weights are read once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from caches import Cache, EngineCache, build
from caches.hf.joined import JoinedCaches, why_not_joined
from caches.platform.accelerate_hooks import prompt_device
from configs.cache import DEFAULT_CACHE
from engine.model.columns import Columns
from engine.model.trials import Scale, distance, rounding_of

Part: TypeAlias = tuple[EngineCache, torch.Tensor]
"""A cache with one token at least and without padding, and the next token of each of its rows, [rows, 1]."""
Feed: TypeAlias = Callable[[torch.Tensor, Columns, EngineCache, int], ModelOutput]
"""(ids, columns, cache, columns before the ids) -> outputs: see `ModelRunner.feed`."""


def joined_step(feed: Feed, pairs: Sequence[Part]) -> list[ModelOutput]:
    """Feed the tokens of all caches in one forward: of each the logits and, if there are any, the last hidden states.

    The steps of the caches stay open. When it raises, none is open.
    """
    joined = JoinedCaches([cache for cache, _ in pairs if isinstance(cache, Cache)])
    columns, ids = joined.total_tokens + 1, torch.cat([tokens for _, tokens in pairs])
    of_rows = [cache.total_tokens + 1 for cache, tokens in pairs for _ in range(len(tokens))]
    lengths = torch.tensor(of_rows, device="cpu")
    mask = torch.arange(columns, device="cpu") >= columns - lengths[:, None]
    outputs = feed(ids, Columns(mask.long().to(ids.device), columns), joined, columns - 1)
    joined.write_states()
    logits = outputs.logits.split(joined.sizes)
    if not outputs.get("hidden_states"):
        return [ModelOutput(logits=row_logits) for row_logits in logits]
    states = outputs.hidden_states[-1].split(joined.sizes)
    return [
        ModelOutput(logits=row_logits, hidden_states=(row_states,))
        for row_logits, row_states in zip(logits, states, strict=True)
    ]


def can_be_joined(model: PreTrainedModel, read_prompt: Feed, feed: Feed) -> bool | str | None:
    """Whether steps of this model can be joined, or why they never can; None where a trial does not show it.

    The trial: the logits of two joined steps of a short and a long text are those of each text alone, to rounding.
    read_prompt: `feed` for a prompt.
    """
    if model.config.is_encoder_decoder:
        return "a model with an encoder reads another source for every row"
    reason = why_not_joined(build(DEFAULT_CACHE, model.config))
    if reason is not None:
        return reason
    alone, together = _tried(model, read_prompt, feed)
    short, long = alone[-2:]  # the same token behind other texts
    scale = Scale(distance(short, long), max(map(rounding_of, alone)))
    answers = [scale.is_same(joined_logits, logits) for joined_logits, logits in zip(together, alone, strict=True)]
    return None if None in answers else all(answers)


def _tried(model: PreTrainedModel, read_prompt: Feed, feed: Feed) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The logits of two steps after a short and a long text: each for itself, and in joined steps."""
    device = prompt_device(model)
    new_ids = torch.tensor([[5, 6]], device=device)
    texts: list[tuple[torch.Tensor, Columns, EngineCache]] = []
    for tokens in (2, 7, 2, 7):
        ids = torch.arange(1, tokens + 1, device=device)[None]
        columns, cache = Columns(torch.ones_like(ids), tokens + 2), build(DEFAULT_CACHE, model.config)
        read_prompt(ids, columns, cache, 0)
        cache.commit()
        texts.append((torch.cat([ids, new_ids], dim=1), columns, cache))
    alone, together = [], []
    for step in range(2):
        for ids, columns, cache in texts[:2]:
            alone.append(feed(ids[:, : ids.shape[1] - 1 + step], columns, cache, 0).logits[:, -1:])
        outputs = joined_step(feed, [(cache, new_ids[:, step : step + 1]) for _, _, cache in texts[2:]])
        together += [output.logits[:, -1:] for output in outputs]
        for _, _, cache in texts:
            cache.commit()
    return alone, together
