"""`CollectedOutputs`: logits and hidden states of several forwards, put together over chunks and groups of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput

from engine.errors import EngineError


@dataclass(frozen=True)
class _Outputs:
    """Outputs of a forward that ended before column `end`, for the rows from `first` to before `last`."""

    first: int
    last: int
    end: int
    logits: torch.Tensor | None
    states: torch.Tensor | None


class CollectedOutputs:
    """hidden: collect the last hidden states of all columns. tokens: collect the logits after so many last tokens."""

    def __init__(self, hidden: bool = False, tokens: int = 1):
        self.hidden, self.tokens = hidden, tokens
        self._takes_last = tokens == 1 and not hidden  # those of the last forward, as they are
        self._outputs: list[_Outputs] = []

    def of(self, rows: slice) -> Callable[[ModelOutput, int], None] | None:
        """A function that takes outputs and the column they end before; None where the last ones are enough."""
        if self._takes_last:
            return None

        def collect(outputs: ModelOutput, end: int) -> None:
            logits = outputs.logits if self.tokens > 1 else None
            states = last_hidden(outputs) if self.hidden else None
            self._outputs.append(_Outputs(rows.start, rows.stop, end, logits, states))

        return collect

    def discard(self, rows: slice, total_tokens: int) -> None:
        """Discard what forwards of these rows returned for columns behind `total_tokens`: they were rolled back."""
        if self._takes_last:
            return
        within = [entry for entry in self._outputs if rows.start <= entry.first and entry.last <= rows.stop]
        self._outputs = [entry for entry in self._outputs if entry not in within or entry.end <= total_tokens]

    def complete(self, rows: slice, outputs: ModelOutput) -> tuple[ModelOutput, torch.Tensor | None]:
        """The `outputs` of the last forward of these rows, with all logits that are wanted, and the hidden states."""
        if self._takes_last:
            return outputs, None
        # Earlier forwards may have computed these rows together with others.
        matching = [entry for entry in self._outputs if entry.first <= rows.start and rows.stop <= entry.last]
        row_slices = [slice(rows.start - entry.first, rows.stop - entry.first) for entry in matching]
        if self.tokens > 1:
            logits = [
                entry.logits[row_slice]
                for entry, row_slice in zip(matching, row_slices, strict=True)
                if entry.logits is not None
            ]
            outputs["logits"] = _last_logits(logits, self.tokens)
        states = [
            entry.states[row_slice]
            for entry, row_slice in zip(matching, row_slices, strict=True)
            if entry.states is not None
        ]
        return outputs, torch.cat(states, dim=1) if self.hidden else None


def _last_logits(logits: list[torch.Tensor], tokens: int) -> torch.Tensor:
    """The logits after the last `tokens` tokens, from those of consecutive forwards."""
    joined = torch.cat(logits, dim=1) if len(logits) > 1 else logits[0]
    if joined.shape[1] < tokens:
        raise EngineError(
            f"the model returns logits after {joined.shape[1]} of the last {tokens} tokens, and a strategy that "
            "proposes tokens needs all of them: use another strategy"
        )
    return joined[:, -tokens:]


def last_hidden(outputs: ModelOutput) -> torch.Tensor:
    """The last hidden states [rows, columns, width]. Raises `EngineError` for a model that returns none."""
    states = outputs.get("hidden_states") or outputs.get("decoder_hidden_states")
    if not states:
        raise EngineError("the model returns no hidden states, which this strategy compares")
    return states[-1]
