"""Ways to break the bookkeeping of a step. `pytest --damage NAME` runs tests with one of them; some test must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from caches.memory.prefetch import Prefetcher
from caches.stores.dense import FixedStore, GrowingStore
from caches.stores.quantized import QuantizedStore
from caches.stores.recurrent_state import RecurrentState
from caches.stores.sink import Sinks
from caches.timeline.timeline import Timeline
from engine.decoding import records
from engine.model.columns import Columns
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


def shift_write_index(patch: Patch) -> None:
    original = Timeline.write_index
    patch.setattr(Timeline, "write_index", lambda self, device: (original(self, device) - 1).clamp(min=0))


def shift_mask(patch: Patch) -> None:
    original = Columns.mask
    patch.setattr(Columns, "mask", lambda self, columns: original(self, columns).roll(1, dims=1))


def shift_step_mask(patch: Patch) -> None:
    original = Columns.step_mask
    patch.setattr(Columns, "step_mask", lambda self, *arguments: original(self, *arguments).roll(1, dims=3))


def shift_decode_positions(patch: Patch) -> None:
    original = Columns.positions
    # All positions shifted together change nothing under rotary embeddings; these drift from the prompt's.
    patch.setattr(Columns, "positions", lambda self, begin, end: original(self, begin, end) + (begin > 0))


def shift_mask_sizes(patch: Patch) -> None:
    original = Timeline.mask_sizes

    def sizes(self: Timeline, tokens: int, unsettled: int = 0) -> tuple[int, Any]:
        length, offset = original(self, tokens, unsettled)
        return length, offset + (1 if offset > 0 else 0)

    patch.setattr(Timeline, "mask_sizes", sizes)


def keep_one_column_less(patch: Patch) -> None:
    patch.setattr("caches.timeline.retention.KeepRecent.surviving", lambda self, tokens: min(tokens, self.size - 1))


def compact_one_off(patch: Patch) -> None:
    original = GrowingStore.compact

    def compact(self: Any) -> None:
        original(self)
        self.buffer[:, :, : self.timeline.kept_tokens] = self.buffer[:, :, : self.timeline.kept_tokens].roll(1, dims=2)

    patch.setattr(GrowingStore, "compact", compact)


def shift_what_a_convolution_reads(patch: Patch) -> None:
    original = RecurrentState.append_conv
    patch.setattr(RecurrentState, "append_conv", lambda self, *arguments: original(self, *arguments).roll(1, dims=-1))


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


def forget_states(patch: Patch) -> None:
    original = RecurrentState.set
    patch.setattr(RecurrentState, "set", lambda self, key, value: original(self, key, torch.zeros_like(value)))


def read_pads_into_states(patch: Patch) -> None:
    patch.setattr(Columns, "mask", lambda self, columns: None)


def read_the_encoder_of_another_row(patch: Patch) -> None:
    committed = GrowingStore.committed

    def of_another_row(self: Any) -> torch.Tensor | None:
        held = committed(self)
        return None if held is None else held.roll(1, dims=0)

    patch.setattr(GrowingStore, "committed", of_another_row)


def keep_what_was_dropped(patch: Patch) -> None:
    original = Timeline.commit
    patch.setattr(Timeline, "commit", lambda self, rejected=0: original(self, 0))


def take_back_one_too_few(patch: Patch) -> None:
    original = Timeline.roll_back
    patch.setattr(Timeline, "roll_back", lambda self, tokens: original(self, max(0, tokens - 1)))


def take_back_what_was_overwritten(patch: Patch) -> None:
    patch.setattr(Timeline, "can_roll_back", lambda self, tokens: self.total_tokens >= tokens)


def leave_rows_where_they_are(patch: Patch) -> None:
    patch.setattr(FixedStore, "select_rows", lambda self, index: None)


def fork_rows_in_turn(patch: Patch) -> None:
    patch.setattr("caches.core.row_selection.repeated", lambda rows, times: torch.arange(max(0, rows)).repeat(times))


def forget_no_staged_columns(patch: Patch) -> None:
    patch.setattr(Prefetcher, "discard", lambda self, reader: None)


def encode_one_column_early(patch: Patch) -> None:
    original = QuantizedStore._encode
    patch.setattr(
        QuantizedStore,
        "_encode",
        lambda self, columns, column, block: original(self, columns, max(0, column - 1), block),
    )


def turn_sinks_too_far(patch: Patch) -> None:
    original = Sinks.delta
    patch.setattr(Sinks, "delta", lambda self, *arguments: original(self, *arguments) + 1)


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


def show_half_stop_strings(patch: Patch) -> None:
    patch.setattr("engine.output.stop_strings.StopStrings.begun", lambda self, text: 0)


def leave_streams_where_they_are(patch: Patch) -> None:
    patch.setattr("engine.output.stream_buffer.StreamBuffer._reorder", lambda self, index: None)


def look_for_stop_strings_in_new_text_alone(patch: Patch) -> None:
    patch.setattr("engine.output.detokenizer.RowText._end_of", lambda self, *given: "")


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


DAMAGES: dict[str, Callable[[Patch], None]] = {
    damage.__name__: damage
    for damage in (
        shift_growing_write,
        shift_write_index,
        shift_mask,
        shift_step_mask,
        shift_decode_positions,
        shift_mask_sizes,
        keep_one_column_less,
        compact_one_off,
        shift_what_a_convolution_reads,
        keep_states_as_they_were,
        forget_states,
        read_pads_into_states,
        read_the_encoder_of_another_row,
        keep_what_was_dropped,
        take_back_one_too_few,
        take_back_what_was_overwritten,
        leave_rows_where_they_are,
        fork_rows_in_turn,
        forget_no_staged_columns,
        encode_one_column_early,
        turn_sinks_too_far,
        hand_over_one_token_more,
        accept_every_proposal,
        keep_the_worst_beams,
        show_half_stop_strings,
        leave_streams_where_they_are,
        look_for_stop_strings_in_new_text_alone,
        read_pads_of_one_row_as_tokens,
        count_end_ids_once,
        draw_once_more,
        forget_processors_of_the_call,
        forget_parameters_that_apply,
        record_no_attentions,
        record_states_of_the_last_token_alone,
    )
}
