"""Prompt lookup: what came after the last words when they stood in the text before is proposed once more."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from configs import require_positive
from strategies.operations import Flow, Needs, Operation, Task
from strategies.registry import register
from strategies.speculative import Proposal, VerifiedText, score_copies, speculative_loop


@register
@dataclass(frozen=True)
class PromptLookup:
    """The text is that of the model alone: greedy, or with `do_sample` drawn from its distribution.

    prompt_lookup_num_tokens: how many tokens are proposed at most. max_matching_ngram_size: how many of the last tokens
    are looked for in the row's own text, the longest first; of their places the first one counts.
    """

    name: ClassVar[str] = "prompt_lookup"
    prompt_lookup_num_tokens: int = 10
    max_matching_ngram_size: int = 2
    do_sample: bool = False

    def __post_init__(self) -> None:
        require_positive(
            self.name,
            prompt_lookup_num_tokens=self.prompt_lookup_num_tokens,
            max_matching_ngram_size=self.max_matching_ngram_size,
        )

    @property
    def samples(self) -> bool:
        return self.do_sample

    @property
    def needs(self) -> Needs:
        return Needs(score_copies=score_copies(self.prompt_lookup_num_tokens, self.samples), verifies=True)

    def flow(self, task: Task) -> Flow:
        mask = task.mask[:, task.mask.shape[1] - task.ids.shape[1] :]
        padding = [row.count(0) for row in mask.tolist()]  # per row, on the left

        def propose(text: VerifiedText) -> Generator[Operation, Any, Proposal]:
            yield from ()
            columns, ids = text.ids.shape[1], torch.cat([text.ids, text.fixed], dim=1).cpu()
            rows = []
            for row, (fixed, over) in enumerate(zip(text.counts.tolist(), text.over.tolist(), strict=True)):
                known_ids = ids[row, : columns + fixed]
                continuation = known_ids[:0] if over else self.look_up(known_ids[padding[row] :])
                rows.append(torch.cat([known_ids[columns:], continuation]))
            k = max(0, min(text.room, max(map(len, rows))))
            drafted = torch.full((len(rows), k), task.pad_id, device="cpu")
            for row, tokens in enumerate(rows):
                drafted[row, : len(tokens)] = tokens[:k]
            return Proposal(drafted.to(text.ids.device))

        return speculative_loop(task, self.samples, propose)

    def look_up(self, text: torch.Tensor) -> torch.Tensor:
        """What may come after `text` [tokens]; nothing where its end is new."""
        for size in range(min(self.max_matching_ngram_size, len(text) - 1), 0, -1):
            matches = (text[:-1].unfold(0, size, 1) == text[-size:]).all(dim=1).nonzero()
            if len(matches):
                begin = int(matches[0]) + size
                return text[begin : begin + self.prompt_lookup_num_tokens]
        return text[:0]
