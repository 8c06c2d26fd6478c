"""What attention reads: keys or values of the rows of a cache, in segments: dense, affine-quantized, or per row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class Segment(Protocol):
    """Consecutive slots of keys or values; `width` is the size of a head."""

    @property
    def slots(self) -> int: ...

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        """For keys: queries [rows, heads, tokens, width] times keys, [rows, heads, tokens, slots]."""

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        """For values: weights [rows, heads, tokens, slots] times values, [rows, heads, tokens, width]."""

    def materialize(self) -> torch.Tensor:
        """The keys or values, [rows, heads, slots, width]. Call it last: it may overwrite the segment."""


@dataclass(frozen=True)
class DenseSegment:
    """Keys or values as they are. tensor: [rows, heads, slots, width]."""

    tensor: torch.Tensor

    @property
    def slots(self) -> int:
        return self.tensor.shape[2]

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        return queries @ self.tensor.transpose(-1, -2)

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        return weights @ self.tensor

    def materialize(self) -> torch.Tensor:
        return self.tensor


@dataclass(frozen=True)
class AffineSegment:
    """Keys or values `codes * scale + offset`, with a scale and an offset per group of channels of each slot.

    Products are computed with the codes, and scaled afterwards: there are fewer products than codes. This needs
    float32, because offsets are often larger than the values.
    """

    codes: torch.Tensor  # [rows, heads, slots, width], floating point
    scale: torch.Tensor  # [rows, heads, slots, groups]
    offset: torch.Tensor | None

    @property
    def slots(self) -> int:
        return self.codes.shape[2]

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        first_group, *other_groups = queries.chunk(self.scale.shape[-1], dim=-1)
        scores = self._scores(0, first_group)
        for group, of_group in enumerate(other_groups, 1):
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
        # A sum: a matrix product with a vector takes three times as long.
        return sums if offset is None else sums.add_((weights * offset).sum(dim=-1, keepdim=True))

    def _of_group(self, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The codes of one group, its scale and its offset, each of these [rows, heads, 1, slots]."""
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
    """A segment with keys or values per row, behind the interface of a shared prefix: see `group_rows`."""

    segment: Segment
    rows_per_prefix: int

    @property
    def slots(self) -> int:
        return self.segment.slots

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        return group_rows(self.segment.scores(ungroup_rows(queries, self.rows_per_prefix)), self.rows_per_prefix)

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        return group_rows(self.segment.mixed(ungroup_rows(weights, self.rows_per_prefix)), self.rows_per_prefix)

    def materialize(self) -> torch.Tensor:
        return self.segment.materialize()


class CacheRows(NamedTuple):
    """Keys or values of the rows of one cache, [rows, heads, slots, width] in `shape`, in segments.

    sources: where they are in memory, one after the other: tensors [rows or prompts, heads, slots, width], or rows of
    another store. make_segments: makes the segments where they are encoded. These share scratch memory: consume one
    before requesting the next, unless they are `in_codes`, for a kernel that reads all of them. rows_per_prefix:
    consecutive rows that share the sources of a prompt, see `group_rows`. on_materialize: called when a model needs an
    ordinary tensor of them.
    """

    shape: tuple[int, int, int, int]
    sources: Sequence[torch.Tensor | CacheRows] = ()
    make_segments: Callable[[], Iterable[Segment]] | None = None
    rows_per_prefix: int = 1
    in_codes: bool = False
    on_materialize: Callable[[], None] | None = None

    @staticmethod
    def of_tensor(tensor: torch.Tensor) -> CacheRows:
        """Those in one tensor [rows, heads, slots, width]."""
        rows, heads, slots, width = tensor.shape
        return CacheRows((rows, heads, slots, width), (tensor,))

    def segments(self) -> Iterable[Segment]:
        if self.make_segments is not None:
            yield from self.make_segments()
        for source in self.sources:
            segments = source.segments() if isinstance(source, CacheRows) else [DenseSegment(source)]
            if source.shape[0] * self.rows_per_prefix == self.shape[0]:
                yield from segments
            else:
                yield from (PerRowSegment(segment, self.rows_per_prefix) for segment in segments)

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        """For keys, of queries as `group_rows` makes them: see `Segment`."""
        return torch.cat([segment.scores(queries) for segment in self.segments()], dim=-1)

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        """For values, of weights as `group_rows` makes them: see `Segment`."""
        out, begin = weights.new_zeros((*weights.shape[:3], self.shape[3])), 0
        for segment in self.segments():
            out += segment.mixed(weights[..., begin : begin + segment.slots])
            begin += segment.slots
        return out

    def write_to(self, out: torch.Tensor) -> None:
        """Write them to the last slots of `out` [rows, heads, slots, width]."""
        begin = out.shape[2] - self.shape[2]
        for segment in self.segments():
            dense = segment.materialize()
            target = out[:, :, begin : begin + segment.slots]
            target.unflatten(0, (len(dense), -1))[:] = dense[:, None]  # one prefix for all rows that share it
            begin += segment.slots


class OpenRows(NamedTuple):
    """What attention of a layer reads of the rows of one cache, in a step that has not written their last slots yet.

    segments: keys and values, [rows or prompts, heads, slots, width], with the first slot and the one after the last.
    They follow one another; consecutive rows share those of a prompt, which come first.
    """

    segments: Sequence[tuple[torch.Tensor, torch.Tensor, int, int]]

    @property
    def rows(self) -> int:
        return self.segments[-1][0].shape[0]

    @property
    def slots(self) -> int:
        return sum(end - begin for _, _, begin, end in self.segments)


def group_rows(of_rows: torch.Tensor, rows_per_prefix: int) -> torch.Tensor:
    """[rows, heads, tokens, ...] as [prompts, heads, rows_per_prefix * tokens, ...].

    `rows_per_prefix` consecutive rows share a prefix: as queries of one row, they read its keys and values once.
    """
    return (
        of_rows if rows_per_prefix == 1 else of_rows.unflatten(0, (-1, rows_per_prefix)).transpose(1, 2).flatten(2, 3)
    )


def ungroup_rows(of_prompts: torch.Tensor, rows_per_prefix: int) -> torch.Tensor:
    """The inverse of `group_rows`."""
    if rows_per_prefix == 1:
        return of_prompts
    return of_prompts.unflatten(2, (rows_per_prefix, -1)).transpose(1, 2).flatten(0, 1)
