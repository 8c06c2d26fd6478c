"""What attention multiplies with: columns of keys or values, as numbers or as codes that still have to be scaled, of
every row or of rows that share them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch


class Segment(Protocol):
    @property
    def columns(self) -> int: ...

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        """Of keys: their products [rows, heads, tokens, columns] with queries [rows, heads, tokens, width]."""

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        """Of values: their sums [rows, heads, tokens, width] by weights [rows, heads, tokens, columns]."""

    def materialize(self) -> torch.Tensor:
        """[rows, heads, columns, width]. The segment is of no use afterwards."""


class Attend(Protocol):
    def __call__(
        self,
        queries: torch.Tensor,
        keys: Iterable[Segment],
        values: Iterable[Segment],
        mask: torch.Tensor | None,
        width: int,
    ) -> torch.Tensor | None:
        """Attention of queries [rows, heads, tokens, width of a key], scaled already, over all segments in one go.

        mask [rows, heads, repeats, tokens of each, columns] is added to the scores. Returns [rows, heads, tokens,
        `width` of a value], or None if there are too many queries for it; then no segment was asked for.
        """


@dataclass(frozen=True)
class DenseSegment:
    held: torch.Tensor  # [rows, heads, columns, width]

    @property
    def columns(self) -> int:
        return self.held.shape[2]

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        return queries @ self.held.transpose(-1, -2)

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        return weights @ self.held

    def materialize(self) -> torch.Tensor:
        return self.held


@dataclass(frozen=True)
class AffineSegment:
    """Numbers that are `codes * scale + offset`, where neighbouring channels of a column share both.

    The codes are multiplied as they are and the few products scaled, not the many codes. That takes the precision of
    float32: an offset is taken back that is often larger than the numbers themselves.
    """

    codes: torch.Tensor  # [rows, heads, columns, width]
    scale: torch.Tensor  # [rows, heads, columns, groups]
    offset: torch.Tensor | None

    @property
    def columns(self) -> int:
        return self.codes.shape[2]

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        first, *others = queries.chunk(self.scale.shape[-1], dim=-1)
        scores = self._scores(0, first)
        for group, of_group in enumerate(others, 1):
            scores += self._scores(group, of_group)
        return scores

    def _scores(self, group: int, queries: torch.Tensor) -> torch.Tensor:
        codes, scale, offset = self._of_group(group)
        scores = (queries @ codes.transpose(-1, -2)).mul_(scale)
        return scores if offset is None else scores.addcmul_(queries.sum(dim=-1, keepdim=True), offset)

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._mixed(group, weights) for group in range(self.scale.shape[-1])], dim=-1)

    def _mixed(self, group: int, weights: torch.Tensor) -> torch.Tensor:
        codes, scale, offset = self._of_group(group)
        sums = (weights * scale) @ codes
        # Not as a product of matrices: with a single column that takes three times as long.
        return sums if offset is None else sums.add_((weights * offset).sum(dim=-1, keepdim=True))

    def _of_group(self, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Its codes, and scale and offset [rows, heads, 1, columns]."""
        codes = self.codes.chunk(self.scale.shape[-1], dim=-1)[group]
        offset = None if self.offset is None else self.offset[:, :, None, :, group]
        return codes, self.scale[:, :, None, :, group], offset

    def materialize(self) -> torch.Tensor:
        groups = self.codes.unflatten(-1, (self.scale.shape[-1], -1))
        groups.mul_(self.scale[..., None])
        if self.offset is not None:
            groups.add_(self.offset[..., None])
        return self.codes


@dataclass(frozen=True)
class PerRowSegment:
    """A segment that every row has for itself, asked for `rows_per_prefix` rows at a time: see `together`."""

    segment: Segment
    rows_per_prefix: int

    @property
    def columns(self) -> int:
        return self.segment.columns

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        return group_rows(self.segment.scores(ungroup_rows(queries, self.rows_per_prefix)), self.rows_per_prefix)

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        return group_rows(self.segment.mixed(ungroup_rows(weights, self.rows_per_prefix)), self.rows_per_prefix)

    def materialize(self) -> torch.Tensor:
        return self.segment.materialize()


def group_rows(of_rows: torch.Tensor, rows_per_prefix: int) -> torch.Tensor:
    """[rows, heads, tokens, ...] as [prompts, heads, rows_per_prefix * tokens, ...], where `rows_per_prefix`
    consecutive rows share what their prompt has: as if they were more queries of one row, for which it is read once.
    """
    return (
        of_rows if rows_per_prefix == 1 else of_rows.unflatten(0, (-1, rows_per_prefix)).transpose(1, 2).flatten(2, 3)
    )


def ungroup_rows(of_prompts: torch.Tensor, rows_per_prefix: int) -> torch.Tensor:
    """And back."""
    if rows_per_prefix == 1:
        return of_prompts
    return of_prompts.unflatten(2, (rows_per_prefix, -1)).transpose(1, 2).flatten(0, 1)
