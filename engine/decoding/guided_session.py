"""`GuidedSession`: the model session of a run with classifier-free guidance (see `engine.request.inputs.guidance`)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers.utils import ModelOutput

from caches import TokenLog
from caches.platform.out_of_memory import recovering
from caches.platform.torch_api import tree_map
from engine.decoding.model_session import ModelSession
from engine.request.inputs.guidance import Guidance


class GuidedSession(ModelSession):
    """A session of the prompts alone, with guided logits, of which the model computes the other texts too.

    guidance: see `engine.request.inputs.guidance`. arguments: of a `ModelSession` of both texts.
    """

    def __init__(self, guidance: Guidance, *arguments: Any):
        super().__init__(*arguments)
        self._scale, self._lead = guidance.scale, guidance.lead
        self._others = guidance.prompt.ids.chunk(2)[1]  # the first ids of the other texts, [rows, columns]

    @property
    def fed(self) -> int:
        return max(0, self._ids.count - self._lead)

    def forward(
        self,
        tokens: torch.Tensor,
        hidden: bool = False,
        all_logits: bool = False,
        computed: ModelOutput | None = None,
    ) -> tuple[ModelOutput, torch.Tensor | None]:
        """See `ModelSession.forward`. The outputs have the prompts' rows alone, and also `unguided_logits`."""
        rows, columns = tokens.shape
        outputs, states = super().forward(self._of_both(tokens), hidden, all_logits, computed)
        for name in ("attentions", "hidden_states"):
            if name in outputs:
                outputs[name] = tree_map(lambda record: self._of_prompts(record, rows, columns), outputs[name])
        guided = self.attempt(lambda: self._guided(outputs.logits))
        outputs["unguided_logits"] = outputs.logits[:rows]
        outputs["logits"] = guided
        return outputs, None if states is None else states[:rows, -columns:]

    def prepare(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `ModelSession.prepare`: the tokens of both texts."""
        return super().prepare(self._of_both(tokens))

    def read_piece(self, tokens: torch.Tensor, max_tokens: int) -> torch.Tensor | None:
        """Both texts are read at once."""
        return None

    def _of_prompts(self, record: torch.Tensor | None, rows: int, columns: int) -> torch.Tensor | None:
        """A record of a layer, [rows, ..., columns, width], without the other texts and the padding added for them."""
        if record is None:
            return None
        return record[:rows, ..., self._lead :, :] if record.shape[-2] > columns else record[:rows]

    def _guided(self, logits: torch.Tensor) -> torch.Tensor:
        logprobs, other_logprobs = logits.float().log_softmax(dim=-1).chunk(2)
        return self._scale * (logprobs - other_logprobs) + other_logprobs

    def _of_both(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens of both texts, which differ in the columns of the prompt."""
        begin = self._ids.count
        ids = tokens if begin else pad(tokens, (self._lead, 0))
        return torch.cat([ids, self._of_others(ids, begin)])

    def _of_others(self, ids: torch.Tensor, begin: int) -> torch.Tensor:
        """The ids of the other texts in the columns of `ids` [rows, n], which begin at column `begin`."""
        other_ids = self._others[:, begin : begin + ids.shape[1]]
        return torch.cat([other_ids, ids[:, other_ids.shape[1] :]], dim=1)

    def go_back(self, fed: int) -> None:
        super().go_back(fed + self._lead if fed else 0)

    def select_rows(self, index: torch.Tensor) -> None:
        other_ids = self._others[index.to(self._others.device)]
        super().select_rows(torch.cat([index, index + len(self._others)]))
        self._others = other_ids

    def close(self, log: TokenLog) -> None:
        """End with a cache of the prompts' rows. It is empty where the prompts have columns of padding."""
        fed = self._ids.count
        if fed > 0 and self._lead == 0:
            super().close(TokenLog(torch.cat([log.ids, self._of_others(log.ids, 0)]), log.mask.repeat(2, 1)))
        else:
            if fed > 0:
                self.cache.abort()
            self.end()
        if fed == 0:
            return
        with recovering() as outcome:
            self._select_prompts(len(log.ids))
        if outcome.failure is not None:
            self.discard_cache()  # better no cache than no text

    def _select_prompts(self, rows: int) -> None:
        index, log = torch.arange(rows, device="cpu"), self.cache.log
        self.cache.select_rows(index)
        if self._lead > 0:
            self.cache.reset()
        else:
            self.cache.log = None if log is None else log.select_rows(index)
