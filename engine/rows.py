"""Rows of everything that has rows: tensors, and the nested outputs of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.utils import ModelOutput

from caches.platform.torch_api import tree_map


def index_rows(value: object, index: torch.Tensor | slice, rows: int) -> object:
    """`value` with the rows at `index`: a tensor of `rows` rows, or a model's outputs with such tensors.

    Anything else comes back as it is, tuples and tensors with another first dimension included.
    """

    def indexed(leaf: object) -> object:
        return leaf[index] if isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,) else leaf

    return tree_map(indexed, value, is_leaf=lambda node: not isinstance(node, ModelOutput))


def join_rows(outputs: Sequence[ModelOutput]) -> ModelOutput:
    """The outputs of all rows from those of consecutive groups of rows. Caches are left out."""
    if len(outputs) == 1:
        return outputs[0]
    without = [{name: value for name, value in group.items() if "past" not in name} for group in outputs]
    joined = tree_map(_joined, *without)
    return type(outputs[0])(**joined)


def _joined(*values: torch.Tensor | None) -> torch.Tensor | None:
    """One leaf of every group: tensors without rows are the same in all groups."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) < len(values):
        return None
    return torch.cat(tensors) if tensors[0].ndim else tensors[0]
