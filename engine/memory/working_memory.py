"""How the bytes that a forward works with follow from its tokens and columns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PerToken:
    """Bytes of a step that grow with its tokens. token: per token of the step. pair: per token and column it attends
    to, where attention stores its scores or a mask."""

    token: float
    pair: float

    @classmethod
    def through(cls, few: tuple[int, int], many: tuple[int, int]) -> PerToken:
        """From two first steps: the tokens of each and its bytes."""
        pair = max(0.0, (many[1] / many[0] - few[1] / few[0]) / (many[0] - few[0]))
        return cls(many[1] / many[0] - pair * many[0], pair)

    def of_step(self, tokens: int, columns: int) -> float:
        return self.token * tokens + self.pair * tokens * columns


@dataclass(frozen=True)
class MaskedSteps:
    """Bytes of steps that need a mask because a window ends within their columns.

    window: tokens of the largest window. only_windows: whether no layer reads more columns than its window. long,
    very_long: of steps of such lengths. What takes the most is another part of the forward in each, so the greater
    counts. copies: in addition where there were columns before the step, which the layers copy if all have a window.
    """

    window: int
    only_windows: bool
    long: PerToken
    very_long: PerToken
    copies: float = 0

    def of_step(self, tokens: int, columns: int) -> float:
        visible = min(columns, self.window + tokens) if self.only_windows else columns
        copies = self.copies if columns > tokens else 0
        return copies + max(per_token.of_step(tokens, visible) for per_token in (self.long, self.very_long))


@dataclass(frozen=True)
class WorkingMemory:
    """Bytes that a forward allocates at its peak for one row, without weights, the cache and the last logits.

    plain: of steps that need no mask. masked: of those that need one; None without windows. column: per column that a
    layer reads and that was in the cache before the step; column_of_one: the same in a step of one token.
    """

    plain: PerToken
    column: float = 0
    column_of_one: float = 0
    masked: MaskedSteps | None = None

    def of_step(self, rows: int, tokens: int, columns: int) -> int:
        """A step of `tokens` tokens per row that attends to `columns` columns, its own included."""
        steps = self.plain if self.masked is None or columns < self.masked.window else self.masked
        return int(rows * (steps.of_step(tokens, columns) + self.column * (columns - tokens)))

    def of_one_token(self, rows: int, distinct_rows: int, columns: int) -> int:
        """A step of one token per row. distinct_rows: how often columns are read, which rows of a prompt may share."""
        return int(rows * self.plain.of_step(1, columns) + distinct_rows * self.column_of_one * columns)
