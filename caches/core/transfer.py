"""The one transfer of content between caches, holder by holder: a holder is a store, or the states of a layer.

The rows of all sources, one after the other, become those of the targets, one after the other. A copy leaves the
sources as they are. A move frees what has arrived where it was, so no more than about one layer is there twice, and it
can be undone. Codes stay as they are where both have the same storage format; else tokens go over in full precision.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

from caches.attention.kv_view import plain
from caches.core.implicit_steps import ImplicitSteps
from caches.core.layer import Layer, TensorHolder
from caches.core.layer_stack import LayerStack
from caches.core.wrapped_layer import WrappedLayer
from caches.errors import StepError
from caches.protocol import TokenLog
from caches.stores.recurrent_state import RecurrentState
from caches.stores.store import Store, chosen_rows, joined_rows
from caches.timeline.retention import KeepSinks
from caches.timeline.shared_timeline import ForkedTimeline
from caches.timeline.timeline import Timeline

_DENSE = "dense"  # the name of tokens in full precision


class LayeredCache(Protocol):
    """A cache of one or two stacks of layers: `Cache`, `EncoderDecoder`. implicit_steps: of each stack."""

    name: str
    log: TokenLog | None

    @property
    def max_rows(self) -> int | None: ...

    @property
    def implicit_steps(self) -> tuple[ImplicitSteps, ...]: ...

    def empty_like(self: C, max_rows: int | None = None) -> C: ...

    def crop(self, tokens: int) -> None: ...

    def release(self) -> None: ...

    def finish_step(self, is_over: bool = False) -> None: ...

    def check_finished(self) -> None: ...


C = TypeVar("C", bound=LayeredCache)


@dataclass(eq=False)
class Share:
    """The same holder in all caches of a transfer.

    as_encoded: they have the same storage format. index: the rows that are chosen of the sources; None for all. moves:
    whether the sources give up what they have. source_rows, target_rows: those of each, once they are chosen.
    """

    sources: list[TensorHolder]
    targets: list[TensorHolder]
    as_encoded: bool
    index: torch.Tensor | None = None
    moves: bool = False

    def __post_init__(self) -> None:
        self.target_rows = [_rows(holder) for holder in self.targets]
        sources = self.sources
        self.source_rows = [sum(self.target_rows)] if len(sources) == 1 else [_rows(holder) for holder in sources]

    @property
    def gives_up(self) -> bool:
        """Codes that are decoded on the way would not be the same if they came back, and they are small."""
        return self.moves and (self.as_encoded or not self.sources[0].is_quantized)

    def apply(self) -> None:
        # Where nothing is left to be chosen, tensors already have the new number of rows; timelines may not yet.
        with _having_rows(self.sources, self.source_rows if self.index is None else []):
            self._hand_over(self.sources, self.targets, self.target_rows, self.index)
            for holder in self.sources if self.gives_up else ():
                holder.release()

    def undo(self) -> None:
        """After `apply`: bring back what the sources gave up."""
        if self.gives_up:
            with _having_rows(self.sources, self.source_rows):
                self._hand_over(self.targets, self.sources, self.source_rows, None)
        self.release()

    def release(self) -> None:
        """Free what has arrived."""
        for holder in self.targets:
            holder.release()

    def _hand_over(
        self,
        givers: list[TensorHolder],
        takers: list[TensorHolder],
        sizes: list[int],
        index: torch.Tensor | None,
    ) -> None:
        if self.moves and len(givers) > 1:
            RecurrentState.agree([holder for holder in givers if isinstance(holder, RecurrentState)])
        contents = [self._content(holder, takers[0].timeline.kept_tokens) for holder in givers]
        if not all(contents):  # a store that no step used holds nothing
            return
        content = contents[0] if len(contents) == 1 else joined_rows(contents)
        content = content if index is None else chosen_rows(content, index)
        contents.clear()
        for holder, rows in zip(takers, row_ranges(sizes), strict=True):
            self._load(holder, content if rows is None else chosen_rows(content, rows))

    def _content(self, holder: TensorHolder, tokens: int) -> dict[str, Any]:
        """tokens: how many the taker keeps, the last ones."""
        if isinstance(holder, RecurrentState):  # what takes back its last step cannot be in two caches
            return holder.state_dict() if self.moves else holder.dense_state()
        if isinstance(holder, WrappedLayer) or self.as_encoded:
            return holder.state_dict()
        committed = holder.committed()
        if committed is None:
            return {}
        if committed.shape[2] < tokens:
            available = committed.shape[2]
            raise StepError(f"a window of {tokens + 1} tokens needs {tokens} tokens, and {available} are there")
        return {_DENSE: plain(committed)[:, :, committed.shape[2] - tokens :]}

    def _load(self, holder: TensorHolder, content: dict[str, Any]) -> None:
        if _DENSE in content:
            cast(Store, holder).load_dense(content[_DENSE])
        elif isinstance(holder, RecurrentState) and not self.moves:
            holder.load_dense(content)
        else:
            holder.load_state_dict(content)


def plan(
    sources: Sequence[ImplicitSteps],
    targets: Sequence[ImplicitSteps],
    sizes: Sequence[int] | None = None,
    index: torch.Tensor | None = None,
    *,
    moves: bool = False,
    shares_prefixes: bool = True,
    cuts: bool = False,
) -> list[Share]:
    """What there is to hand over, one share after the other, of stacks between two steps. Nothing visible changes.

    sources: alike if there are several. targets: empty stacks, which are set to hold `sizes` rows each; None for a
    single one, which gets all of a single source. index: the rows chosen of the sources, None for all; a selection of
    the only source that failed half-way is carried out on the way. shares_prefixes: whether rows that share prefixes go
    on doing so, where they can in the targets. cuts: whether the targets keep fewer tokens. Raises `StepError` where
    they would keep others, `CapacityError` where there is no room.
    """
    source = sources[0]
    if source.stack.batch_size == -1:
        return []
    source.selection.rows_left()  # from here on it is known how many rows there will be, and which share prefixes
    sizes = [source.selection.rows_to_come] if sizes is None else sizes
    for target, count in zip(targets, sizes, strict=True):
        for timeline in target.stack.timelines:
            timeline.bind_batch_size(count)
        if shares_prefixes:
            _share_prefixes(source, target)
    waiting = {id(holder): left for holder, left in source.selection.rows_left()}
    hook_state = joined_rows([_hook_state(steps.stack, waiting) for steps in sources])
    log = _joined_log([steps.selection.log_to_come for steps in sources])
    if index is not None:
        hook_state, log = chosen_rows(hook_state, index), None if log is None else log.select_rows(index)
    for steps in sources if moves else ():
        steps.stack.scratch.release()
        _compact(steps.stack)
    for target, count, rows in zip(targets, sizes, row_ranges(sizes), strict=True):
        stack = target.stack
        stack.hook.load_state_dict(hook_state if rows is None else chosen_rows(hook_state, rows))
        stack.log = log if rows is None or log is None else log.select_rows(rows)
        alike = _alike(source.stack, stack, shares_prefixes)
        for taker, giver in zip(stack.timelines, source.stack.timelines, strict=True):
            check_sinks(giver, taker)
            _adopt(taker, giver, count, alike, cuts)
    counts = len(sources)
    return [
        Share(
            list(holders[:counts]),
            list(holders[counts:]),
            alike[holders[-1].timeline],
            waiting.get(id(holders[0])) if index is None else index,
            moves,
        )
        for holders in zip(*(_holders(steps.stack, shares_prefixes) for steps in (*sources, *targets)), strict=True)
    ]


def move(sources: Sequence[LayeredCache], shares: Sequence[Share], verb: str) -> None:
    """Hand over all shares, in their order, and leave `sources` empty; or none, then they hold what they held.

    What was decoded on the way stays as it was. Only where bringing back fails too, `sources` are left empty, with a
    `StepError`. verb: what is done with the caches, in words.
    """
    done: list[Share] = []
    failure: BaseException | None = None
    try:
        for share in shares:
            share.apply()
            done.append(share)
    except BaseException as error:
        failure = error
    if failure is None:
        for cache in sources:
            cache.release()
        return
    try:
        traceback.clear_frames(failure.__traceback__)  # they refer to what was being moved
        for half_done in shares[len(done) : len(done) + 1]:
            half_done.release()
        _bring_back(sources, done, failure, verb)
        raise failure
    finally:
        del failure  # which has this frame in its traceback


def _bring_back(sources: Sequence[LayeredCache], done: list[Share], failure: BaseException, verb: str) -> None:
    back = {id(holder) for share in done if share.gives_up for holder in share.sources}
    try:
        while done:
            done[-1].undo()
            done.pop()
    except BaseException as error:
        for cache in sources:
            cache.release()
        raise StepError(
            f"{verb} the {sources[0].name} cache failed ({type(failure).__name__}: {failure}), and so did bringing "
            f"back what had been moved ({type(error).__name__}: {error}): it is empty, all tokens have to be read again"
        ) from failure
    for steps in (steps for cache in sources for steps in cache.implicit_steps):
        waiting = steps.selection.rows_left()
        waiting[:] = [(holder, index) for holder, index in waiting if id(holder) not in back]


def check_sinks(source: Timeline, target: Timeline) -> None:
    """Raise `StepError` where one keeps the first tokens of a text whose window has moved, and the other does not."""
    retentions = source.retention, target.retention
    counts = [retention.sinks if isinstance(retention, KeepSinks) else 0 for retention in retentions]
    if source.evicted_tokens and target.retention.bound is not None and counts[0] != counts[1]:
        raise StepError(
            f"after {source.total_tokens} tokens the cache has a window and the first {counts[0]} tokens of each row, "
            f"and the other backend keeps the first {counts[1]}: give it the same num_sink_tokens, or read the text "
            "again"
        )


def row_ranges(sizes: Sequence[int]) -> Sequence[torch.Tensor | None]:
    """The rows of each of several that are one after the other; of a single one None, for all."""
    return [None] if len(sizes) == 1 else torch.arange(sum(sizes), device="cpu").split(list(sizes))


def _share_prefixes(source: ImplicitSteps, target: ImplicitSteps) -> None:
    """In the empty `target` as in `source`. Where it cannot, every row of `source` gets all its tokens for itself."""
    if not _can_share(source, target):
        source.selection.finish()
        source.selection.start(source.selection.plan_unshare())
        source.selection.finish()
        if not _can_share(source, target):
            names = source.stack.layout.name, target.stack.layout.name
            raise StepError(
                f"the {names[0]} cache encoded tokens after its rows were forked, and a {names[1]} cache that evicts "
                "what is out of a window has no place for them: convert() it, which decodes everything first"
            )
    target.selection.sharing.share_like(source.stack.timelines)


def _can_share(source: ImplicitSteps, target: ImplicitSteps) -> bool:
    pairs = zip(source.stack.timelines, target.stack.timelines, strict=True)
    can_share = target.selection.sharing.can_share
    return all(can_share(taker) for giver, taker in pairs if isinstance(giver, ForkedTimeline))


def _rows(holder: TensorHolder) -> int:
    assert holder.timeline.rows is not None
    return holder.timeline.rows


@contextmanager
def _having_rows(holders: Sequence[TensorHolder], counts: Sequence[int]) -> Iterator[None]:
    with ExitStack() as stack:
        for holder, rows in zip(holders, counts, strict=False):
            stack.callback(setattr, holder.timeline, "rows", holder.timeline.rows)
            holder.timeline.rows = rows
        yield


def _hook_state(stack: LayerStack, waiting: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    state = stack.hook.state_dict(stack.batch_size)
    for holder in stack.hook.row_holders():
        state = chosen_rows(state, waiting[id(holder)]) if id(holder) in waiting else state
    return state


def _joined_log(logs: Sequence[TokenLog | None]) -> TokenLog | None:
    known = [log for log in logs if log is not None]
    if len(known) < len(logs):
        return None
    return known[0] if len(known) == 1 else TokenLog.joined(known)


def _holders(stack: LayerStack, shares_prefixes: bool) -> list[TensorHolder]:
    """shares_prefixes: prefixes and suffixes are holders of their own; else both are one, to be read."""
    return [
        cast(TensorHolder, holder)
        for layer in stack.layers
        for holder in (layer.holders() if isinstance(layer, Layer) and not shares_prefixes else layer.row_holders())
    ]


def _alike(source: LayerStack, target: LayerStack, shares_prefixes: bool) -> dict[Timeline, bool]:
    """Of the target's timelines, whether all that follows them can be taken as it is encoded."""
    alike: dict[Timeline, bool] = {}
    pairs = zip(_holders(source, shares_prefixes), _holders(target, shares_prefixes), strict=True)
    for giver, taker in pairs:
        is_alike = giver.storage_format == taker.storage_format and type(giver.timeline) is type(taker.timeline)
        is_alike &= giver.timeline.retention == taker.timeline.retention
        alike[taker.timeline] = alike.get(taker.timeline, True) and is_alike
    return alike


def _adopt(target: Timeline, source: Timeline, rows: int, alike: Mapping[Timeline, bool], cuts: bool) -> None:
    """Let `target` count what `source` does, for `rows`."""
    if isinstance(source, ForkedTimeline) and isinstance(target, ForkedTimeline):
        prompts, rows_per_prefix = source.rows_to_come(rows)
        _adopt(target.prefix, source.prefix, prompts, alike, cuts)
        _adopt(target.suffix, source.suffix, rows, alike, cuts)
        target.adopt_parts(rows_per_prefix)
    elif alike.get(target):
        target.load_state_dict(source.state_dict(), rows)
    else:
        target.adopt(source.total_tokens, None if cuts else source.kept_tokens, rows)


def _compact(stack: LayerStack) -> None:
    """Move what is kept to the front of the buffers: what comes back after a failure is put there."""
    moved = [timeline for timeline in stack.timelines if timeline.start]
    for layer in stack.layers:
        if layer.timeline in moved:
            layer.compact()
    for timeline in moved:
        timeline.compact()
