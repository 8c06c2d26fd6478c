"""Ways to break the bookkeeping of a step. `pytest --damage NAME` runs tests with one of them; some test must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import isfunction
from operator import methodcaller
from typing import Any

import pytest
import torch

from caches.core import row_selection
from caches.memory.prefetch import Prefetcher
from caches.stores.dense import FixedStore, GrowingStore
from caches.stores.quantized import QuantizedStore
from caches.stores.recurrent_state import RecurrentState
from caches.stores.sink import Sinks
from caches.timeline.retention import KeepRecent
from caches.timeline.timeline import Timeline
from engine.decoding import records
from engine.model.columns import Columns
from engine.output.detokenizer import RowText
from engine.output.stop_strings import StopStrings
from engine.output.stream_buffer import StreamBuffer
from engine.request import read_request
from engine.request.inputs import checks
from strategies import Task, sampling
from strategies.beam_search import BeamState
from strategies.speculative import VerifiedText

Patch = pytest.MonkeyPatch


def shift_growing_write(patch: Patch) -> None:
    def write(self: Any, slots: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        end = max(0, self.timeline.end - 1)
        slots[:, :, end : end + new.shape[-2]] = new
        return self._visible(slots)

    patch.setattr(GrowingStore, "_write", write)


def shift_mask_sizes(patch: Patch) -> None:
    original = Timeline.mask_sizes

    def sizes(self: Timeline, tokens: int, unsettled: int = 0) -> tuple[int, Any]:
        length, offset = original(self, tokens, unsettled)
        return length, offset + (1 if offset > 0 else 0)

    patch.setattr(Timeline, "mask_sizes", sizes)


def compact_one_off(patch: Patch) -> None:
    original = GrowingStore.compact

    def compact(self: Any) -> None:
        original(self)
        self.buffer[:, :, : self.timeline.kept_tokens] = self.buffer[:, :, : self.timeline.kept_tokens].roll(1, dims=2)

    patch.setattr(GrowingStore, "compact", compact)


def keep_states_as_they_were(patch: Patch) -> None:
    """A step that writes its states in place writes into a copy."""
    patch.setattr(RecurrentState, "get", lambda self, key: self._used(key).clone() if key in self._known else None)
    # What models of transformers 5.17 ask for.
    numbered = RecurrentState.numbered
    patch.setattr(
        RecurrentState,
        "numbered",
        lambda self, kind: {number: state.clone() for number, state in numbered(self, kind).items()},
    )


def read_the_encoder_of_another_row(patch: Patch) -> None:
    committed = GrowingStore.committed

    def of_another_row(self: Any) -> torch.Tensor | None:
        held = committed(self)
        return None if held is None else held.roll(1, dims=0)

    patch.setattr(GrowingStore, "committed", of_another_row)


def hand_over_one_token_more(patch: Patch) -> None:
    original = Timeline.adopt

    def adopt(self: Timeline, seen: int, held: int | None, rows: int) -> None:
        original(self, seen, held, rows)
        self.total_tokens += 1

    patch.setattr(Timeline, "adopt", adopt)


def accept_every_proposal(patch: Patch) -> None:
    original = VerifiedText._choose

    def choose(
        self: VerifiedText, scores: torch.Tensor, proposed: torch.Tensor | None, q: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, accepted = original(self, scores, proposed, q)
        return (chosen, accepted) if proposed is None else (proposed, torch.ones_like(accepted))

    patch.setattr(VerifiedText, "_choose", choose)


def keep_the_worst_beams(patch: Patch) -> None:
    def choose(self: Any, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = scores.topk(self._candidates + 1)
        return best.values[:, 1:], best.indices[:, 1:]

    patch.setattr("strategies.beam_search.BeamState._choose", choose)


def read_pads_of_one_row_as_tokens(patch: Patch) -> None:
    original = read_request._inferred_mask

    def inferred(model: Any, ids: torch.Tensor, config: Any) -> torch.Tensor:
        return torch.ones_like(ids) if len(ids) == 1 else original(model, ids, config)

    patch.setattr(read_request, "_inferred_mask", inferred)


def count_end_ids_once(patch: Patch) -> None:
    original = BeamState.__init__

    def counted(self: BeamState, task: Task, *rest: Any) -> None:
        original(self, replace(task, candidates_per_beam=max(2, 1 + len(set(task.eos_ids)))), *rest)

    patch.setattr(BeamState, "__init__", counted)


def draw_once_more(patch: Patch) -> None:
    original = sampling._draw

    def drawn(scores: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        return original(scores)

    patch.setattr(sampling, "_draw", drawn)


def forget_processors_of_the_call(patch: Patch) -> None:
    original = read_request.processing
    patch.setattr(read_request, "processing", lambda *given: original(*given[:-2], None, given[-1]))


def forget_parameters_that_apply(patch: Patch) -> None:
    """They are refused, as if they were of another strategy."""
    patch.setattr(checks, "_ALWAYS_APPLY", checks._ALWAYS_APPLY - {"min_new_tokens", "repetition_penalty"})


def record_no_attentions(patch: Patch) -> None:
    patch.setitem(records._FIELDS, "attentions", ("output_attentions", ("no attentions",)))


def record_states_of_the_last_token_alone(patch: Patch) -> None:
    original = records.Records.add_forward

    def record(self: Any, *given: Any) -> None:
        original(self, *given)
        states = self._values.get("hidden_states")
        if states:
            states[-1] = tuple(layer[:, -1:] for layer in states[-1])

    patch.setattr(records.Records, "add_forward", record)


# What takes the place of a method.
REPLACED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "keep_one_column_less": (KeepRecent, "surviving", lambda self, tokens: min(tokens, self.size - 1)),
    "read_pads_into_states": (Columns, "mask", lambda self, columns: None),
    "take_back_what_was_overwritten": (
        Timeline, "can_roll_back", lambda self, tokens: self.total_tokens >= tokens,
    ),
    "leave_rows_where_they_are": (FixedStore, "select_rows", lambda self, index: None),
    "fork_rows_in_turn": (row_selection, "repeated", lambda rows, times: torch.arange(max(0, rows)).repeat(times)),
    "forget_no_staged_columns": (Prefetcher, "discard", lambda self, reader: None),
    "show_half_stop_strings": (StopStrings, "begun", lambda self, text: 0),
    "look_for_stop_strings_in_new_text_alone": (RowText, "_end_of", lambda self, *given: ""),
    "leave_streams_where_they_are": (StreamBuffer, "_reorder", lambda self, index: None),
}  # fmt: skip
# What is done around a method: the function gets it and its arguments.
CHANGED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "shift_write_index": (Timeline, "write_index", lambda call, *given: (call(*given) - 1).clamp(min=0)),
    "shift_mask": (Columns, "mask", lambda call, *given: call(*given).roll(1, dims=1)),
    "shift_step_mask": (Columns, "step_mask", lambda call, *given: call(*given).roll(1, dims=3)),
    # All positions shifted together change nothing under rotary embeddings; these drift from the prompt's.
    "shift_decode_positions": (
        Columns, "positions", lambda call, self, begin, end: call(self, begin, end) + (begin > 0),
    ),
    "shift_what_a_convolution_reads": (
        RecurrentState, "append_conv", lambda call, *given: call(*given).roll(1, dims=-1),
    ),
    "forget_states": (RecurrentState, "set", lambda call, self, key, state: call(self, key, torch.zeros_like(state))),
    "keep_what_was_dropped": (Timeline, "commit", lambda call, self, rejected=0: call(self, 0)),
    "take_back_one_too_few": (Timeline, "roll_back", lambda call, self, tokens: call(self, max(0, tokens - 1))),
    "encode_one_column_early": (
        QuantizedStore, "_encode",
        lambda call, self, columns, column, block: call(self, columns, max(0, column - 1), block),
    ),
    "turn_sinks_too_far": (Sinks, "delta", lambda call, *given: call(*given) + 1),
}  # fmt: skip


def _changed(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    call = getattr(owner, name)
    patch.setattr(owner, name, lambda *given, **named: change(call, *given, **named))


DAMAGES: dict[str, Callable[[Patch], None]] = {
    **{
        name: each
        for name, each in globals().items()
        if isfunction(each) and each.__module__ == __name__ and not name.startswith("_")
    },
    **{name: methodcaller("setattr", *parts) for name, parts in REPLACED.items()},
    **{name: lambda patch, parts=parts: _changed(patch, *parts) for name, parts in CHANGED.items()},
}
