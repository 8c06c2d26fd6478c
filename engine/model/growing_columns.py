"""Tensors with a column per token: they get room as tokens come, never for all of `max_new_tokens` at once."""

from __future__ import annotations

import torch

_LEAST = 256  # columns that there is room for behind the prompt at first


def room_for(columns: int, most: int, held: int = 0) -> int:
    """How many columns a tensor of `held` gets so that there is room for `columns`: half as many again, up to `most`.

    held: 0 for one that is made for a prompt of `columns`.
    """
    if held == 0:
        return min(most, columns + _LEAST)
    return held if columns <= held else min(most, max(columns, held + held // 2))


def widened(tensor: torch.Tensor, columns: int, fill: int | torch.Tensor = 0) -> torch.Tensor:
    """`tensor` [..., held] with `columns` of them; the new ones are `fill`, a number or a tensor [...]."""
    held = tensor.shape[-1]
    with torch.inference_mode(False):  # or it could not be written outside of inference mode
        wide = tensor.new_empty((*tensor.shape[:-1], columns))
    wide[..., :held] = tensor
    wide[..., held:] = fill if isinstance(fill, int) else fill[..., None]
    return wide
