"""Growth of tensors with a column per token, which are not allocated for `max_new_tokens` at once."""

from __future__ import annotations

import torch

from caches.platform.torch_api import always_writable

_LEAST = 256  # spare columns behind the prompt at first


def room_for(columns: int, max_columns: int, allocated: int = 0) -> int:
    """The columns to allocate so that `columns` fit: 1.5 times the `allocated` ones, and at most `max_columns`.

    allocated: 0 for a new tensor with a prompt of `columns`.
    """
    if allocated == 0:
        return min(max_columns, columns + _LEAST)
    return allocated if columns <= allocated else min(max_columns, max(columns, allocated + allocated // 2))


def widened(tensor: torch.Tensor, columns: int, fill: int | torch.Tensor = 0) -> torch.Tensor:
    """`tensor` [..., n] with `columns` columns; new ones are `fill`, a number or a tensor [...]."""
    first_new = tensor.shape[-1]
    with always_writable():
        wide = tensor.new_empty((*tensor.shape[:-1], columns))
    wide[..., :first_new] = tensor
    wide[..., first_new:] = fill if isinstance(fill, int) else fill[..., None]
    return wide
