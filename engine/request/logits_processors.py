"""Logits processors that keep something per row: they follow rows that change places and texts that are taken back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    DiaEOSDelayPatternLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    SynthIDTextWatermarkState,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from caches.platform.transformers_api import constraint_of
from engine.errors import EngineError, OptionError
from engine.request.constraints.grammar import Grammar
from strategies import repeat_rows_index


class StatefulLogitsProcessor(Protocol):
    """What a logits processor (or `prefix_allowed_tokens_fn`) has besides `__call__` to keep something per row.

    It is called with ids [rows, columns] and answers from what it knows of these columns, never from a count of its
    calls: strategies may ask about a text twice, or about several columns more than the last time. The first call of a
    run has the prompts. One object follows one run at a time. When memory was out, any processor may be asked again
    about the same token.
    """

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes row `index[i]` in what is kept. index: LongTensor [new rows] on the CPU."""

    def crop(self, columns: int) -> None:
        """Forget everything about columns after the first `columns`. Every run begins with 0: forget the rows too."""


class Processing:
    """The logits processors of a run, as its strategy calls them. prompt: its ids [rows, columns]."""

    def __init__(self, processors: Sequence[Any], prompt: torch.Tensor):
        self._prompts = len(prompt)
        self._processors = LogitsProcessorList(_from_ids_alone(processor, prompt.shape[1]) for processor in processors)
        constraints = [processor for processor in processors if isinstance(processor, PrefixConstrainedLogitsProcessor)]
        functions = [constraint_of(constraint) for constraint in constraints]
        self._stateful = [processor for processor in [*processors, *functions] if _is_stateful(processor)]
        self._last_ids: torch.Tensor | None = None  # the ids that they were called with last
        self._origins = torch.arange(self._prompts, device="cpu")  # of which prompt each row is
        self._by_place = next((processor for processor in processors if _knows_rows_by_place(processor)), None)
        self._rows_mixed = False
        self.given = tuple(processors)
        self.names = [name_of(processor) for processor in processors]
        # It was asked for, so what is NaN or infinite before is none of the engine's business.
        self.repairs = any(isinstance(processor, InfNanRemoveLogitsProcessor) for processor in processors)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._rows_mixed and self._by_place is not None:
            raise EngineError(
                f"the strategy has exchanged rows of different prompts, and {type(self._by_place).__name__} knows by "
                "its place which prompt a row is of: keep the rows of every prompt together and in order"
            )
        if self._stateful:
            self._follow(ids)
        for name, processor in zip(self.names, self._processors, strict=True):
            scores = _checked(name, processor(ids, scores), scores)
        return scores

    def culprit(self, ids: torch.Tensor, scores: torch.Tensor, is_bad: Callable[[torch.Tensor], bool]) -> str:
        """The name of the processor that makes bad scores of these, found by asking again; else those of all."""
        if len(self.names) > 1 and not is_bad(scores):  # else one has written into what it was given
            if self._stateful:
                self._follow(ids)
            for name, processor in zip(self.names, self._processors, strict=True):
                scores = processor(ids, scores)
                if is_bad(scores):
                    return name
        return " or ".join(self.names)

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i of the run becomes row `index[i]`, an index on the CPU."""
        self._origins = self._origins[index]
        self._rows_mixed = not torch.equal(self._origins, repeat_rows_index(self._prompts, len(index) // self._prompts))
        # A strategy may process some of its rows at a time. Those that are kept are then others than the index is
        # about, and `_follow` finds out how little it knows of the next.
        if self._last_ids is not None and int(index.max()) < len(self._last_ids):
            self._last_ids = self._last_ids[index.to(self._last_ids.device)]
            for processor in self._stateful:
                processor.select_rows(index)

    def _follow(self, ids: torch.Tensor) -> None:
        """Have forgotten what is not about these ids."""
        last_ids = self._last_ids
        if last_ids is not None and len(last_ids) != len(ids):
            raise EngineError(
                f"the strategy has scores of {len(ids)} rows processed after those of {len(last_ids)}, and processors "
                "that follow rows do not know which became which: yield Rows in between"
            )
        agreed = 0
        if last_ids is not None:
            columns = min(last_ids.shape[1], ids.shape[1])
            agreed = int((last_ids[:, :columns] == ids[:, :columns]).all(dim=0).long().cumprod(dim=0).sum())
        if last_ids is None or agreed < last_ids.shape[1]:
            for processor in self._stateful:
                processor.crop(agreed)
        self._last_ids = ids.clone()


def _checked(name: str, processed: Any, scores: torch.Tensor) -> torch.Tensor:
    """What a processor made of `scores` [rows, vocabulary]."""
    if not isinstance(processed, torch.Tensor):
        raise OptionError(f"{name} returned {type(processed).__name__} where the scores {list(scores.shape)} belong")
    if processed.shape != scores.shape:
        raise OptionError(
            f"{name} made scores of shape {list(processed.shape)} from scores of shape {list(scores.shape)}, so rows "
            "or tokens would get those of others: a logits processor returns [rows, vocabulary], as it is given"
        )
    return processed


def name_of(processor: object) -> str:
    """How a processor or a criterion is called in errors."""
    return getattr(processor, "__name__", type(processor).__name__)


def _is_stateful(processor: object) -> bool:
    verbs = [verb for verb in ("select_rows", "crop") if callable(getattr(processor, verb, None))]
    if len(verbs) == 1:
        raise OptionError(
            f"{type(processor).__name__} has {verbs[0]}() alone of the two methods of an "
            f"engine.StatefulLogitsProcessor: with both it "
            "follows its rows and columns, with neither it is a processor that keeps nothing"
        )
    return len(verbs) == 2


def with_own_processors(parameters: Mapping[str, object]) -> dict[str, object]:
    """The parameters of a call with copies of the processors that follow one run at a time."""
    copied = dict(parameters)
    for name in ("logits_processor", "prefix_allowed_tokens_fn"):
        processors = copied.get(name)
        if isinstance(processors, (list, tuple)):
            copied[name] = type(processors)(
                copy.deepcopy(processor) if _is_stateful(processor) else processor for processor in processors
            )
        elif processors is not None and _is_stateful(processors):
            copied[name] = copy.deepcopy(processors)
    return copied


def _knows_rows_by_place(processor: object) -> bool:
    """Whether it was made for the prompts in their order, and says something different about each."""
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        padding = processor.prompt_ignore_length
        return isinstance(padding, torch.Tensor) and len(padding.unique()) > 1
    if isinstance(processor, Grammar):
        return processor.differs
    made_for_prompts = (
        EncoderNoRepeatNGramLogitsProcessor,
        EncoderRepetitionPenaltyLogitsProcessor,
        PrefixConstrainedLogitsProcessor,
    )
    return isinstance(processor, made_for_prompts)


def _from_ids_alone(processor: object, prompt_columns: int) -> object:
    """A processor of transformers' that counts its calls, as one that does not; all others as they are."""
    if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        raise OptionError(
            "UnbatchedClassifierFreeGuidanceLogitsProcessor keeps a cache of its own, which follows no rows and takes "
            "nothing back: give guidance_scale and negative_prompt_ids to the call instead"
        )
    if isinstance(processor, DiaEOSDelayPatternLogitsProcessor):
        raise OptionError(
            "DiaEOSDelayPatternLogitsProcessor counts its calls and takes groups of rows for channels of sound, which "
            "only Dia's own generate() makes: leave it out"
        )
    return (
        _Watermark(processor, prompt_columns)
        if isinstance(processor, SynthIDTextWatermarkLogitsProcessor)
        else processor
    )


class _Watermark(LogitsProcessor):
    """The SynthID watermark without state between calls: what transformers' own remembers follows from the ids."""

    def __init__(self, watermark: SynthIDTextWatermarkLogitsProcessor, prompt_columns: int):
        self._watermark, self._prompt_columns = watermark, prompt_columns

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        mark, rows = self._watermark, len(ids)
        width = mark.ngram_len - 1
        generated = torch.nn.functional.pad(ids[:, self._prompt_columns :], (width, 0))
        contexts = generated.unfold(1, width, 1)  # [rows, calls, width], that of this call the last
        mark.state = None
        if contexts.shape[1] > 1:
            mark.state = SynthIDTextWatermarkState(rows, mark.ngram_len, mark.context_history_size, ids.device)
            mark.state.num_calls = contexts.shape[1] - 1
            mark.state.context = contexts[:, -2]  # it adds the last token itself
            marked = contexts[:, width if mark.skip_first_ngram_calls else 0 : -1]
            hashes = mark.accumulate_hash(torch.ones(marked.shape[:2], dtype=torch.long, device=ids.device), marked)
            history = torch.cat([hashes.flip(1), mark.state.context_history], dim=1)
            mark.state.context_history = history[:, : mark.context_history_size]
        return mark(ids, scores)
