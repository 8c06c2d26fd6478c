"""What attention is handed when the columns are not there as one tensor: segments of it, put together when looked at.

The products of attention are computed segment by segment, so that the whole is never there. Views that models take
before them (heads repeated for the queries that share them, keys transposed) are remembered, not made. Whatever else a
model does with such a tensor gets it whole, and does not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from caches.attention.segments import Attend, DenseSegment, Segment, group_rows, ungroup_rows
from caches.torch_api import DisableTorchFunctionSubclass, make_wrapper_subclass, tree_map

_FEW = 64  # queries: with more of them scores would be larger than what is put together
Segments: TypeAlias = Callable[[], Iterable[Segment]]


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


class SegmentedTensor(torch.Tensor):
    """Columns [rows, heads, columns, width] made of what `segments` yields, one after the other.

    A segment may be overwritten when the next one is asked for, unless there is `attend`. base: their shape. like: has
    their type and device. noted: called when the whole is needed. rows_per_prefix: segments are asked for so many rows
    together. attend: see `Attend`, for one row.
    """

    segments: Segments
    base: tuple[int, int, int, int]
    form: _Form
    noted: Callable[[], None] | None
    rows_per_prefix: int
    attend: Attend | None

    @staticmethod
    def __new__(
        cls,
        segments: Segments,
        base: tuple[int, int, int, int],
        like: torch.Tensor,
        noted: Callable[[], None] | None = None,
        form: _Form = _PLAIN,
        rows_per_prefix: int = 1,
        attend: Attend | None = None,
    ) -> SegmentedTensor:
        view = make_wrapper_subclass(cls, form.of(base), dtype=like.dtype, device=like.device)
        view.segments, view.base, view.form, view.noted = segments, base, form, noted
        view.rows_per_prefix, view.attend = rows_per_prefix, attend
        return view

    def materialize(self) -> torch.Tensor:
        """An ordinary tensor of it."""
        with DisableTorchFunctionSubclass():
            out = torch.empty(self.base, dtype=self.dtype, device=self.device)
            begin = 0
            for segment in self.segments():
                numbers = segment.materialize()
                of_rows = out[:, :, begin : begin + segment.columns]
                of_rows.unflatten(0, (len(numbers), -1))[:] = numbers[:, None]  # of prompts: for all their rows
                begin += segment.columns
            return self.form.applied(out)

    def whole(self) -> torch.Tensor:
        """`materialize`, for a model that cannot do with less."""
        if self.noted is not None:
            self.noted()
        return self.materialize()

    def _as(self, **changes: Any) -> SegmentedTensor:
        form = replace(self.form, **changes)
        return SegmentedTensor(self.segments, self.base, self, self.noted, form, self.rows_per_prefix, self.attend)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _FOLLOWED:
            followed = _FOLLOWED[func](*args, **kwargs)
            if followed is not None:
                return followed
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs or {}))


def segments_of(columns: torch.Tensor) -> Iterable[Segment]:
    """Those of a view, or a tensor [rows, heads, columns, width] as one segment."""
    return columns.segments() if isinstance(columns, SegmentedTensor) else (DenseSegment(columns),)


def plain(columns: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor: itself, unless it is a view of segments."""
    return columns.materialize() if isinstance(columns, SegmentedTensor) else columns


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, SegmentedTensor) else value


# What is followed without the whole: each returns None where it is something else after all.


def _index(view: SegmentedTensor, index: Any) -> SegmentedTensor | None:
    """`[:, :, None]`, how transformers begins to repeat heads."""
    if not isinstance(index, tuple) or not 3 <= len(index) <= 5 or index[2] is not None or view.form != _PLAIN:
        return None
    others = index[:2] + index[3:]
    return view._as(spread=True) if all(isinstance(one, slice) and one == slice(None) for one in others) else None


def _expand(view: SegmentedTensor, *sizes: Any) -> SegmentedTensor | None:
    sizes = _flat(sizes)
    rows, heads, columns, width = view.base
    if view.form != _Form(spread=True) or len(sizes) != 5:
        return None
    wanted = (rows, heads, sizes[2], columns, width)
    if any(size not in (-1, must) for size, must in zip(sizes, wanted, strict=True)) or sizes[2] < 1:
        return None
    return view._as(repeats=sizes[2])


def _reshape(view: SegmentedTensor, *sizes: Any, shape: Any = None) -> SegmentedTensor | None:
    """The dimension of its own joins the heads; anything else needs the whole."""
    sizes = _flat(sizes) if shape is None else tuple(shape)
    joined = replace(view.form, spread=False)
    return view._as(spread=False) if view.form.spread and sizes == joined.of(view.base) else None


def _repeat(view: SegmentedTensor, repeats: Any, dim: int | None = None, **kwargs: Any) -> SegmentedTensor | None:
    if kwargs or not isinstance(repeats, int) or dim not in (1, -3) or view.form.spread or repeats < 1:
        return None
    return view._as(repeats=view.form.repeats * repeats)


def _transpose(view: SegmentedTensor, dim0: int = -2, dim1: int = -1) -> SegmentedTensor | None:
    if view.form.spread or {dim0 % 4, dim1 % 4} != {2, 3}:
        return None
    return view._as(transposed=not view.form.transposed)


def _transpose_last(view: SegmentedTensor) -> SegmentedTensor | None:
    return _transpose(view)


def _contiguous(view: SegmentedTensor, **kwargs: Any) -> SegmentedTensor | None:
    return None if kwargs else view


def _to(view: SegmentedTensor, *args: Any, **kwargs: Any) -> SegmentedTensor | None:
    """What changes nothing."""
    if not kwargs.keys() <= {"dtype", "device"}:
        return None
    same: tuple[Any, ...] = (view.dtype, view.device, str(view.device), None)
    return view if all(not isinstance(one, torch.Tensor) and one in same for one in (*args, *kwargs.values())) else None


def _product(left: Any, view: Any) -> torch.Tensor | None:
    """Of queries with transposed keys, or of weights with values."""
    if not isinstance(view, SegmentedTensor) or isinstance(left, SegmentedTensor) or view.form.spread or left.ndim != 4:
        return None
    (rows, heads, *_), form = view.base, view.form
    if left.shape[:2] != (rows, heads * form.repeats) or left.dtype != view.dtype:
        return None
    if left.shape[3] != form.of(view.base)[2]:
        return None  # torch says what is wrong
    grouped = group_rows(left.reshape(rows, heads, -1, left.shape[3]), view.rows_per_prefix)
    found = ungroup_rows(_scores(grouped, view) if form.transposed else _mixed(grouped, view), view.rows_per_prefix)
    return found.reshape(*left.shape[:3], found.shape[-1])


def _scores(queries: torch.Tensor, key: SegmentedTensor) -> torch.Tensor:
    return torch.cat([segment.scores(queries) for segment in key.segments()], dim=-1)


def _mixed(weights: torch.Tensor, value: SegmentedTensor) -> torch.Tensor:
    out, begin = weights.new_zeros((*weights.shape[:3], value.base[3])), 0
    for segment in value.segments():
        out += segment.mixed(weights[..., begin : begin + segment.columns])
        begin += segment.columns
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
    if (
        not isinstance(key, SegmentedTensor)
        or not isinstance(value, SegmentedTensor)
        or isinstance(query, SegmentedTensor)
    ):
        return None
    upright = not any(view.form.spread or view.form.transposed for view in (key, value))
    if not upright or dropout_p or is_causal or query.shape[2] > _FEW:
        return None
    (rows, heads, tokens, width), rows_per_prefix = query.shape, key.rows_per_prefix
    queries = (query * (width**-0.5 if scale is None else scale)).reshape(rows, key.base[1], -1, width)
    mask = None if attn_mask is None else _to_add(attn_mask, query.dtype).expand(rows, heads, tokens, key.base[2])
    if key.attend is not None and key.attend == value.attend:
        by_head = None if mask is None else mask.unflatten(1, (key.base[1], -1))
        found = key.attend(queries, key.segments(), value.segments(), by_head, value.base[3])
        if found is not None:
            return found.reshape(rows, heads, tokens, -1)
    scores = _scores(group_rows(queries, rows_per_prefix), key)
    if mask is not None:
        by_row = scores.unflatten(2, (rows_per_prefix, -1, tokens)).permute(0, 2, 1, 3, 4, 5)
        by_row += mask.unflatten(0, (-1, rows_per_prefix)).unflatten(2, (key.base[1], -1))
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    return ungroup_rows(_mixed(weights, value), rows_per_prefix).reshape(rows, heads, tokens, -1)


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
