"""What attention is handed when the columns are not there as one tensor: pieces of it, put together when looked at.

The products of attention are computed piece by piece, so that the whole is never there. Views that models take before
them (heads repeated for the queries that share them, keys transposed) are remembered, not made. Whatever else a model
does with such a tensor gets it whole, and does not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map

from caches.attention.segments import Attend, Exact, Piece, apart, together

_FEW = 64  # queries: with more of them scores would be larger than what is put together
Pieces: TypeAlias = Callable[[], Iterable[Piece]]


@dataclass(frozen=True)
class _Form:
    """How columns [rows, heads, columns, width] are looked at: each head `repeats` times, `spread` along a dimension of
    its own behind the heads, or with the last two dimensions `transposed`."""

    repeats: int = 1
    spread: bool = False
    transposed: bool = False

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, heads, *last = shape
        last = last[::-1] if self.transposed else last
        return (rows, heads, self.repeats, *last) if self.spread else (rows, heads * self.repeats, *last)

    def applied(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.spread:
            numbers = numbers[:, :, None].expand(-1, -1, self.repeats, -1, -1)
        elif self.repeats > 1:
            numbers = numbers.repeat_interleave(self.repeats, dim=1)
        return numbers.mT if self.transposed else numbers


_PLAIN = _Form()


class Pieced(torch.Tensor):
    """Columns [rows, heads, columns, width] made of what `pieces` yields, one after the other.

    A piece may be overwritten when the next one is asked for, unless there is `attend`. base: their shape. like: has
    their type and device. noted: called when the whole is needed. siblings: pieces are asked for so many rows
    together. attend: see `Attend`, for one row.
    """

    pieces: Pieces
    base: tuple[int, int, int, int]
    form: _Form
    noted: Callable[[], None] | None
    siblings: int
    attend: Attend | None

    @staticmethod
    def __new__(
        cls,
        pieces: Pieces,
        base: tuple[int, int, int, int],
        like: torch.Tensor,
        noted: Callable[[], None] | None = None,
        form: _Form = _PLAIN,
        siblings: int = 1,
        attend: Attend | None = None,
    ) -> Pieced:
        view = torch.Tensor._make_wrapper_subclass(cls, form.of(base), dtype=like.dtype, device=like.device)
        view.pieces, view.base, view.form, view.noted = pieces, base, form, noted
        view.siblings, view.attend = siblings, attend
        return view

    def numbers(self) -> torch.Tensor:
        """An ordinary tensor of it."""
        with torch._C.DisableTorchFunctionSubclass():
            out = torch.empty(self.base, dtype=self.dtype, device=self.device)
            begin = 0
            for piece in self.pieces():
                numbers = piece.numbers()
                of_rows = out[:, :, begin : begin + piece.columns]
                of_rows.unflatten(0, (len(numbers), -1))[:] = numbers[:, None]  # of prompts: for all their rows
                begin += piece.columns
            return self.form.applied(out)

    def whole(self) -> torch.Tensor:
        """`numbers`, for a model that cannot do with less."""
        if self.noted is not None:
            self.noted()
        return self.numbers()

    def _as(self, **changes: Any) -> Pieced:
        form = replace(self.form, **changes)
        return Pieced(self.pieces, self.base, self, self.noted, form, self.siblings, self.attend)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _FOLLOWED:
            followed = _FOLLOWED[func](*args, **kwargs)
            if followed is not None:
                return followed
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs or {}))


def pieces_of(columns: torch.Tensor) -> Iterable[Piece]:
    """Those of a view, or a tensor [rows, heads, columns, width] as one piece."""
    return columns.pieces() if isinstance(columns, Pieced) else (Exact(columns),)


def plain(columns: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor: itself, unless it is a view of pieces."""
    return columns.numbers() if isinstance(columns, Pieced) else columns


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, Pieced) else value


# What is followed without the whole: each returns None where it is something else after all.


def _index(view: Pieced, index: Any) -> Pieced | None:
    """`[:, :, None]`, how transformers begins to repeat heads."""
    if not isinstance(index, tuple) or not 3 <= len(index) <= 5 or index[2] is not None or view.form != _PLAIN:
        return None
    others = index[:2] + index[3:]
    return view._as(spread=True) if all(isinstance(one, slice) and one == slice(None) for one in others) else None


def _expand(view: Pieced, *sizes: Any) -> Pieced | None:
    sizes = _flat(sizes)
    rows, heads, columns, width = view.base
    if view.form != _Form(spread=True) or len(sizes) != 5:
        return None
    wanted = (rows, heads, sizes[2], columns, width)
    if any(size not in (-1, must) for size, must in zip(sizes, wanted, strict=True)) or sizes[2] < 1:
        return None
    return view._as(repeats=sizes[2])


def _reshape(view: Pieced, *sizes: Any, shape: Any = None) -> Pieced | None:
    """The dimension of its own joins the heads; anything else needs the whole."""
    sizes = _flat(sizes) if shape is None else tuple(shape)
    joined = replace(view.form, spread=False)
    return view._as(spread=False) if view.form.spread and sizes == joined.of(view.base) else None


def _repeat(view: Pieced, repeats: Any, dim: int | None = None, **kwargs: Any) -> Pieced | None:
    if kwargs or not isinstance(repeats, int) or dim not in (1, -3) or view.form.spread or repeats < 1:
        return None
    return view._as(repeats=view.form.repeats * repeats)


def _transpose(view: Pieced, dim0: int = -2, dim1: int = -1) -> Pieced | None:
    if view.form.spread or {dim0 % 4, dim1 % 4} != {2, 3}:
        return None
    return view._as(transposed=not view.form.transposed)


def _transpose_last(view: Pieced) -> Pieced | None:
    return _transpose(view)


def _contiguous(view: Pieced, **kwargs: Any) -> Pieced | None:
    return None if kwargs else view


def _to(view: Pieced, *args: Any, **kwargs: Any) -> Pieced | None:
    """What changes nothing."""
    if not kwargs.keys() <= {"dtype", "device"}:
        return None
    same: tuple[Any, ...] = (view.dtype, view.device, str(view.device), None)
    return view if all(not isinstance(one, torch.Tensor) and one in same for one in (*args, *kwargs.values())) else None


def _product(left: Any, view: Any) -> torch.Tensor | None:
    """Of queries with transposed keys, or of weights with values."""
    if not isinstance(view, Pieced) or isinstance(left, Pieced) or view.form.spread or left.ndim != 4:
        return None
    (rows, heads, *_), form = view.base, view.form
    if left.shape[:2] != (rows, heads * form.repeats) or left.dtype != view.dtype:
        return None
    if left.shape[3] != form.of(view.base)[2]:
        return None  # torch says what is wrong
    grouped = together(left.reshape(rows, heads, -1, left.shape[3]), view.siblings)
    found = apart(_scores(grouped, view) if form.transposed else _mixed(grouped, view), view.siblings)
    return found.reshape(*left.shape[:3], found.shape[-1])


def _scores(queries: torch.Tensor, key: Pieced) -> torch.Tensor:
    return torch.cat([piece.scores(queries) for piece in key.pieces()], dim=-1)


def _mixed(weights: torch.Tensor, value: Pieced) -> torch.Tensor:
    out, begin = weights.new_zeros((*weights.shape[:3], value.base[3])), 0
    for piece in value.pieces():
        out += piece.mixed(weights[..., begin : begin + piece.columns])
        begin += piece.columns
    return out


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """As `scaled_dot_product_attention`: [rows, heads, tokens, width], where heads may share one of the keys."""
    if not isinstance(key, Pieced) or not isinstance(value, Pieced) or isinstance(query, Pieced):
        return None
    upright = not any(view.form.spread or view.form.transposed for view in (key, value))
    if not upright or dropout_p or is_causal or query.shape[2] > _FEW:
        return None
    (rows, heads, tokens, width), siblings = query.shape, key.siblings
    queries = (query * (width**-0.5 if scale is None else scale)).reshape(rows, key.base[1], -1, width)
    mask = None if attn_mask is None else _to_add(attn_mask, query.dtype).expand(rows, heads, tokens, key.base[2])
    if key.attend is not None and key.attend == value.attend:
        by_head = None if mask is None else mask.unflatten(1, (key.base[1], -1))
        found = key.attend(queries, key.pieces(), value.pieces(), by_head, value.base[3])
        if found is not None:
            return found.reshape(rows, heads, tokens, -1)
    scores = _scores(together(queries, siblings), key)
    if mask is not None:
        by_row = scores.unflatten(2, (siblings, -1, tokens)).permute(0, 2, 1, 3, 4, 5)
        by_row += mask.unflatten(0, (-1, siblings)).unflatten(2, (key.base[1], -1))
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    return apart(_mixed(weights, value), siblings).reshape(rows, heads, tokens, -1)


def _to_add(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To scores of that type, whether it says which are seen or is numbers already."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def _flat(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes


_ASKS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.is_floating_point,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
}
_FOLLOWED: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: _index,
    torch.Tensor.expand: _expand,
    torch.Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    torch.Tensor.repeat_interleave: _repeat,
    torch.repeat_interleave: _repeat,
    torch.Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    getattr(torch.Tensor, "mT").__get__: _transpose_last,  # noqa: B009 - no type checker knows it
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.to: _to,
    torch.matmul: _product,
    torch.Tensor.matmul: _product,
    torch.Tensor.__matmul__: _product,
    torch.nn.functional.scaled_dot_product_attention: _attention,
}
