"""Reads the arguments of a call into a `Request`, with the helpers of transformers' `GenerationMixin`."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    PreTrainedModel,
    StopStringCriteria,
)

from caches import EngineCache
from caches.platform.accelerate_hooks import prompt_device
from caches.platform.device_state import seeded
from caches.platform.transformers_api import (
    prepare_attention_mask,
    prepare_generated_length,
    prepare_generation_config,
    prepare_special_tokens,
    special_tokens,
)
from engine.chat_template import OPTIONS, TemplateOptions, chat_ends
from engine.errors import OptionError
from engine.model.forward_parameters import forward_parameters
from engine.model.model_sizes import vocabulary_of
from engine.parameters import PARAMETERS
from engine.prompt import EncodedPrompt, Prompt, is_chat, read_prompt
from engine.request.call import SAMPLING, Call, read_own
from engine.request.generation_helpers import (
    Criteria,
    ended,
    processing,
    read_grammar,
    replaces,
    stop_strings,
    what_is_read,
)
from engine.request.inputs.checks import (
    check_applies,
    check_embeds,
    check_ids,
    check_ids_are_known,
    check_length,
    check_mask,
    check_model,
    check_model_kwargs,
    check_pad_id,
    check_pieces,
    check_positions,
    check_said_ids,
)
from engine.request.inputs.continuation import known_mask
from engine.request.inputs.encoder import Source, read_source
from engine.request.inputs.guidance import ARGUMENTS, check_guidance, read_guidance
from engine.request.inputs.model_kwargs import complete_model_kwargs
from engine.request.lengths import Lengths
from engine.request.parameter_hints import hint
from engine.request.request import Request
from engine.request.strategy import check_logprobs, choose_strategy, pop_own_options
from strategies import Strategy
from strategies.operations import needs_of


@dataclass(frozen=True)
class _Said:
    """Arguments besides the inputs. options: those with an effect. lengths: max_length and min_length if given."""

    options: dict[str, object]
    config: GenerationConfig
    strategy: Strategy
    model_inputs: dict[str, object]
    lengths: set[str]
    negative: dict[str, object]


def read_request(
    model: PreTrainedModel,
    call: Call,
    cache: EngineCache | None,
    *,
    draft: PreTrainedModel | None,
    chunk_tokens: int | None,
) -> Request:
    """Read and check all that needs no forward. cache: the live one. Raises `InputError` and `OptionError`."""
    check_model(model)
    arguments = _read_said(model, call, draft)
    config, chosen = arguments.config, arguments.strategy
    needs = needs_of(chosen)
    check_logprobs(call.top_logprobs, chosen)
    chunk_tokens = config.prefill_chunk_size or chunk_tokens
    prompt, mask, source = _read_inputs(model, call, arguments, cache)
    name = "attention_mask" if source is None else "decoder_attention_mask"
    cached_columns = check_mask(prompt, mask, 0 if cache is None else cache.total_tokens, name)
    check_model_kwargs(model, prompt, mask)
    if source is None:
        check_pieces(prompt, chunk_tokens)
    infer_mask, tokenizer = functools.partial(_inferred_mask, model, config=config), call.tokenizer
    guidance = read_guidance(model, prompt, mask, config, arguments.negative, tokenizer, cache, infer_mask)
    inputs = prompt.model_kwargs if source is None else {}
    if guidance is None:
        prompt, mask = complete_model_kwargs(model, prompt, mask, cache, config)
    length = _read_length(model, arguments, prompt, source, call.stopping_criteria)
    total = cached_columns + prompt.columns_without_ids + length
    check_length(mask.shape[1], total)
    lengths = Lengths(cached_columns, prompt.columns_without_ids, mask.shape[1], total - mask.shape[1])
    if source is not None:  # other models need positions for the tokens that their cache shows
        check_positions(model, None, mask.shape[1], total, total - 1)
    eos, pad, _ = special_tokens(config)
    if pad is None and tokenizer is not None and tokenizer.pad_token_id is not None:
        pad = torch.tensor(tokenizer.pad_token_id, device="cpu")
    eos_ids = () if eos is None or replaces(call.stopping_criteria, EosTokenCriteria) else tuple(eos.tolist())
    if pad is not None and config.pad_token_id is None and (vocabulary := vocabulary_of(model)) is not None:
        pad = pad if 0 <= int(pad) < vocabulary else torch.zeros((), dtype=torch.long, device="cpu")
    grammar = read_grammar(model, call, config, prompt, eos_ids, lengths.new)
    stops_in_prompt = not isinstance(call.inputs, EncodedPrompt) or call.inputs.stops_in_prompt
    stops_from = 0 if stops_in_prompt else prompt.ids.shape[1]
    allowed = call.prefix_allowed_tokens_fn
    processors = [*(call.logits_processor or []), *([] if grammar is None else [grammar])]
    request = Request(
        prompt=prompt,
        mask=mask,
        lengths=lengths,
        config=config,
        strategy=chosen,
        processing=processing(model, prompt, mask, source, config, needs.rows_at_a_time, processors, allowed),
        source=source,
        guidance=guidance,
        criteria=Criteria(call.stopping_criteria or []),
        eos_ids=eos_ids,
        candidates_per_beam=max(2, 1 + (0 if eos is None else eos.numel())),  # transformers counts ids given twice
        pad_id=0 if pad is None else int(pad),
        stops_from=stops_from,
        stop_strings=() if replaces(call.stopping_criteria, StopStringCriteria) else stop_strings(config, tokenizer),
        ended=ended(model, config, call.stopping_criteria, tokenizer, grammar, stops_from),
        chunk_tokens=chunk_tokens,
        generator=seeded(call.seed, prompt_device(model)),
        grammar=grammar,
        top_logprobs=call.top_logprobs,
        inputs=inputs,
    )
    texts = len(prompt.ids) * needs.texts_per_prompt
    if texts > 1 and not request.length_is_known:
        check_pad_id(model, request.pad_id, texts)
    return request


def _read_said(model: PreTrainedModel, call: Call, draft: PreTrainedModel | None) -> _Said:
    # Arguments of transformers that are None have no effect.
    spare = set(inspect.signature(GenerationMixin.generate).parameters) | forward_parameters(model)
    options = {name: value for name, value in call.options.items() if value is not None or name not in spare}
    if options.get("synced_gpus") is False:
        del options["synced_gpus"]
    negative = {name: getattr(call, name) for name in ARGUMENTS}
    strategy_options = pop_own_options(call.strategy, options)
    config, model_inputs, lengths = _complete_config(model, call.generation_config, options)
    if is_chat(call.inputs):
        _set_chat_ends(model, call, config)
    elif names := [name for name in OPTIONS if getattr(call, name) is not None]:
        raise OptionError(
            f"{', '.join(names)}: it says how chat messages are read, and the prompt has none: leave it out"
        )
    strategy = choose_strategy(config, call, options, draft, strategy_options)
    check_applies(model, strategy, config, options)
    check_said_ids(model, config, options)
    check_guidance(model, config.guidance_scale, negative)
    return _Said(options, config, strategy, model_inputs, lengths, negative)


def _read_inputs(
    model: PreTrainedModel, call: Call, arguments: _Said, cache: EngineCache | None
) -> tuple[Prompt, torch.Tensor, Source | None]:
    """The prompt on the model's device, its mask, and the source of an encoder."""
    device, source, config, tokenizer = prompt_device(model), None, arguments.config, call.tokenizer
    options = TemplateOptions.of(call)
    if model.config.is_encoder_decoder:
        named = dict(call.inputs) if isinstance(call.inputs, Mapping) else {}
        _refuse_unknown(model, arguments.model_inputs | named)
        prompt, source = read_source(model, call.inputs, arguments.model_inputs, tokenizer, config, device, options)
    else:
        pad_id, begin = config.pad_token_id, config.bos_token_id
        prompt = read_prompt(call.inputs, arguments.model_inputs, tokenizer, begin, pad_id=pad_id, options=options)
        _refuse_unknown(model, prompt.model_kwargs)
        prompt = prompt.to(device)
        prepare_special_tokens(model, config, prompt.mask is not None, device, len(prompt.ids))
    check_embeds(model, prompt)
    check_ids(model, prompt)
    mask = prompt.mask
    if mask is None and prompt.columns_without_ids > 0:
        mask = torch.ones(len(prompt.ids), prompt.columns, dtype=torch.long, device=device)
    elif mask is None:
        cached_mask = known_mask(cache, prompt.ids)
        mask = torch.cat([cached_mask, _inferred_mask(model, prompt.ids[:, cached_mask.shape[1] :], config)], dim=1)
    return prompt, (mask != 0).long(), source


def _set_chat_ends(model: PreTrainedModel, call: Call, config: GenerationConfig) -> None:
    """Let an answer end at all ends of a chat, unless the call says where."""
    if "eos_token_id" in call.options or call.tokenizer is None:
        return
    vocabulary = vocabulary_of(model)
    ends = [
        token for token in chat_ends(call.tokenizer, config.eos_token_id) if vocabulary is None or token < vocabulary
    ]
    config.eos_token_id = ends or None


def _read_length(
    model: PreTrainedModel, arguments: _Said, prompt: Prompt, source: Source | None, criteria: Sequence[Any] | None
) -> int:
    """Columns with an id at the end of the longest run: `max_length`, or the length of a criterion of the caller that
    takes its place."""
    fed = prompt.ids if prompt.embeds is None else prompt.embeds
    prepare_generated_length(model, arguments.config, fed, prompt.ids.shape[1], arguments.lengths)
    check_ids_are_known(what_is_read(prompt, source), arguments.options)
    longest = [criterion.max_length for criterion in criteria or () if type(criterion) is MaxLengthCriteria]
    return max(arguments.config.max_length, *longest, 0)


def _complete_config(
    model: PreTrainedModel, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, object], set[str]]:
    """All parameters, the model inputs among `options`, and which of max_length and min_length were given."""
    model_values = read_own(model.generation_config, generation_config, options)
    configs = [config for config in (generation_config, model.generation_config) if config is not None]
    lengths = {
        name
        for name in ("max_length", "min_length")
        if options.get(name) is not None or any(getattr(config, name) is not None for config in configs)
    }
    # The strategy says whether there can be several texts; transformers does not know it.
    returned = options.get("num_return_sequences")
    passed = dict(options) if returned is None else options | {"num_return_sequences": 1}
    # Records are returned in any case; without this transformers warns that it may ignore them.
    if generation_config is None:
        passed["return_dict_in_generate"] = True
    else:
        generation_config = copy.copy(generation_config)
        generation_config.return_dict_in_generate = True
    # transformers warns of these without do_sample or cache_implementation; here those without effect are refused.
    later = {name: passed.pop(name) for name in _SET_LATER & set(passed) if passed[name] is not None}
    try:
        config, model_inputs = prepare_generation_config(model, generation_config, **passed)
    except (ValueError, TypeError, AttributeError) as error:  # transformers' own checks, of the model's settings too
        raise OptionError(f"transformers refuses these generation parameters: {error}") from error
    for name, value in model_values.items():
        if getattr(config, name) is not None:  # transformers drops some
            setattr(config, name, value)
    for name, value in later.items():
        setattr(config, name, value)
    if config.eos_token_id == []:  # given, so that the model's own has no effect; below, None means no end
        config.eos_token_id = None
    config.num_return_sequences = config.num_return_sequences if returned is None else returned
    for flag in ("output_attentions", "output_hidden_states"):  # kept in the config too
        model_inputs.pop(flag, None)
    return config, model_inputs, lengths


_SET_LATER = SAMPLING | {"max_cache_len"}


def _inferred_mask(model: PreTrainedModel, ids: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """The mask of a prompt without one, which transformers infers from the pad ids."""
    if ids.numel() == 0:
        return torch.ones_like(ids)
    return prepare_attention_mask(model, ids, config)


def _refuse_unknown(model: PreTrainedModel, model_kwargs: Mapping[str, object]) -> None:
    """Refuse model inputs that the model does not take, among them every misspelt parameter."""
    takes = set(forward_parameters(model)) | set(inspect.signature(model.prepare_inputs_for_generation).parameters)
    takes -= _SET_BY_THE_ENGINE
    for name in model_kwargs:
        if name in _SET_BY_THE_ENGINE:
            raise OptionError(f"{name!r} is set by the engine in every step and cannot be an input: leave it out")
        if name in takes:
            continue
        if name == "synced_gpus":
            raise OptionError(
                "synced_gpus=True is for a model that is split among processes (ZeRO-3, FSDP), which the engine does "
                "not run: leave it out"
            )
        parameters = (set(GenerationConfig().to_dict()) | PARAMETERS.keys()) - _NO_PARAMETERS
        if name in parameters:
            raise OptionError(
                f"{type(model).__name__} knows no input {name!r}, which is a parameter of the call: give it as a "
                f"keyword, generate(..., {name}=...)"
            )
        meant = hint(str(name), takes | parameters)
        raise OptionError(f"{type(model).__name__} and generate() know no input {name!r}; {meant}")


_SET_BY_THE_ENGINE = {
    "args", "kwargs", "model_kwargs", "labels", "logits_to_keep", "next_sequence_length", "is_first_iteration",
    "past_key_values", "use_cache", "cache_position", "return_dict", "output_attentions", "output_hidden_states",
    "decoder_inputs_embeds", "cache_params",
}  # fmt: skip
_NO_PARAMETERS = {"model_inputs", "transformers_version"}
