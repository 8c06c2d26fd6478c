"""`Records`: scores, logits, attentions and hidden states of a run, where the call asks for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from caches.platform.device_state import random_state, set_random_state
from caches.platform.torch_api import tree_map
from engine.result import TokenLogprob

# By field of `Generation`: the parameter that asks for it, and its names in the outputs of a forward.
_FIELDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "scores": ("output_scores", ()),
    "logits": ("output_logits", ()),
    "attentions": ("output_attentions", ("attentions", "decoder_attentions")),
    "cross_attentions": ("output_attentions", ("cross_attentions",)),
    "hidden_states": ("output_hidden_states", ("hidden_states", "decoder_hidden_states")),
}


class Records:
    """Scores and logits: one float32 tensor [rows, vocabulary] on `device` per token; the others: one per forward.

    top_logprobs: as of the call. Logits that are wanted for these alone are discarded as soon as the token is read.
    """

    def __init__(self, config: GenerationConfig, device: torch.device, top_logprobs: int | None):
        self._device, self._logits_of_step, self._top_logprobs = device, 1, top_logprobs
        self._values: dict[str, list[Any]] = {
            name: [] for name, (parameter, _) in _FIELDS.items() if getattr(config, parameter, None)
        }
        self._keeps_logits = "logits" in self._values
        if top_logprobs is not None:
            self._values.setdefault("logits", [])
        self.has_scores = "scores" in self._values

    def add_forward(self, outputs: ModelOutput, tokens: int) -> None:
        """tokens: the last ones, after which the flow gets logits."""
        self._logits_of_step = tokens
        for name, values in self._values.items():
            value = next((outputs[field] for field in _FIELDS[name][1] if field in outputs), None)
            if name == "logits":
                logits = outputs.get("unguided_logits", outputs.logits)[:, -tokens:]
                values += logits.to(self._device, torch.float32, copy=True).unbind(dim=1)
            elif value is not None:
                values.append(value)

    def add_scores(self, scores: Sequence[torch.Tensor]) -> None:
        if "scores" in self._values:
            self._values["scores"] += scores

    def scores(self, unread: int) -> tuple[torch.Tensor, ...] | None:
        """Those of all columns but the last `unread`; None where they are not recorded."""
        scores = self._values.get("scores")
        return None if scores is None else tuple(scores[: len(scores) - unread])

    def logprobs(self, column: int, tokens: list[int]) -> list[TokenLogprob] | None:
        """Those of the new token of each row; None where none are wanted. column: of the tokens, 0 is the first new."""
        if self._top_logprobs is None:
            return None
        logprobs = self._values["logits"][column].log_softmax(dim=-1)
        if not self._keeps_logits:
            self._values["logits"][column] = None
        chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
        best, ids = logprobs.topk(min(self._top_logprobs, logprobs.shape[1]))
        top = [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), best.tolist(), strict=True)]
        return [TokenLogprob(*row) for row in zip(tokens, chosen, top, strict=True)]

    def lengths(self) -> dict[str, int]:
        return {name: len(values) for name, values in self._values.items()}

    def truncate(self, lengths: dict[str, int]) -> None:
        """Discard what came after the records had these lengths."""
        for name, length in lengths.items():
            del self._values[name][length:]

    def reject_logits(self, tokens: int) -> None:
        """Discard the logits after the last `tokens` tokens of the last forward."""
        logits = self._values.get("logits", [])
        del logits[len(logits) - min(tokens, self._logits_of_step) :]

    def keep_logits(self, tokens: int) -> None:
        """Discard the logits of all but the first `tokens` new tokens."""
        del self._values.get("logits", [])[tokens:]

    def row_selection(self, index: torch.Tensor, rows: int) -> Callable[[], None]:
        """A function that makes row i row `index[i]` (on the CPU), and cannot fail. rows: how many there are."""
        selected, last_values = index.to(self._device), {}
        if len(index) > rows:
            for name, values in self._values.items():
                if values and name != "scores":
                    last_values[name] = tree_map(lambda record: record[selected], values[-1])

        def select() -> None:
            for name, value in last_values.items():
                self._values[name][-1] = value

        return select

    def fields(self) -> dict[str, Any]:
        """The fields of a `Generation`."""
        fields = {name: values for name, values in self._values.items() if name != "logits" or self._keeps_logits}
        return {name: tuple(values) for name, values in fields.items()}


_Checkpoint: TypeAlias = tuple[dict[str, int], torch.Tensor | None]
"""The lengths of the records and the state of the random numbers; None where the strategy does not draw."""


class Checkpoints:
    """The states of a run after each unread column. draws: whether the strategy draws random numbers."""

    def __init__(self, records: Records, device: torch.device, generator: torch.Generator | None, draws: bool):
        self._records, self._device, self._generator, self._draws = records, device, generator, draws
        self._unread: deque[_Checkpoint] = deque()
        self._read = self._now()

    def _now(self) -> _Checkpoint:
        state = random_state(self._device, self._generator) if self._draws else None
        return self._records.lengths(), state

    def add(self) -> None:
        """A column was written."""
        self._unread.append(self._now())

    def read(self) -> None:
        """The first unread column was read."""
        if self._unread:
            self._read = self._unread.popleft()

    def roll_back(self) -> None:
        """Return to the state after the column read last."""
        written = self._unread[-1][1] if self._unread else None
        self._unread.clear()
        lengths, state = self._read
        self._records.truncate(lengths)
        # Not where other code has drawn since: it would get the same numbers again.
        now = random_state(self._device, self._generator)
        if state is not None and written is not None and torch.equal(now, written):
            set_random_state(state, self._device, self._generator)
