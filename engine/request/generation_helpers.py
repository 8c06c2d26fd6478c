"""What shapes the texts of a run and ends them: processors and criteria, made by `GenerationMixin`'s own helpers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from caches.platform.as_tensor import as_tensor
from caches.platform.transformers_api import logits_processors, stopping_criteria
from engine.errors import OptionError
from engine.model.model_sizes import vocabulary_of
from engine.parallel.ranks import ranks_of
from engine.prompt import Prompt
from engine.request.call import Call
from engine.request.constraints.constraint import leave_out_own_settings, read_constraints
from engine.request.constraints.grammar import Grammar
from engine.request.inputs.encoder import Source
from engine.request.logits_processors import Processing, name_of
from engine.request.time_limit import of_all_ranks


def what_is_read(prompt: Prompt, source: Source | None) -> torch.Tensor:
    """By the encoder, if there is one: ids [rows, columns], or [rows, columns, ...] where they are not known."""
    if source is None:
        return prompt.ids if prompt.embeds is None else prompt.embeds
    # transformers stands in with ids below 0 for a source that was not given.
    is_unknown = source.inputs.ndim == 2 and bool((source.inputs < 0).any())
    return source.inputs[..., None] if is_unknown else source.inputs


def processing(
    model: PreTrainedModel,
    prompt: Prompt,
    mask: torch.Tensor,
    source: Source | None,
    config: GenerationConfig,
    scored: int,
    call_processors: Sequence | None,
    constraint: Callable | None,
) -> Processing:
    """scored: rows per prompt whose scores are processed at a time."""
    read_ids = what_is_read(prompt, source)
    mask = mask.repeat_interleave(scored, dim=0)
    if read_ids.ndim == 2:  # in transformers 5.17 a processor would take the rows of the first prompt for all prompts
        read_ids = read_ids.repeat_interleave(scored, dim=0)
    try:
        processors = logits_processors(
            model,
            config,
            input_ids_seq_length=prompt.ids.shape[1],
            encoder_input_ids=read_ids,
            logits_processor=LogitsProcessorList(call_processors or []),
            device=str(mask.device),
            model_kwargs={"attention_mask" if source is None else "decoder_attention_mask": mask},
            prefix_allowed_tokens_fn=constraint,
        )
    except (ValueError, TypeError) as error:  # an impossible temperature, ..., maybe of the model's own settings
        raise OptionError(f"transformers refuses these generation parameters: {error}") from error
    return Processing(processors, prompt.ids)


def read_grammar(
    model: PreTrainedModel,
    call: Call,
    config: GenerationConfig,
    prompt: Prompt,
    eos_ids: tuple[int, ...],
    new_tokens: int,
) -> Grammar | None:
    """The processor of what the call asks of the form of its texts. Raises `OptionError`."""
    constraints = read_constraints(call, len(prompt.ids))
    if constraints is None:
        return None
    parameter = next(constraint.said for constraint in constraints if constraint is not None)
    vocabulary = vocabulary_of(model)
    if vocabulary is None:
        raise OptionError(f"{parameter} needs to know how many tokens {type(model).__name__} has scores for")
    leave_out_own_settings(call, config, parameter)
    grammar = Grammar(constraints, call.tokenizer, vocabulary, eos_ids, prompt.ids.shape[1])
    grammar.check_length(new_tokens)
    return grammar


def ended(
    model: PreTrainedModel,
    config: GenerationConfig,
    call_criteria: Sequence | None,
    tokenizer: PreTrainedTokenizerBase,
    grammar: Grammar | None,
    stops_from: int,
) -> Callable[[], Callable[[torch.Tensor], torch.Tensor]]:
    """Called when a run begins, it gives `Task.ended`. stops_from: see `Request`."""

    def adapted(criterion: object) -> object:
        """Of the criteria that transformers makes, those that ask less than ours."""
        if isinstance(criterion, EosTokenCriteria) and grammar is not None:
            return lambda ids, scores: criterion(ids, scores) & ~grammar.belongs(ids)
        if isinstance(criterion, StopStringCriteria):
            return lambda ids, scores: criterion(ids[:, stops_from:], scores)
        return criterion

    def begin() -> Callable[[torch.Tensor], torch.Tensor]:
        begun = time.time()

        @functools.cache
        def criteria() -> Criteria:  # stop strings take a while to prepare, and only searches ask
            all_criteria = stopping_criteria(model, config, StoppingCriteriaList(call_criteria or []), tokenizer)
            default_criteria = [criterion for criterion in all_criteria if criterion not in (call_criteria or [])]
            for criterion in default_criteria:
                if isinstance(criterion, MaxTimeCriteria):  # of the run, not of its first token
                    criterion.initial_timestamp = begun
            return Criteria(
                of_all_ranks(adapted(criterion) if criterion in default_criteria else criterion, ranks_of(model))
                for criterion in all_criteria
            )

        return lambda ids: criteria()(ids, None)

    return begin


def stop_strings(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    stops = config.stop_strings or ()
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    if stops and tokenizer is None:
        raise OptionError("stop_strings are looked for in the text: pass tokenizer=..., or give the model as a path")
    if "" in stops or config.stop_strings == "":
        raise OptionError("stop_strings: an empty stop string would end every text before it begins")
    return stops


def replaces(criteria: Sequence[object] | None, criterion_class: type) -> bool:
    """Whether the caller's criteria take the place of the call's own one of this kind, as in transformers."""
    return any(type(criterion) is criterion_class for criterion in criteria or ())


class Criteria(StoppingCriteriaList):
    """Criteria whose verdicts are checked: each is bool [rows], or one for all rows."""

    def __call__(self, ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None, **kwargs: object) -> torch.Tensor:
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for criterion in self:
            ended |= _checked(name_of(criterion), criterion(ids, scores, **kwargs), len(ids)).to(ids.device)
        return ended


def _checked(name: str, verdict: object, rows: int) -> torch.Tensor:
    expected = f"the stopping criterion {name} returns whether each of {rows} rows ends, bool [{rows}]"
    try:
        ends = as_tensor(verdict)
    except (ValueError, TypeError, RuntimeError) as error:
        raise OptionError(f"{expected}, but it returned {verdict!r:.80}") from error
    if ends.is_floating_point() or ends.is_complex() or list(ends.shape) not in ([], [1], [rows]):
        raise OptionError(f"{expected}, but it returned {ends.dtype} {list(ends.shape)}")
    return ends.bool()
