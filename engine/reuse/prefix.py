"""`Prefix`: a prompt that was read once, for any number of continuations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from caches import EngineCache, branch, load
from engine.errors import InputError, OptionError
from engine.output.hf_streamers import ending
from engine.result import Generation
from engine.reuse.room import HasModel, with_room_for
from engine.streaming import Stream


class Generates(HasModel, Protocol):
    """A `Generator`."""

    def generate(self, inputs: Any = None, **arguments: Any) -> Generation: ...

    def stream(self, inputs: Any = None, **arguments: Any) -> Stream: ...


class Prefix:
    """The beginning of prompts, in a cache that never changes. `Generator.prefill` makes one.

    Continuations read what the cache holds where it is, as many as there are at once: see `caches.branch` for what is
    copied. Raises `InputError` where the cache has several rows, or the tokens in it are not known.

    Attributes
    ----------
    ids : torch.Tensor
        The token ids, [1, tokens].
    cache : EngineCache
        The cache. Do not give it to a call: `branch` it.
    """

    def __init__(self, generator: Generates, cache: Any):
        if not isinstance(cache, EngineCache) or cache.batch_size != 1 or cache.log is None:
            raise InputError(
                "a prefix is one prompt in a cache of this package: give one text, and a cache other than 'none'"
            )
        self._generator, self.cache = generator, cache
        self.ids = cache.log.ids[:, : cache.total_tokens]

    def __repr__(self) -> str:
        return f"Prefix({self.ids.shape[1]} tokens, cache={self.cache.name!r})"

    def __reduce__(self) -> Any:
        """Raises `TypeError`: copies and pickles would take the model with them."""
        raise TypeError(
            "a prefix has a model, and never changes: use it as often as you like; save(path) keeps it in a file"
        )

    def generate(self, inputs: Any, **parameters: Any) -> Generation:
        """Continue the prefix and `inputs`: a text, several, or token ids [rows, tokens] or lists of them.

        parameters: as of `Generator.generate`, without a cache. `Generation.sequences` begin with the prefix.
        """
        with ending(parameters.get("streamer")):
            prompt, cache = self._prompt(inputs, parameters)
        return self._generator.generate(prompt, cache=cache, **parameters)

    def stream(self, inputs: Any, **parameters: Any) -> Stream:
        """`generate`, chunk by chunk."""
        with ending(parameters.get("streamer")):
            prompt, cache = self._prompt(inputs, parameters)
        return self._generator.stream(prompt, cache=cache, **parameters)

    def save(self, path: str | Path) -> None:
        """Write it to a file: see `Cache.save`. `Generator.prefill(resume=path)` reads it."""
        self.cache.save(path, self._generator.model)  # type: ignore[attr-defined]

    def _prompt(self, inputs: Any, parameters: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
        if "cache" in parameters:
            raise OptionError("a prefix is in a cache already: leave cache= out, or give it to prefill()")
        rows = [list(row) for row in self._rows(inputs, parameters.get("tokenizer") or self._generator.tokenizer)]
        if not rows or not all(rows):
            raise InputError("a continuation is empty: every row needs a token at least")
        longest = max(map(len, rows))
        continuation = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device="cpu")
        continuation_mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device="cpu")
        prefix = self.ids.cpu().expand(len(rows), -1)
        cache: Any = branch(self.cache)  # type: ignore[type-var]
        is_ragged = len(set(map(len, rows))) > 1
        reason = self._generator.facts.why_not_padding_between(cache) if is_ragged else None
        if reason is not None:
            raise InputError(
                f"continuations of {min(map(len, rows))} to {longest} tokens: shorter ones get padding, and in "
                f"{type(self._generator.model).__name__} {reason}: give continuations of equal length, or one after "
                "the other"
            )
        ids = torch.cat([prefix, continuation], dim=1)
        mask = torch.cat([torch.ones_like(prefix), continuation_mask], dim=1)
        inputs = {"input_ids": ids, "attention_mask": mask}
        cache = with_room_for(cache, self._generator, inputs, parameters)
        if len(rows) > 1:
            cache.fork(len(rows))
        return inputs, cache

    def _rows(self, inputs: Any, tokenizer: Any) -> Sequence[Sequence[int]]:
        if isinstance(inputs, torch.Tensor):
            rows: list[list[int]] = (inputs if inputs.ndim > 1 else inputs[None]).tolist()
            return rows
        if isinstance(inputs, str):
            inputs = [inputs]
        if not isinstance(inputs, Sequence):
            raise InputError(f"continuations are texts or token ids, not a {type(inputs).__name__}")
        if inputs and isinstance(inputs[0], int):
            return [inputs]
        rows = [_tokenized(row, tokenizer) if isinstance(row, str) else row for row in inputs]
        if not all(isinstance(row, Sequence) and all(isinstance(token, int) for token in row) for row in rows):
            raise InputError(
                "continuations are texts or lists of token ids: what goes on from a chat is Generator.chat()"
            )
        return rows


def _tokenized(text: str, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        raise InputError("a text needs a tokenizer: Generator(model, tokenizer), or give token ids")
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def read_prefix(generator: Generates, path: str | Path) -> Prefix:
    """The prefix in a file. Raises `caches.CacheFileError`."""
    return Prefix(generator, load(path, generator.model))
