"""Keys or values in segments, as a tensor subclass: models compute attention with it without knowing.

Matrix products and `scaled_dot_product_attention` run segment by segment, so the keys or values are never one tensor in
memory. Views that models take before (heads repeated for grouped queries, keys transposed) are recorded, not computed.
Any other operation gets an ordinary tensor: so do all of them where the rows are those of several caches, each of its
own length, but for attention that goes through `of_each_cache`. There rows are aligned right and begin with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from caches.attention.dispatch import segmented_attention
from caches.attention.segments import CacheRows, group_rows, ungroup_rows
from caches.platform.torch_api import DisableTorchFunctionSubclass, make_wrapper_subclass, tree_map

Arguments: TypeAlias = tuple[Any, ...]
NamedArguments: TypeAlias = dict[str, Any]
Size: TypeAlias = "int | tuple[int, ...] | list[int]"
"""Sizes of a shape: torch's methods take them one by one, or together."""


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


class KeyValueView(torch.Tensor):
    """Keys or values [rows, heads, slots, width] of one cache or several, whose rows follow one another.

    caches: of each its rows. like: a tensor with the data type and the device. form: the view that was taken of `base`,
    the shape of all rows. is_visible: whether a new token attends to all of its cache's slots.
    """

    caches: Sequence[CacheRows]
    base: tuple[int, int, int, int]
    form: _View
    is_visible: bool

    @staticmethod
    def __new__(
        cls, caches: Sequence[CacheRows], like: torch.Tensor, form: _View = _PLAIN, is_visible: bool = False
    ) -> KeyValueView:
        base = caches[0].shape
        if len(caches) > 1:
            base = sum(rows.shape[0] for rows in caches), base[1], max(rows.shape[2] for rows in caches), base[3]
        view = make_wrapper_subclass(cls, form.shape_of(base), dtype=like.dtype, device=like.device)
        view.caches, view.base, view.form, view.is_visible = caches, base, form, is_visible
        return view

    @property
    def is_joined(self) -> bool:
        """Whether it is what several caches have returned, of which no view was taken."""
        return len(self.caches) > 1 and self.form == _PLAIN

    @property
    def of_one_cache(self) -> CacheRows | None:
        """The rows, where they are those of one cache."""
        return self.caches[0] if len(self.caches) == 1 else None

    def of_each_cache(self) -> list[torch.Tensor]:
        """The keys or values of each cache, [rows, heads, slots, width]."""
        tensors = list[torch.Tensor]()
        for rows in self.caches:
            source = rows.sources[0] if len(rows.sources) == rows.rows_per_prefix == 1 else None
            tensors.append(source if isinstance(source, torch.Tensor) else KeyValueView([rows], self))
        return tensors

    def materialize(self) -> torch.Tensor:
        """An ordinary tensor with the same shape and content."""
        with DisableTorchFunctionSubclass():
            allocate = torch.empty if len(self.caches) == 1 else torch.zeros
            out, begin = allocate(self.base, dtype=self.dtype, device=self.device), 0
            for rows in self.caches:
                rows.write_to(out[begin : begin + rows.shape[0]])
                begin += rows.shape[0]
            return self.form.applied(out)

    def materialize_for_model(self) -> torch.Tensor:
        """`materialize`, and report it where that is not what several caches need anyway."""
        rows = self.of_one_cache
        if rows is not None and rows.on_materialize is not None:
            rows.on_materialize()
        return self.materialize()

    def _as(self, **changes: Any) -> KeyValueView:
        return KeyValueView(self.caches, self, replace(self.form, **changes), self.is_visible)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Arguments = (), kwargs: NamedArguments | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in _METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _IN_SEGMENTS:
            result = _IN_SEGMENTS[func](*args, **kwargs)
            if result is not None:
                return result
        return func(*tree_map(_materialized, args), **tree_map(_materialized, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., object], types: object, args: Arguments = (), kwargs: NamedArguments | None = None
    ) -> object:
        return func(*tree_map(_materialized, args), **tree_map(_materialized, kwargs or {}))


def rows_of(tensor: torch.Tensor) -> CacheRows:
    """What a cache has returned for the model, as what attention reads."""
    rows = tensor.of_one_cache if isinstance(tensor, KeyValueView) else CacheRows.of_tensor(tensor)
    assert rows is not None
    return rows


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, materialized if it is a `KeyValueView`."""
    return tensor.materialize() if isinstance(tensor, KeyValueView) else tensor


def _materialized(value: object) -> object:
    return value.materialize_for_model() if isinstance(value, KeyValueView) else value


# Operations that work in segments. Each returns None for arguments that need an ordinary tensor.


def _index(view: KeyValueView, index: object) -> KeyValueView | None:
    """`[:, :, None]`: the first step of transformers' `repeat_kv`."""
    if not isinstance(index, tuple) or not 3 <= len(index) <= 5 or index[2] is not None or view.form != _PLAIN:
        return None
    items = index[:2] + index[3:]
    return view._as(spread=True) if all(isinstance(item, slice) and item == slice(None) for item in items) else None


def _expand(view: KeyValueView, *sizes: Size) -> KeyValueView | None:
    flat_sizes = _flat(sizes)
    rows, heads, slots, width = view.base
    if view.form != _View(spread=True) or len(flat_sizes) != 5:
        return None
    expected = (rows, heads, flat_sizes[2], slots, width)
    if any(size not in (-1, target) for size, target in zip(flat_sizes, expected, strict=True)) or flat_sizes[2] < 1:
        return None
    return view._as(repeats=flat_sizes[2])


def _reshape(view: KeyValueView, *sizes: Size, shape: Sequence[int] | None = None) -> KeyValueView | None:
    """The last step of `repeat_kv`: the repeats join the heads."""
    new_shape = _flat(sizes) if shape is None else tuple(shape)
    joined = replace(view.form, spread=False)
    return view._as(spread=False) if view.form.spread and new_shape == joined.shape_of(view.base) else None


def _repeat(view: KeyValueView, repeats: object, dim: int | None = None, **kwargs: object) -> KeyValueView | None:
    if kwargs or not isinstance(repeats, int) or dim not in (1, -3) or view.form.spread or repeats < 1:
        return None
    return view._as(repeats=view.form.repeats * repeats)


def _transpose(view: KeyValueView, dim0: int = -2, dim1: int = -1) -> KeyValueView | None:
    if view.form.spread or {dim0 % 4, dim1 % 4} != {2, 3}:
        return None
    return view._as(transposed=not view.form.transposed)


def _contiguous(view: KeyValueView, **kwargs: object) -> KeyValueView | None:
    return None if kwargs else view


def _to(view: KeyValueView, *args: object, **kwargs: object) -> KeyValueView | None:
    """`to` with the data type and the device that the view has."""
    if not kwargs.keys() <= {"dtype", "device"}:
        return None
    current: tuple[object, ...] = (view.dtype, view.device, str(view.device), None)
    args = (*args, *kwargs.values())
    return view if all(not isinstance(arg, torch.Tensor) and arg in current for arg in args) else None


def _product(lhs: torch.Tensor, view: torch.Tensor) -> torch.Tensor | None:
    """Queries times transposed keys, or attention weights times values."""
    if not isinstance(view, KeyValueView) or isinstance(lhs, KeyValueView) or view.form.spread or lhs.ndim != 4:
        return None
    (rows, heads, *_), form, of_cache = view.base, view.form, view.of_one_cache
    if of_cache is None or lhs.shape[:2] != (rows, heads * form.repeats) or lhs.dtype != view.dtype:
        return None
    if lhs.shape[3] != form.shape_of(view.base)[2]:
        return None  # torch raises its own error
    grouped = group_rows(lhs.reshape(rows, heads, -1, lhs.shape[3]), of_cache.rows_per_prefix)
    product = of_cache.scores(grouped) if form.transposed else of_cache.mixed(grouped)
    product = ungroup_rows(product, of_cache.rows_per_prefix)
    return product.reshape(*lhs.shape[:3], product.shape[-1])


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
    """`scaled_dot_product_attention` for query [rows, heads, tokens, width] with grouped heads."""
    if not isinstance(key, KeyValueView) or not isinstance(value, KeyValueView) or isinstance(query, KeyValueView):
        return None
    upright = not any(view.form.spread or view.form.transposed for view in (key, value))
    keys, values = key.of_one_cache, value.of_one_cache
    if keys is None or values is None or not upright or dropout_p or is_causal:
        return None
    return segmented_attention(query, keys, values, attn_mask, scale)


def _flat(sizes: Sequence[Size]) -> tuple[int, ...]:
    return tuple(size for item in sizes for size in (item if isinstance(item, tuple | list) else [item]))


# Functions of a tensor that read its shape and the like, but no element.
_METADATA = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.is_floating_point,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
}
_IN_SEGMENTS: dict[object, Callable[..., torch.Tensor | None]] = {
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
