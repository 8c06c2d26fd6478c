"""What attention is handed when the columns are not there as numbers: a tensor that is decoded when it is looked at.

Attention of few tokens decodes piece by piece, so that the whole is never there. Whatever else a model does with such a
tensor gets it decoded whole, and does not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

_FEW = 32  # queries: with more of them scores would be larger than what is decoded
Pieces = Callable[[], Iterator[torch.Tensor]]


class Encoded(torch.Tensor):
    """Columns [rows, heads, columns, width] made of the tensors that `pieces` yields, one after the other.

    A piece may be overwritten when the next one is asked for. like: has their type and device.
    """

    pieces: Pieces

    @staticmethod
    def __new__(cls, pieces: Pieces, columns: int, like: torch.Tensor) -> Encoded:
        shape = (*like.shape[:2], columns, like.shape[3])
        view = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        view.pieces = pieces
        return view

    def whole(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            rows, heads, columns, width = self.shape
            out = torch.empty((rows, heads, columns, width), dtype=self.dtype, device=self.device)
        begin = 0
        for piece in self.pieces():
            out[:, :, begin : begin + piece.shape[2]] = piece
            begin += piece.shape[2]
        return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention and _is_for_few(*args, **kwargs):
            return _attention(*args, **kwargs)
        return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs or {}))


_ASKS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
}


def _decoded(value: Any) -> Any:
    return value.whole() if isinstance(value, Encoded) else value


def _is_for_few(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> bool:
    return isinstance(key, Encoded) and isinstance(value, Encoded) and not (dropout_p or is_causal) and (
        query.shape[2] <= _FEW
    )  # fmt: skip


def _attention(
    query: torch.Tensor,
    key: Encoded,
    value: Encoded,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As `scaled_dot_product_attention`: [rows, heads, tokens, width], where heads may share one of the keys."""
    rows, heads, tokens, width = query.shape
    shared = key.shape[1]
    queries = (query * (width**-0.5 if scale is None else scale)).reshape(rows, shared, -1, width)
    scores = torch.cat([queries @ piece.transpose(-1, -2) for piece in key.pieces()], dim=-1)
    if attn_mask is not None:
        by_head = scores.view(rows, heads, tokens, -1)
        if attn_mask.dtype == torch.bool:
            by_head.masked_fill_(~attn_mask, float("-inf"))
        else:
            by_head += attn_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(scores.dtype)
    out, begin = torch.zeros_like(queries[..., : value.shape[3]]), 0
    for piece in value.pieces():
        out += weights[..., begin : begin + piece.shape[2]] @ piece
        begin += piece.shape[2]
    return out.reshape(rows, heads, tokens, -1)
