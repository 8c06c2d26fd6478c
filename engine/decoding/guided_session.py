"""`GuidedSession`: the model session of a run with classifier-free guidance (see `engine.request.guidance`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.functional import pad
from torch.utils._pytree import tree_map
from transformers.utils import ModelOutput

from caches import EngineCache, TokenLog
from caches.out_of_memory import is_out_of_memory
from engine.decoding.model_session import ModelSession
from engine.request.guidance import Guidance

T = TypeVar("T")


class GuidedSession:
    """A `ModelSession` of both texts that looks like one of the prompts' alone, with guided logits."""

    def __init__(self, session: ModelSession, guidance: Guidance):
        self._lane, self._scale, self._lead = session, guidance.scale, guidance.lead
        self._others = guidance.prompt.ids.chunk(2)[1]  # what the other texts begin with, [rows, columns]

    @property
    def cache(self) -> EngineCache:
        return self._lane.cache

    @property
    def linears(self) -> str:
        return self._lane.linears

    @property
    def fed(self) -> int:
        return max(0, self._lane.fed - self._lead)

    @property
    def fed_ids(self) -> torch.Tensor:
        return self._lane.fed_ids.chunk(2)[0][:, self._lead :]

    def forward(self, tokens: torch.Tensor, *wanted: Any, **more: Any) -> tuple[ModelOutput, torch.Tensor | None]:
        """As `ModelSession.forward`. The outputs are those of the prompts' rows, with their logits as `unguided_logits`
        too.
        """
        rows, columns = tokens.shape
        outputs, states = self._lane.forward(self._beside(tokens), *wanted, **more)
        for name in ("attentions", "hidden_states"):
            if name in outputs:
                outputs[name] = tree_map(lambda part: self._of_prompts(part, rows, columns), outputs[name])
        guided = self._lane.attempt(lambda: self._guided(outputs.logits))
        outputs["unguided_logits"] = outputs.logits[:rows]
        outputs["logits"] = guided
        return outputs, None if states is None else states[:rows, -columns:]

    def _of_prompts(self, part: torch.Tensor | None, rows: int, columns: int) -> torch.Tensor | None:
        """A record of a layer, [rows, ..., columns, width], without the other texts and the pads that make them fit."""
        if part is None:
            return None
        return part[:rows, ..., self._lead :, :] if part.shape[-2] > columns else part[:rows]

    def _guided(self, logits: torch.Tensor) -> torch.Tensor:
        own, other = logits.float().log_softmax(dim=-1).chunk(2)
        return self._scale * (own - other) + other

    def attempt(self, work: Callable[[], T], repeats: Callable[[], bool] = lambda: True) -> T:
        return self._lane.attempt(work, repeats)

    def _beside(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens of both texts: the others have columns of their own as far as the prompt goes."""
        begin = self._lane.fed
        own = tokens if begin else pad(tokens, (self._lead, 0))
        return torch.cat([own, self._in_place_of(own, begin)])

    def _in_place_of(self, own: torch.Tensor, begin: int) -> torch.Tensor:
        """`own` [rows, n], which begin in column `begin`, with what the other texts have there."""
        known = self._others[:, begin : begin + own.shape[1]]
        return torch.cat([known, own[:, known.shape[1] :]], dim=1)

    def commit(self, rejected: int = 0) -> None:
        self._lane.commit(rejected)

    def go_back(self, fed: int) -> None:
        self._lane.go_back(fed + self._lead if fed else 0)

    def select_rows(self, index: torch.Tensor) -> None:
        others = self._others[index.to(self._others.device)]
        self._lane.select_rows(torch.cat([index, index + len(self._others)]))
        self._others = others

    def forget(self) -> None:
        self._lane.forget()

    def close(self, log: TokenLog) -> None:
        """End with a cache of the prompts' rows. With columns that are not the prompts' own it has to be empty."""
        session, fed = self._lane, self._lane.fed
        if fed > 0 and self._lead == 0:
            session.close(TokenLog(torch.cat([log.ids, self._in_place_of(log.ids, 0)]), log.mask.repeat(2, 1)))
        else:
            if fed > 0:
                self.cache.abort()
            session.end()
        if fed == 0:
            return
        own, known = torch.arange(len(log.ids)), self.cache.log
        try:
            self.cache.select_rows(own)
            if self._lead > 0:
                self.cache.reset()
            else:
                self.cache.log = None if known is None else known.select_rows(own)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            session.forget()  # better no cache than no text
