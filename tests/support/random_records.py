"""Whether a call recorded the same on both sides: scores, logits, hidden states and attentions of every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from random_calls import PAIRS, Call

import engine

CLOSE = {"atol": 2e-3, "rtol": 1e-4}
_SCORES = ("scores", "logits")
_STATES = {"hidden_states": "decoder_hidden_states", "attentions": "decoder_attentions"}  # with those of pairs
_RECORDS = (*_SCORES, *_STATES, "cross_attentions", "encoder_hidden_states", "encoder_attentions")


def is_close(mine: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(mine.double(), other.double(), **CLOSE, equal_nan=True)


def compared_records(
    call: Call, ours: engine.Generation, theirs: Any, drawn: bool, mask: torch.Tensor | None = None
) -> str:
    """The first record that differs; "" where there is none. drawn: whether the texts differ, and so all values.

    mask: of the prompts [prompts, columns]. States of pads mean nothing, and are not compared.
    """
    for name in _RECORDS:
        if (getattr(ours, name) is None) != (_of(call, theirs, name) is None):
            return f"{name} are recorded on one side alone"
    searches = ours.sequences_scores is not None
    if searches and theirs.get("sequences_scores") is not None:
        for name in ("sequences_scores", "beam_indices"):
            mine, other = getattr(ours, name), theirs[name]
            if mine.shape != other.shape or not is_close(mine, other):
                return f"{name} {mine.tolist()} where transformers has {other.tolist()}"
    if drawn:
        return ""
    wrong = _scores(call, ours, theirs)
    if not wrong and not call.drafts:  # forwards with a draft are others
        wrong = _states(call, ours, theirs, mask)
    return wrong or _of_the_encoder(call, ours, theirs)


def reads_all(ours: engine.Generation) -> bool:
    """Whether each step reads all columns here, and has the states of all."""
    return ours.stats.cache == "none"


def _of(call: Call, theirs: Any, name: str) -> Any:
    return theirs.get(_STATES.get(name, name) if call.name in PAIRS else name)


def _running(ours: engine.Generation, step: int, rows: int) -> list[int]:
    """Rows that have not ended; a search goes on with all."""
    searches = ours.sequences_scores is not None
    return [row for row in range(rows) if searches or step < len(ours.tokens[row])]


def _scores(call: Call, ours: engine.Generation, theirs: Any) -> str:
    for name in _SCORES:
        mine, other = getattr(ours, name) or (), _of(call, theirs, name) or ()
        if len(mine) != len(other):
            return f"{name} of {len(mine)} steps where transformers has {len(other)}"
        for step, (one, two) in enumerate(zip(mine, other, strict=True)):
            rows = _running(ours, step, len(one))
            if one.shape != two.shape or not is_close(one[rows], two[rows]):
                return f"{name} of step {step} differ by {(one[rows] - two[rows]).abs().nan_to_num(0, 0, 0).max()}"
    return ""


def _states(call: Call, ours: engine.Generation, theirs: Any, mask: torch.Tensor | None) -> str:
    for name in (*_STATES, "cross_attentions"):
        mine, other = getattr(ours, name) or (), _of(call, theirs, name) or ()
        if len(mine) != len(other):
            return f"{name} of {len(mine)} forwards where transformers has {len(other)}"
        begun = ours.sequences.shape[1] - max(map(len, ours.tokens))
        for step, (one, two) in enumerate(zip(mine, other, strict=True)):
            if step > 0 and reads_all(ours):
                if any(layer.shape[-2] < begun + step for layer in one if layer is not None):
                    return f"{name} of forward {step} have {one[0].shape[-2]} columns"
                one, two = ([None if layer is None else layer[..., -1:, :] for layer in side] for side in (one, two))
            if step == 0 and mask is not None:
                one, two = ([_without_pads(layer, mask) for layer in side] for side in (one, two))
            wrong = _layers(one, two, lambda rows, step=step: _running(ours, step, rows), name)
            if wrong:
                return f"{name} of forward {step}, {wrong}"
    return ""


def _layers(mine: Sequence[Any], other: Sequence[Any], running: Any, name: str) -> str:
    if len(mine) != len(other):
        return f"{len(mine)} layers where transformers has {len(other)}"
    for layer, (one, two) in enumerate(zip(mine, other, strict=True)):
        if (one is None) != (two is None):
            return f"layer {layer} on one side alone"
        if one is None:
            continue
        weighs = name.endswith("attentions")
        if one.shape[:-1] != two.shape[:-1] or (not weighs and one.shape != two.shape):
            return f"layer {layer} of shape {list(one.shape)} where transformers has {list(two.shape)}"
        rows = running(len(one))
        one, two = (_weights(one[rows]), _weights(two[rows])) if weighs else (one[rows], two[rows])
        if not is_close(one, two):
            return f"layer {layer} differs by {(one - two).abs().max()}"
    return ""


def _without_pads(layer: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor | None:
    """Zeros in the columns of pads. layer: [rows, ..., columns, width]."""
    if layer is None or layer.shape[-2] != mask.shape[1]:
        return layer
    rows = mask.repeat_interleave(len(layer) // len(mask), dim=0)
    return layer.masked_fill(rows.view(len(rows), *(1,) * (layer.ndim - 3), -1, 1) == 0, 0)


def _weights(attentions: torch.Tensor) -> torch.Tensor:
    """The largest weights: caches have columns in an order of their own, and some that are not read."""
    width = 64
    reads_nothing = attentions.amax(-1, keepdim=True) == attentions.amin(-1, keepdim=True)  # a pad: equal weights
    attentions = attentions.masked_fill(reads_nothing, 0) if attentions.shape[-1] > 1 else attentions
    ordered = attentions.sort(dim=-1, descending=True).values[..., :width]
    return torch.nn.functional.pad(ordered, (0, width - ordered.shape[-1]))


def _of_the_encoder(call: Call, ours: engine.Generation, theirs: Any) -> str:
    for name in ("encoder_hidden_states", "encoder_attentions"):
        mine, other = getattr(ours, name) or (), _of(call, theirs, name) or ()
        wrong = _layers(mine, other, lambda rows: list(range(rows)), "encoder")
        if wrong:
            return f"{name}, {wrong}"
    return ""
