"""The timeline of rows that share a prefix: where prefix and suffix end, and how many rows share each prefix.

    |  prefix: committed before the fork, of each prompt  |  suffix: committed since, of each row  |  pending  |

Row i is one of `rows_per_prefix` consecutive rows that share the prefix of prompt i // rows_per_prefix. The prefix's
timeline stands still; the suffix's is a new one of the same recipe.
"""

from __future__ import annotations

from itertools import groupby
from math import gcd
from typing import Any

import torch

from caches.timeline.timeline import Placement, Timeline


class ForkedTimeline(Timeline):
    """The timeline of prefix and suffix together.

    prompts: while prefixes are being selected, the index of each new one among those there are; else None.
    was_materialized: the model needed the prefix as one tensor per row since the step began.
    """

    def __init__(self, prefix: Timeline, suffix: Timeline):
        super().__init__(prefix.retention, prefix.max_tokens, prefix.max_rows)
        self.prefix, self.suffix = prefix, suffix
        self.rows_per_prefix = self._rows_per_prefix_to_come = 1
        self.prompts: torch.Tensor | None = None
        self.was_materialized = False
        self._join()

    def _join(self) -> None:
        self.total_tokens = self.end = self.prefix.total_tokens + self.suffix.total_tokens
        self.rows = self.suffix.rows = None if self.prefix.rows is None else self.prefix.rows * self.rows_per_prefix

    def note_materialized(self) -> None:
        self.was_materialized = True

    @property
    def should_unshare(self) -> bool:
        return self.was_materialized and self.rows_per_prefix > 1

    def place(self, tokens: int) -> Placement:
        super().place(tokens)  # whether there is room for all
        placement = self.suffix.place(tokens)
        return placement._replace(room=self._of_suffix(placement.room))

    def room_for(self, tokens: int) -> int:
        return self._of_suffix(self.suffix.room_for(max(0, tokens - self.prefix.total_tokens)))

    def _of_suffix(self, room: int) -> int:
        return room if self.max_tokens is None else min(room, self.max_tokens - self.prefix.total_tokens)

    def take_room(self, room: int) -> None:
        super().take_room(room)
        self.suffix.take_room(room)

    @property
    def is_frozen(self) -> bool:
        return self.suffix.is_frozen

    def begin(self, tokens: int, placement: Placement, graph: bool) -> None:
        super().begin(tokens, placement, graph)
        self.suffix.begin(tokens, placement, graph)
        self.was_materialized = False

    def commit(self, rejected: int = 0) -> None:
        self.suffix.commit(rejected)
        super().commit(rejected)

    def close(self) -> None:
        super().close()
        self.suffix.close()

    def roll_back(self, tokens: int) -> None:
        of_suffix = min(tokens, self.suffix.total_tokens)
        self.suffix.roll_back(of_suffix)
        self.prefix.roll_back(tokens - of_suffix)
        super().roll_back(tokens)

    def before_rows(self, index: torch.Tensor) -> None:
        """Let as many rows share a prefix as all prompts have next to each other, so that few prefixes are copied."""
        if index.device.type != "cpu":  # looking at it would wait for the device: every row gets a prefix of its own
            self.prompts, self._rows_per_prefix_to_come = index.div(self.rows_per_prefix, rounding_mode="floor"), 1
            return
        prompts = [row // self.rows_per_prefix for row in index.tolist()]
        self._rows_per_prefix_to_come = gcd(*(len(list(run)) for _, run in groupby(prompts)))
        prompts = prompts[:: self._rows_per_prefix_to_come]
        stay = prompts == list(range(self.prefix.rows or 0))
        self.prompts = None if stay else torch.tensor(prompts, device=index.device)

    def before_unshare(self) -> None:
        """Every row is about to get a prefix of its own."""
        self.prompts = torch.arange(self.rows or 0, device="cpu") // self.rows_per_prefix
        self._rows_per_prefix_to_come = 1

    def after_rows(self, rows: int) -> None:
        self.rows_per_prefix, self.prompts = self._rows_per_prefix_to_come, None
        self.prefix.after_rows(rows // self.rows_per_prefix)
        self.suffix.after_rows(rows)
        super().after_rows(rows)

    @property
    def layout(self) -> tuple[object, ...]:
        return *self.prefix.layout, *self.suffix.layout

    def state_dict(self) -> dict[str, object]:
        timelines = {"prefix": self.prefix.state_dict(), "suffix": self.suffix.state_dict()}
        return timelines | {"rows_per_prefix": self.rows_per_prefix}

    def load_state_dict(self, state: dict[str, Any], rows: int) -> None:
        rows_per_prefix = state["rows_per_prefix"]
        self.prefix.load_state_dict(state["prefix"], rows // rows_per_prefix)
        self.suffix.load_state_dict(state["suffix"], rows)
        self.adopt_parts(rows_per_prefix)

    def adopt_parts(self, rows_per_prefix: int) -> None:
        """Take over the tokens of prefix and suffix, which are set already. Raises `CapacityError`."""
        self.rows_per_prefix = self._rows_per_prefix_to_come = rows_per_prefix
        self._join()
        self.room = self._of_suffix(self.suffix.room)
        super().place(0)  # whether there is room for all

    def rows_to_come(self, rows: int) -> tuple[int, int]:
        """Of the prefix, and those that share each of them, once `rows` have been chosen."""
        return rows // self._rows_per_prefix_to_come, self._rows_per_prefix_to_come
