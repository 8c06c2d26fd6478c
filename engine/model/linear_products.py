"""The matrix products of linear layers other than torch's own, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from caches.torch_api import has_onednn, onednn_linear

Route: TypeAlias = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]
"""A matrix product: (input [..., width], weight [outs, width], bias [outs] or None) -> [..., outs], on the CPU."""

TORCH = "torch"
ROW_LIMITS = (1, 3, 8, 32)  # the most rows of each bucket; the last bucket has no limit


def _swapped(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The transposed product. oneDNN packs its second operand: here the small input, not the weight."""
    rows = input.reshape(-1, input.shape[-1]).contiguous()  # oneDNN is 500 times slower with a strided one
    return with_bias(onednn_linear(weight, rows, None).T, input, bias)


def mm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return with_bias(torch.mm(weight, input.reshape(-1, input.shape[-1]).T).T, input, bias)


def with_bias(product: torch.Tensor, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = product.contiguous()
    if bias is not None:
        out += bias
    return out.view(*input.shape[:-1], -1)


def routes() -> dict[str, Route]:
    """The routes other than torch's own that this torch has, by name."""
    found: dict[str, Route] = {"mm": mm}
    if has_onednn():
        found |= {"onednn": onednn_linear, "swapped": _swapped}
    return found
