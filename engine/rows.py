"""Rows of everything that has rows: tensors, and the nested outputs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.utils import ModelOutput

from caches.platform.torch_api import tree_map


def index_rows(value: Any, index: torch.Tensor | slice, rows: int) -> Any:
    """`value` with the rows at `index`: a tensor of `rows` rows, or a model's outputs with such tensors.

    Anything else comes back as it is, tuples and tensors with another first dimension included.
    """

    def indexed(leaf: Any) -> Any:
        return leaf[index] if isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,) else leaf

    return tree_map(indexed, value, is_leaf=lambda part: not isinstance(part, ModelOutput))


def join_rows(parts: Sequence[ModelOutput]) -> ModelOutput:
    """The outputs of all rows from those of consecutive groups of rows. Caches are left out."""
    if len(parts) == 1:
        return parts[0]
    without = [{name: value for name, value in part.items() if "past" not in name} for part in parts]
    joined = tree_map(_joined, *without)
    return type(parts[0])(**joined)


def _joined(first: Any, *others: Any) -> Any:
    """One leaf of every group: tensors without rows are the same in all groups."""
    if not isinstance(first, torch.Tensor):
        return None
    return torch.cat([first, *others]) if first.ndim else first
