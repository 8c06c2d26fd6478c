"""Keys or values in segments, as a tensor subclass: models compute attention with it without knowing.

Matrix products and `scaled_dot_product_attention` run segment by segment, so the keys or values are never one tensor in
memory. Views that models take before (heads repeated for grouped queries, keys transposed) are recorded, not computed.
Any other operation gets an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from caches.attention.segments import Attend, DenseSegment, Segment, group_rows, ungroup_rows
from caches.platform.torch_api import DisableTorchFunctionSubclass, make_wrapper_subclass, tree_map

_FEW = 64  # tokens: above it the scores would take more memory than the materialized keys
Segments: TypeAlias = Callable[[], Iterable[Segment]]


@dataclass(frozen=True)
class _View:
    """A view of keys or values [rows, heads, slots, width].

    repeats: each head so many times. spread: the repeats are a dimension of their own, behind the heads. transposed:
    the last two dimensions are swapped.
    """

    repeats: int = 1
    spread: bool = False
    transposed: bool = False

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, heads, *matrix = shape
        matrix = matrix[::-1] if self.transposed else matrix
        return (rows, heads, self.repeats, *matrix) if self.spread else (rows, heads * self.repeats, *matrix)

    def applied(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.spread:
            tensor = tensor[:, :, None].expand(-1, -1, self.repeats, -1, -1)
        elif self.repeats > 1:
            tensor = tensor.repeat_interleave(self.repeats, dim=1)
        return tensor.mT if self.transposed else tensor


_PLAIN = _View()


class SegmentedTensor(torch.Tensor):
    """Keys or values [rows, heads, slots, width] that consist of the segments which `segments()` yields.

    Segments share scratch memory: consume one before requesting the next, unless `attend` is set.

    base: the shape without the view. like: a tensor with the data type and the device. on_materialize: called when the
    model needs an ordinary tensor. rows_per_prefix: consecutive rows that share a prefix, see `group_rows`. attend: a
    kernel for all segments at once, see `Attend`.
    """

    segments: Segments
    base: tuple[int, int, int, int]
    form: _View
    on_materialize: Callable[[], None] | None
    rows_per_prefix: int
    attend: Attend | None

    @staticmethod
    def __new__(
        cls,
        segments: Segments,
        base: tuple[int, int, int, int],
        like: torch.Tensor,
        on_materialize: Callable[[], None] | None = None,
        form: _View = _PLAIN,
        rows_per_prefix: int = 1,
        attend: Attend | None = None,
    ) -> SegmentedTensor:
        view = make_wrapper_subclass(cls, form.shape_of(base), dtype=like.dtype, device=like.device)
        view.segments, view.base, view.form, view.on_materialize = segments, base, form, on_materialize
        view.rows_per_prefix, view.attend = rows_per_prefix, attend
        return view

    def materialize(self) -> torch.Tensor:
        """An ordinary tensor with the same shape and content."""
        with DisableTorchFunctionSubclass():
            out = torch.empty(self.base, dtype=self.dtype, device=self.device)
            begin = 0
            for segment in self.segments():
                dense = segment.materialize()
                target = out[:, :, begin : begin + segment.slots]
                target.unflatten(0, (len(dense), -1))[:] = dense[:, None]  # one prefix for all rows that share it
                begin += segment.slots
            return self.form.applied(out)

    def materialize_for_model(self) -> torch.Tensor:
        """`materialize`, and report it to `on_materialize`."""
        if self.on_materialize is not None:
            self.on_materialize()
        return self.materialize()

    def _as(self, **changes: Any) -> SegmentedTensor:
        form = replace(self.form, **changes)
        return SegmentedTensor(
            self.segments, self.base, self, self.on_materialize, form, self.rows_per_prefix, self.attend
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _IN_SEGMENTS:
            result = _IN_SEGMENTS[func](*args, **kwargs)
            if result is not None:
                return result
        return func(*tree_map(_materialized, args), **tree_map(_materialized, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map(_materialized, args), **tree_map(_materialized, kwargs or {}))


def segments_of(tensor: torch.Tensor) -> Iterable[Segment]:
    """The segments of a `SegmentedTensor`; another tensor [rows, heads, slots, width] is one segment."""
    return tensor.segments() if isinstance(tensor, SegmentedTensor) else (DenseSegment(tensor),)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, materialized if it is a `SegmentedTensor`."""
    return tensor.materialize() if isinstance(tensor, SegmentedTensor) else tensor


def _materialized(value: Any) -> Any:
    return value.materialize_for_model() if isinstance(value, SegmentedTensor) else value


# Operations that work in segments. Each returns None for arguments that need an ordinary tensor.


def _index(view: SegmentedTensor, index: Any) -> SegmentedTensor | None:
    """`[:, :, None]`: the first step of transformers' `repeat_kv`."""
    if not isinstance(index, tuple) or not 3 <= len(index) <= 5 or index[2] is not None or view.form != _PLAIN:
        return None
    items = index[:2] + index[3:]
    return view._as(spread=True) if all(isinstance(item, slice) and item == slice(None) for item in items) else None


def _expand(view: SegmentedTensor, *sizes: Any) -> SegmentedTensor | None:
    sizes = _flat(sizes)
    rows, heads, slots, width = view.base
    if view.form != _View(spread=True) or len(sizes) != 5:
        return None
    expected = (rows, heads, sizes[2], slots, width)
    if any(size not in (-1, target) for size, target in zip(sizes, expected, strict=True)) or sizes[2] < 1:
        return None
    return view._as(repeats=sizes[2])


def _reshape(view: SegmentedTensor, *sizes: Any, shape: Any = None) -> SegmentedTensor | None:
    """The last step of `repeat_kv`: the repeats join the heads."""
    sizes = _flat(sizes) if shape is None else tuple(shape)
    joined = replace(view.form, spread=False)
    return view._as(spread=False) if view.form.spread and sizes == joined.shape_of(view.base) else None


def _repeat(view: SegmentedTensor, repeats: Any, dim: int | None = None, **kwargs: Any) -> SegmentedTensor | None:
    if kwargs or not isinstance(repeats, int) or dim not in (1, -3) or view.form.spread or repeats < 1:
        return None
    return view._as(repeats=view.form.repeats * repeats)


def _transpose(view: SegmentedTensor, dim0: int = -2, dim1: int = -1) -> SegmentedTensor | None:
    if view.form.spread or {dim0 % 4, dim1 % 4} != {2, 3}:
        return None
    return view._as(transposed=not view.form.transposed)


def _contiguous(view: SegmentedTensor, **kwargs: Any) -> SegmentedTensor | None:
    return None if kwargs else view


def _to(view: SegmentedTensor, *args: Any, **kwargs: Any) -> SegmentedTensor | None:
    """`to` with the data type and the device that the view has."""
    if not kwargs.keys() <= {"dtype", "device"}:
        return None
    current: tuple[Any, ...] = (view.dtype, view.device, str(view.device), None)
    args = (*args, *kwargs.values())
    return view if all(not isinstance(arg, torch.Tensor) and arg in current for arg in args) else None


def _product(lhs: Any, view: Any) -> torch.Tensor | None:
    """Queries times transposed keys, or attention weights times values."""
    if not isinstance(view, SegmentedTensor) or isinstance(lhs, SegmentedTensor) or view.form.spread or lhs.ndim != 4:
        return None
    (rows, heads, *_), form = view.base, view.form
    if lhs.shape[:2] != (rows, heads * form.repeats) or lhs.dtype != view.dtype:
        return None
    if lhs.shape[3] != form.shape_of(view.base)[2]:
        return None  # torch raises its own error
    grouped = group_rows(lhs.reshape(rows, heads, -1, lhs.shape[3]), view.rows_per_prefix)
    product = ungroup_rows(_scores(grouped, view) if form.transposed else _mixed(grouped, view), view.rows_per_prefix)
    return product.reshape(*lhs.shape[:3], product.shape[-1])


def _scores(queries: torch.Tensor, key: SegmentedTensor) -> torch.Tensor:
    return torch.cat([segment.scores(queries) for segment in key.segments()], dim=-1)


def _mixed(weights: torch.Tensor, value: SegmentedTensor) -> torch.Tensor:
    out, begin = weights.new_zeros((*weights.shape[:3], value.base[3])), 0
    for segment in value.segments():
        out += segment.mixed(weights[..., begin : begin + segment.slots])
        begin += segment.slots
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
    """`scaled_dot_product_attention` for query [rows, heads, tokens, width] with grouped heads; up to `_FEW` tokens."""
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
    added = None if attn_mask is None else to_add(attn_mask, query.dtype)
    mask = None if added is None else added.expand(rows, heads, tokens, key.base[2])
    if key.attend is not None and key.attend == value.attend:
        by_head = None if mask is None else mask.unflatten(1, (key.base[1], -1))
        output = key.attend(queries, key.segments(), value.segments(), by_head, value.base[3])
        if output is not None:
            return output.reshape(rows, heads, tokens, -1)
    scores = _scores(group_rows(queries, rows_per_prefix), key)
    if mask is not None:
        by_row = scores.unflatten(2, (rows_per_prefix, -1, tokens)).permute(0, 2, 1, 3, 4, 5)
        by_row += mask.unflatten(0, (-1, rows_per_prefix)).unflatten(2, (key.base[1], -1))
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    output = ungroup_rows(_mixed(weights, value), rows_per_prefix).reshape(rows, heads, tokens, -1)
    if added is None or tokens == 1:  # a new token sees itself
        return output
    # 0 for a query that sees no slot, such as one of padding: as torch has it.
    return output.masked_fill(added.isneginf().all(dim=-1, keepdim=True), 0)


def to_add(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as it is added to scores of `dtype`; a bool mask is True for visible slots."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def _flat(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes


# Functions of a tensor that read its shape and the like, but no element.
METADATA = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.is_floating_point,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
}
_IN_SEGMENTS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: _index,
    torch.Tensor.expand: _expand,
    torch.Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    torch.Tensor.repeat_interleave: _repeat,
    torch.repeat_interleave: _repeat,
    torch.Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    getattr(torch.Tensor, "mT").__get__: _transpose,  # noqa: B009 - type checkers do not know `mT.__get__`
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.to: _to,
    torch.matmul: _product,
    torch.Tensor.matmul: _product,
    torch.Tensor.__matmul__: _product,
    torch.nn.functional.scaled_dot_product_attention: _attention,
}
