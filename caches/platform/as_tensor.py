"""`as_tensor`: what callers give as a tensor or as anything that can become one."""

from __future__ import annotations

import torch


def as_tensor(value: object) -> torch.Tensor:
    """A tensor as it is; an array or lists as a tensor on the CPU, whatever torch's default device is.

    Raises `ValueError`, `TypeError`, `RuntimeError` or `OverflowError` as torch does.
    """
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")
