"""A step of one token per row for several caches at once: the weights are read once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers.utils import ModelOutput

from caches import Cache, EngineCache, build
from caches.hf.joined import JoinedCaches, why_not_joined
from engine.model.accelerate_hooks import prompt_device
from engine.model.masks import Columns

if TYPE_CHECKING:
    from engine.model.model_runner import ForwardOptions, ModelRunner

Part = tuple[EngineCache, torch.Tensor]
"""A cache with one token at least and without padding, and the next token of each of its rows, [rows, 1]."""


def joined_step(runner: ModelRunner, parts: Sequence[Part], options: ForwardOptions) -> list[ModelOutput]:
    """Feed the tokens of all parts in one forward: of each the logits and, if asked for, the last hidden states.

    The steps of the caches stay open. When it raises, none is open.
    """
    joined = JoinedCaches([cache for cache, _ in parts if isinstance(cache, Cache)])
    columns, ids = joined.total_tokens + 1, torch.cat([tokens for _, tokens in parts])
    lengths = torch.tensor([cache.total_tokens + 1 for cache, tokens in parts for _ in range(len(tokens))])
    mask = torch.arange(columns) >= columns - lengths[:, None]
    of_batch = Columns(mask.long().to(ids.device), columns)
    outputs = runner.feed(ids, of_batch, joined, before=columns - 1, options=options)
    joined.write_states()
    logits = outputs.logits.split(joined.sizes)
    if not options.hidden_states:
        return [ModelOutput(logits=own) for own in logits]
    states = outputs.hidden_states[-1].split(joined.sizes)
    return [ModelOutput(logits=own, hidden_states=(last,)) for own, last in zip(logits, states, strict=True)]


def why_never_joined(runner: ModelRunner, plain: ForwardOptions) -> str | None:
    """Why steps of this model cannot be joined; None where they can, which is measured.

    The test: the logits of two joined steps of a short and a long text are those of each text alone, to rounding.
    plain: default options.
    """
    model = runner.model
    if model.config.is_encoder_decoder:
        return "a model with an encoder reads another source for every row"
    if runner.dynamic_ropes:
        return "its position embeddings depend on the longest text of a batch"
    if not runner.takes_cache:
        return "it takes no cache of keys and values"
    why = why_not_joined(build("dynamic", model.config))
    if why is not None:
        return why
    try:
        alone, together = _tried(runner, plain)
    except Exception as error:
        return f"a joined step of it failed ({type(error).__name__}: {error})"
    apart = max(float((one - own).abs().max()) for one, own in zip(together, alone, strict=True))
    # Rounding is far below this, and a wrong position or a token of another text far above.
    most = torch.finfo(alone[0].dtype).eps ** 0.5 * max(float(own.abs().max()) for own in alone)
    return None if apart <= most else f"its logits change by {apart:.2g} with the other rows of a batch"


def _tried(runner: ModelRunner, plain: ForwardOptions) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The logits of two steps after a short and a long text: each for itself, and in joined steps."""
    device = prompt_device(runner.model)
    new = torch.tensor([[5, 6]], device=device)
    read: list[list[tuple[torch.Tensor, Columns, EngineCache]]] = [[], []]
    for texts in read:
        for tokens in (2, 7):
            ids = torch.arange(1, tokens + 1, device=device)[None]
            columns, cache = Columns(torch.ones_like(ids), tokens + 2), build("dynamic", runner.model.config)
            runner.feed(ids, columns, cache, options=plain._replace(prefill=True))
            cache.commit()
            texts.append((torch.cat([ids, new], dim=1), columns, cache))
    alone, together = [], []
    for step in range(2):
        for ids, columns, cache in read[0]:
            alone.append(runner.feed(ids[:, : ids.shape[1] - 1 + step], columns, cache, options=plain).logits[:, -1:])
            cache.commit()
        outputs = joined_step(runner, [(cache, new[:, step : step + 1]) for _, _, cache in read[1]], plain)
        together += [one.logits[:, -1:] for one in outputs]
        for _, _, cache in read[1]:
            cache.commit()
    return alone, together
