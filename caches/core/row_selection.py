"""Row selection that can be resumed after a failed allocation.

Every holder of rows selects all of its rows or none, so a failure leaves some holders with the new rows and the others
with the rows of before. `finish` then goes on with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from caches.core.layer import RowHolder
from caches.core.layer_stack import LayerStack
from caches.core.prefix_sharing import PrefixSharing
from caches.errors import CapacityError, StepError
from caches.platform.as_tensor import as_tensor
from caches.platform.out_of_memory import recovering
from caches.protocol import TokenLog


@dataclass(eq=False)
class Choice:
    """One selection of rows: those of `index`, or every row `times` times, or all, without shared prefixes.

    deferred: an optimization that may run later. left: the holders that still have the rows of before, and the index of
    each; None until it was computed. is_counted: timelines and token log have the new rows.
    """

    index: torch.Tensor | None = None
    times: int | None = None
    unshare: bool = False
    deferred: bool = False
    left: list[tuple[RowHolder, torch.Tensor]] | None = None
    is_counted: bool = False


def repeated(rows: int, times: int) -> torch.Tensor:
    """The index that repeats each of `rows` `times` times."""
    check_times(times)
    return torch.arange(max(0, rows), device="cpu").repeat_interleave(times)


def check_times(times: int) -> None:
    if times < 1:
        raise StepError(f"fork({times}): every row has to stay at least once")


def keeps_all_rows(index: torch.Tensor, rows: int) -> bool:
    """Whether `index` is known to leave all rows where they are. An index on an accelerator is not read."""
    return len(index) == rows and index.device.type == "cpu" and index.tolist() == list(range(rows))


def checked_index(index: torch.Tensor | Sequence[int], rows: int) -> torch.Tensor:
    """`index` as LongTensor: a bool mask of the rows stands for those where it is True.

    Raises `StepError` unless it names some of `rows` rows. An index on an accelerator is not read.
    """
    index = as_tensor(index)
    is_mask = index.dtype == torch.bool
    if index.ndim != 1 or index.is_floating_point() or index.is_complex() or (is_mask and len(index) != rows):
        raise StepError(
            f"rows are selected by a tensor of integers [new rows], or a bool mask of all {rows} rows, not by "
            f"{index.dtype} {list(index.shape)}"
        )
    index = index.nonzero()[:, 0] if is_mask else index.long()
    # Reading an index on an accelerator would wait for the device.
    named = index.tolist() if index.device.type == "cpu" else [0] * len(index)
    if not named or min(named) < 0 or max(named) >= rows:
        raise StepError(f"select_rows({index.tolist()}), but the cache holds rows 0 to {rows - 1}")
    return index


class RowSelection:
    """Selects rows of everything in `stack`. `plan_*` checks and changes nothing; `start` and `finish` carry it out."""

    def __init__(self, stack: LayerStack, sharing: PrefixSharing):
        self.stack, self.sharing = stack, sharing
        self._pending: Choice | None = None

    def plan_rows(self, index: torch.Tensor) -> Choice | None:
        """Row i becomes a copy of row `index[i]`. Raises `StepError` where it cannot."""
        rows = self.stack.batch_size
        if rows == -1:
            return None
        index = checked_index(index, rows)
        self._check_room(len(index))
        return Choice(None if keeps_all_rows(index, rows) else index)

    def plan_fork(self, times: int) -> Choice | None:
        """Every row `times` times, next to each other. Raises `StepError` where there is no room for them."""
        check_times(times)
        self._check_room(self.stack.batch_size * times)
        return Choice(times=times) if self.stack.batch_size != -1 and times > 1 else None

    def plan_unshare(self) -> Choice | None:
        """Every row gets all its tokens for itself."""
        return Choice(unshare=True) if self.stack.shared_timelines else None

    def _check_room(self, rows: int) -> None:
        limit = self.stack.max_rows
        if limit is not None and rows > limit:
            raise StepError(
                f"a cache with room for {limit} rows cannot hold {rows}: build it with a larger max_batch_size, or use "
                "cache='dynamic'"
            )

    def start(self, choice: Choice | None) -> None:
        """Carry out a plan with the next `finish`. None selects all rows as they are."""
        assert self._pending is None, "check_finished() comes before a plan"
        self._pending = choice

    def discard(self) -> None:
        """Discard a selection that was started: the cache is about to be emptied."""
        self._pending = None

    def discard_deferred(self) -> None:
        """Discard what was deferred: all tokens are about to be removed."""
        if not self.unfinished:
            self.discard()

    def defer_merge(self) -> None:
        """Merge suffixes that no rows share before the next step."""
        if any(forked.rows_per_prefix == 1 for forked in self.stack.shared_timelines):
            self._pending = Choice(deferred=True)

    def finish(self) -> None:
        """Carry out what was started. When it fails it can be called again."""
        choice = self._pending
        if choice is None:
            return
        remaining = self.rows_left()
        while remaining:
            holder, index = remaining[-1]
            holder.select_rows(index)
            remaining.pop()
        if not choice.is_counted:
            rows, log = self.rows_to_come, self.log_to_come
            for timeline in self.stack.timelines:
                timeline.after_rows(rows)
            self.stack.log, choice.is_counted = log, True
        self.sharing.merge_suffixes()
        self._pending = None

    def check_finished(self) -> None:
        """Carry out what was deferred. Raises `StepError` while rows are half selected."""
        if self.unfinished:
            raise StepError(
                "the last selection of rows failed half-way, so some layers still have the rows of before: finish() "
                "goes on where it stopped, reset() empties the cache"
            )
        self.finish()

    def unshare_if_materialized(self) -> None:
        """Stop sharing if the model materialized the shared prefix in a decode step, as it would do in each.

        The step stays committed: what fails for want of memory is deferred to the next one.
        """
        if self.sharing.should_stop:
            self._pending = Choice(unshare=True, deferred=True)
            with recovering(CapacityError):
                self.finish()

    @property
    def unfinished(self) -> bool:
        """Whether a selection was started and failed: `finish` resumes it."""
        return self._pending is not None and not self._pending.deferred

    @property
    def is_pending(self) -> bool:
        """Whether `finish` has anything to do, deferred or not."""
        return self._pending is not None

    def rows_left(self) -> list[tuple[RowHolder, torch.Tensor]]:
        """The holders that have the rows of before, and the index that each selects with."""
        if self._pending is None:
            return []
        if self._pending.left is None:
            self._pending.left = self._holders(self._pending)
        return self._pending.left

    def _holders(self, choice: Choice) -> list[tuple[RowHolder, torch.Tensor]]:
        """What has to select rows, each with its index. Nothing visible changes, so it may be called again.

        Of forked rows only the suffix is listed, as long as all prompts have equally many rows next to each other. An
        index on an accelerator is not read, which would wait for the device: there every row gets a copy of its prefix.
        """
        stack = self.stack
        if choice.times is not None:
            self.sharing.share()
            choice.index = repeated(stack.batch_size, choice.times)
        if choice.index is not None:
            for timeline in stack.timelines:
                timeline.before_rows(choice.index)
        elif choice.unshare:
            for forked in stack.shared_timelines:
                forked.before_unshare()
        prompts = {forked.prefix: forked.prompts for forked in stack.shared_timelines}
        holders: list[tuple[RowHolder, torch.Tensor]] = []
        for layer in stack.layers:
            for holder in layer.row_holders():
                index = prompts.get(holder.timeline, choice.index)
                if index is not None:
                    holders.append((holder, index))
        if choice.index is not None:
            holders += [(holder, choice.index) for holder in stack.hook.row_holders()]
        return holders

    @property
    def rows_to_come(self) -> int:
        """Rows there are once `finish` has come to its end."""
        index = self._index_to_come
        return self.stack.batch_size if index is None else len(index)

    @property
    def log_to_come(self) -> TokenLog | None:
        """The token log once `finish` has come to its end."""
        log, index = self.stack.log, self._index_to_come
        return log if log is None or index is None else log.select_rows(index)

    @property
    def _index_to_come(self) -> torch.Tensor | None:
        return None if self._pending is None or self._pending.is_counted else self._pending.index
