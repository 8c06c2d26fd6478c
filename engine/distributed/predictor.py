"""`Predictor`: what `map_batches` of Ray Data runs in each of its actors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs import EngineConfig
from engine.errors import OptionError
from engine.generator import Generator
from engine.serving.batch_request import BatchRequest

_MADE = ("text", "finish_reason", "new_tokens", "error")
_NO_PROMPT = (None, None, 0, "InputError: there is no prompt in this row")


class Predictor:
    """A model in an actor. Its batches are dicts of columns, and their rows run together in one queue.

        ds.map_batches(Predictor, fn_constructor_args=[path], fn_constructor_kwargs={"max_new_tokens": 64},
                       compute=ray.data.ActorPoolStrategy(size=2), batch_size=64)

    model, config: as of `Generator`. prompt: the column of prompts: texts, lists of token ids, or chat messages. The
    column "parameters", where there is one, has a dict of parameters of `engine.generate` for each row, or None; they
    come before those that all rows have. slots: rows that are computed at once. parameters: of all rows.

    Columns that are added: "text", "finish_reason", "new_tokens" and "error". With `num_return_sequences` the first two
    are lists. A row that fails, or has None for a prompt, has its error, and what was generated before; the others go
    on. Raises `OptionError`
    where a column of that name is there already, or none of prompts.
    """

    def __init__(
        self,
        model: object | str | Path,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: EngineConfig | None = None,
        prompt: str = "prompt",
        slots: int = 32,
        **parameters: Any,
    ):
        self._generator = Generator(model, tokenizer, config)
        self._prompt, self._slots, self._parameters = prompt, slots, parameters

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, object]:
        if self._prompt not in batch:
            raise OptionError(f"there is no column {self._prompt!r} among {', '.join(batch)}: name it with prompt=")
        if taken := [name for name in _MADE if name in batch]:
            raise OptionError(f"the columns {', '.join(taken)} are there already, and would be replaced: rename them")
        rows = [_plain(prompt) for prompt in batch[self._prompt]]
        own = batch.get("parameters", [None] * len(rows))
        prompts = [
            {"prompt": prompt} | {name: _plain(value) for name, value in (given or {}).items() if value is not None}
            for prompt, given in zip(rows, own, strict=True)
            if prompt is not None
        ]
        ended = self._generator.generate_many(prompts, slots=self._slots, **self._parameters)
        found = iter(sorted(ended, key=lambda request: request.index))
        values = [_NO_PROMPT if prompt is None else _values(next(found)) for prompt in rows]
        return dict(batch) | {name: _column([row[number] for row in values]) for number, name in enumerate(_MADE)}


def _plain(value: object) -> object:
    """Arrays and numbers of numpy, in which Ray keeps lists and texts, as those of Python."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _values(request: BatchRequest) -> tuple[object, object, int, str | None]:
    """The values of a row, in the order of `_MADE`."""
    error = request.error
    result = request.result() if error is None else getattr(error, "partial", None)
    said = None if error is None else f"{type(error).__name__}: {error}"
    if result is None:
        return None, None, 0, said
    is_one = len(result.tokens) == 1
    texts = [None] * len(result.tokens) if result.text is None else result.text
    return (
        texts[0] if is_one else texts,
        result.finish_reasons[0] if is_one else result.finish_reasons,
        result.stats.new_tokens,
        said,
    )


def _column(values: list[object]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
