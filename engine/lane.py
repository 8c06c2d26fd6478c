"""One model's side of a run: its cache, the mask and positions of its columns, and what it was fed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers.utils import ModelOutput

from caches import Driven, ForeignCache, Log
from engine.encoder import index_rows, source_of
from engine.errors import EngineError, InputError
from engine.extras import ENCODED, extend_extras
from engine.masks import Columns
from engine.runner import Runner


class Lane:
    """columns: all of the run. before: how many of them the cache holds of tokens that are not given again.

    embeds: those of the prompt's columns after `before`, None when ids are fed. unnamed: how many of them have no id.
    extras: further model inputs. flags: output_attentions and the like. chunk_tokens: see `Runner.feed`.
    """

    def __init__(
        self,
        runner: Runner,
        cache: Driven,
        columns: Columns,
        *,
        rows: int,
        before: int,
        embeds: torch.Tensor | None,
        unnamed: int,
        extras: dict[str, Any],
        flags: dict[str, bool],
        chunk_tokens: int | None,
    ):
        self.cache = cache
        self._runner, self._columns, self._before = runner, columns, before
        self._extras, self._axes = extend_extras(runner.model, extras, columns.total)
        self._flags, self._chunk_tokens = flags, chunk_tokens
        self._embeds, self._unnamed = embeds, unnamed
        # The tokens fed are written in place: a step copies no history.
        self._ids = torch.zeros(rows, columns.total - before, dtype=torch.long, device=columns.device)
        self.fed = 0  # tokens given to the model in this run, those of the open step included
        self._log_before, self._seen_before = cache.log, cache.seen
        self._step_open = self._prefilled = False

    def forward(self, tokens: torch.Tensor) -> ModelOutput:
        """Feed `tokens` [rows, n] that come after what was fed; the step stays open until `settle`."""
        self.settle()
        if self.fed == 0 and (self.cache.log is not self._log_before or self.cache.seen != self._seen_before):
            raise InputError("the cache has changed between the call and its first token: somebody else used it")
        begin = self.fed or self._unnamed
        fed = begin + tokens.shape[1]
        if fed > self._ids.shape[1]:
            raise EngineError(
                f"the strategy feeds {tokens.shape[1]} tokens after {self.fed}, but this run ends after "
                f"{self._ids.shape[1]}: it may not look further ahead than max_new_tokens"
            )
        self._ids[:, begin:fed] = tokens
        outputs = self._feed(fed, prefill=self.fed == 0)
        self._prefilled = self.fed > 0  # before this step
        self.fed, self._step_open = fed, True
        return outputs

    def _feed(self, fed: int, prefill: bool) -> ModelOutput:
        """Feed what the cache has not seen of the first `fed` tokens."""
        return self._runner.feed(
            self._ids[:, :fed],
            self._columns,
            self.cache,
            before=self._before,
            prefill=prefill,
            embeds=self._embeds,
            extras=self._extras,
            axes=self._axes,
            flags=self._flags,
            chunk_tokens=self._chunk_tokens,
        )

    def settle(self, drop: int = 0) -> None:
        """Commit the open step, if there is one, without its last `drop` tokens."""
        if not self._step_open:
            if drop:
                raise EngineError(f"Crop({drop}) has to follow a Forward")
            return
        if self.cache.can_drop(drop):
            self.cache.settle(drop)
        else:
            self._read_again(self.fed - drop)
        self._step_open = False
        self.fed -= drop

    def _read_again(self, fed: int) -> None:
        """Bring the cache back to the first `fed` tokens, where it can only take back whole steps."""
        prefill = not self._prefilled
        self.cache.abort()
        if self.cache.seen > self._before + fed:  # they were fed in several steps
            if self._before > 0:
                raise EngineError(
                    f"the {self.cache.name} cache cannot go back to {self._before + fed} tokens, and the first "
                    f"{self._before} of them were not given to be read again: give the whole conversation"
                )
            self.cache.reset()
            prefill = True
        self._feed(fed, prefill)
        self.cache.settle()

    def rows(self, index: torch.Tensor) -> None:
        """Row i becomes row `index[i]` in everything that is kept per row."""
        self.settle()
        if self.cache.handle is None and ENCODED in self._extras:
            raise EngineError("rows of a prompt with images cannot change places without a cache: use cache='dynamic'")
        self.cache.rows(index)
        self._columns.rows(index)
        rows = len(self._ids)
        self._ids = self._ids[index]
        self._embeds = None if self._embeds is None else self._embeds[index]
        self._extras = {name: index_rows(value, index, rows) for name, value in self._extras.items()}
        self._log_before = None if self._log_before is None else self._log_before.rows(index)

    def close(self, log: Log) -> None:
        """End with a cache that can be continued: there is a token that it has not seen.

        log: the run's tokens. A run that failed between a forward and the choice of the next token has fed all of them:
        the last is taken back.
        """
        if self.fed == 0:
            return
        known = self._unnamed + log.ids.shape[1]
        fed_too_far = max(0, self.fed - (known - 1)) if self._step_open else 0
        if self.cache.can_drop(fed_too_far):
            self.settle(drop=fed_too_far)
        elif isinstance(self.cache, ForeignCache):  # what it cannot take back it keeps
            self.settle()
        else:
            self.cache.abort()
        if self._unnamed > 0:
            self.cache.log = None
            return
        log = replace(log, positions=self._columns.own_positions(self._before + known), source=source_of(self._extras))
        if self._before == 0:
            self.cache.log = log
        elif self._log_before is not None:
            self.cache.log = self._log_before.first(self._before).then(log)
