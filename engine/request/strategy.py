"""Which strategy a call means: the one it names, or the one that its parameters mean in transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation import GenerationMode

import strategies
from caches.platform.transformers_api import default_generation_params
from engine.errors import OptionError
from engine.request.call import Call, read
from engine.request.constraints.grammar import MOST_FORCED, Grammar
from strategies import Strategy
from strategies.operations import needs_of

_STRATEGY_OF_MODE = {
    GenerationMode.GREEDY_SEARCH: "greedy",
    GenerationMode.SAMPLE: "sampling",
    GenerationMode.BEAM_SEARCH: "beam",
    GenerationMode.BEAM_SAMPLE: "beam",
    GenerationMode.GROUP_BEAM_SEARCH: "diverse_beam",
    GenerationMode.CONTRASTIVE_SEARCH: "contrastive",
    GenerationMode.ASSISTED_GENERATION: "assisted",
}
_NOT_AVAILABLE = ("constraints", "force_words_ids", "dola_layers")


def pop_own_options(strategy: object, options: dict[str, Any]) -> dict[str, object]:
    """Those of `options` that only the named strategy has: transformers knows no such parameter."""
    names = strategies.options(strategy) if isinstance(strategy, str) else []
    parameters = GenerationConfig().to_dict()
    return {name: options.pop(name) for name in names if name in options and name not in parameters}


def choose_strategy(
    config: GenerationConfig,
    call: Call,
    options: Mapping[str, object],
    draft: PreTrainedModel | None,
    strategy_options: Mapping[str, object],
) -> Strategy:
    """The named strategy, or the one that the parameters mean in transformers.

    config: all parameters; options: those of the call; strategy_options: those that only the named strategy has.
    """
    strategy = call.strategy
    if draft is not None and config.prompt_lookup_num_tokens is not None:
        raise OptionError(
            f"assistant_model and prompt_lookup_num_tokens={config.prompt_lookup_num_tokens} both propose tokens: "
            "leave one of them out"
        )
    implied = _implied(config, draft)
    if strategy is None or isinstance(strategy, str):
        chosen = _built(call, implied, config, options, draft, strategy_options)
    else:
        chosen = strategy
    do_sample = options.get("do_sample")  # a whole configuration gives way to a strategy that the call names
    if do_sample is not None and do_sample != chosen.samples:
        raise OptionError(f"strategy={chosen.name!r} contradicts do_sample={do_sample}: leave one of them out")
    _check_draft(chosen, draft, call.assistant_tokenizer)
    config.do_sample = chosen.samples
    needs = needs_of(chosen)  # logits processors take `num_beams` rows for those of one prompt
    config.num_beams = needs.rows_at_a_time if needs.rows_are_beams else 1
    return chosen


def _implied(config: GenerationConfig, draft: PreTrainedModel | None) -> str:
    """The name of the strategy that the parameters mean in transformers. Raises `OptionError` where it is not here."""
    mode = config.get_generation_mode()
    if draft is None and mode is GenerationMode.ASSISTED_GENERATION:  # by the model's own layers: no other text
        mode = GenerationMode.SAMPLE if config.do_sample else GenerationMode.GREEDY_SEARCH
    is_plain = mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    if config.prompt_lookup_num_tokens is not None and (is_plain or mode is GenerationMode.ASSISTED_GENERATION):
        return "prompt_lookup"
    if draft is not None and is_plain:
        mode = GenerationMode.ASSISTED_GENERATION
    implied = _STRATEGY_OF_MODE.get(mode)
    if implied is None:
        asking = [name for name in _NOT_AVAILABLE if getattr(config, name, None) is not None]
        raise OptionError(
            f"{' and '.join(asking) or 'these options'} ask for {mode.value.replace('_', ' ')}, which is not "
            f"available; strategies: {', '.join(strategies.names())}"
        )
    return implied


def _built(
    call: Call,
    implied: str,
    config: GenerationConfig,
    options: Mapping[str, object],
    draft: PreTrainedModel | None,
    strategy_options: Mapping[str, object],
) -> Strategy:
    """The strategy that the call names, or `implied`, with options of the call, the model, or its defaults."""
    neutral = default_generation_params()
    chosen = call.strategy if isinstance(call.strategy, str) else implied
    values = {name: getattr(config, name, None) for name in strategies.options(chosen)}
    set_by_call = {
        name
        for name in values
        if options.get(name) is not None or getattr(call.generation_config, name, None) is not None
    }
    chosen_options = {
        name: value
        for name, value in values.items()
        if value is not None and (name in set_by_call or value != neutral.get(name))
    }
    is_contrastive = config.get_generation_mode() is GenerationMode.CONTRASTIVE_SEARCH
    if call.strategy is None and is_contrastive and "top_k" not in chosen_options:
        raise OptionError(
            f"penalty_alpha={config.penalty_alpha} asks for contrastive search, which also needs top_k, how many "
            "candidates to compare: give top_k=4, or strategy='contrastive'"
        )
    if draft is not None:  # its own configuration completes the call's
        drafts = {name: getattr(draft.generation_config, name, None) for name in set(values) - set_by_call}
        chosen_options |= {
            name: read(f"assistant_model.generation_config.{name}", value, name)
            for name, value in drafts.items()
            if "assistant" in name and value is not None
        }
    return strategies.build(chosen, **chosen_options, **strategy_options)


def _check_draft(strategy: Strategy, draft: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase) -> None:
    needs_draft = needs_of(strategy).draft
    if draft is None and (needs_draft or tokenizer is not None):
        argument = f"strategy={strategy.name!r}" if needs_draft else "assistant_tokenizer"
        raise OptionError(f"{argument} is for a draft that proposes tokens: give one as assistant_model")
    if draft is not None and not needs_draft:
        raise OptionError(
            f"assistant_model proposes tokens to greedy search and sampling, and {strategy.name} is neither: leave one "
            "of them out"
        )


def check_logprobs(top_logprobs: int | None, strategy: Strategy) -> None:
    """Refuse log probabilities of tokens where rows are no texts but candidates for them."""
    needs = needs_of(strategy)
    fewer = needs.rows_per_prompt != needs.texts_per_prompt
    if top_logprobs is not None and (fewer or needs.rows_are_beams or needs.scored_rows is not None):
        raise OptionError(
            f"top_logprobs={top_logprobs} cannot apply to {strategy.name}, whose rows are candidates that give way to "
            "others: leave it out; output_scores=True has the scores of all steps that the strategy hands over"
        )


def score_copies(strategy: Strategy, processors: Sequence[object] = ()) -> int:
    """Float32 tensors [rows, vocabulary] at the same time, at most: of the strategy, or of transformers' processors."""
    copies = needs_of(strategy).score_copies
    if not processors:
        return copies
    if any(isinstance(processor, Grammar) for processor in processors):
        copies += 2 * MOST_FORCED
    sorts = any(isinstance(processor, _SORTING) for processor in processors)
    # The input, the output of one processor and of the next; sorting adds int64 indices of twice the bytes.
    return max(copies + 1, 8 if sorts else 4)


_SORTING = (TopPLogitsWarper, TypicalLogitsWarper, MinPLogitsWarper, EtaLogitsWarper, EpsilonLogitsWarper)
