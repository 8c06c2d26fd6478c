"""Tensors with a column per token: they get room as tokens come, never for all of `max_new_tokens` at once."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

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


def extend_model_kwargs(
    model: PreTrainedModel, model_kwargs: dict[str, Any], columns: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """`model_kwargs` with those that grow with every token extended to `columns` at least; second, along which
    dimension.

    What a new token has there is asked of the model, by letting it add one.
    """
    is_encoder_decoder = model.config.is_encoder_decoder
    grown = model._update_model_kwargs_for_generation(
        _NoOutputs(), dict(model_kwargs), is_encoder_decoder=is_encoder_decoder
    )
    extended, axes = dict(model_kwargs), {}
    for name, value in model_kwargs.items():
        longer = grown.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(longer, torch.Tensor) or longer.shape == value.shape:
            continue
        axis = next(axis for axis in range(value.ndim) if longer.shape[axis] != value.shape[axis])
        new = longer.narrow(axis, longer.shape[axis] - 1, 1)
        missing = max(0, columns - value.shape[axis])
        extended[name] = torch.cat([value, new.repeat_interleave(missing, dim=axis)], dim=axis)
        axes[name] = axis
    return extended, axes


class _NoOutputs(dict):
    """The outputs of a forward that has not been: every field is None."""

    def __getattr__(self, name: str) -> None:
        return None
