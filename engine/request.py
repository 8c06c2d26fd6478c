"""One call's arguments, checked and put in order before any work. The only file that asks transformers'
`GenerationMixin` for its private helpers: how a `GenerationConfig` is completed, and which processors it means."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)

from caches import Driven
from engine.call import Call, parameters
from engine.checks import (
    check_applies,
    check_embeds,
    check_extras,
    check_ids,
    check_ids_are_known,
    check_length,
    check_mask,
    check_model,
    check_pads,
    check_pieces,
    check_positions,
    check_said_ids,
)
from engine.choice import choose_strategy, score_copies, scored
from engine.device_state import seeded
from engine.dispatch import prompt_device
from engine.encoder import Recover, Source, read_source
from engine.errors import OptionError
from engine.extras import complete_extras
from engine.fresh import Course
from engine.guidance import ARGUMENTS, Guidance, check_guidance, read_guidance
from engine.inputs import Prompt, read_prompt
from engine.parameters import hint
from engine.processors import Processing
from engine.session import known_mask
from engine.stopping import Stopping
from strategies import Drafts, Strategy, Task, Translation


@dataclass(frozen=True)
class Request:
    """total: columns when the run ends at the latest. before: columns the cache holds before those of `prompt`.

    source: what an encoder has read for this call. drafts, translation, generator: see `Task`.
    """

    prompt: Prompt
    mask: torch.Tensor
    before: int
    total: int
    config: GenerationConfig
    strategy: Strategy
    processing: Processing
    criteria: StoppingCriteriaList
    eos_ids: tuple[int, ...]
    pad_id: int
    stop_strings: tuple[str, ...]
    ended: Callable[[torch.Tensor], torch.Tensor]
    chunk_tokens: int | None
    use_cache: bool | None
    source: Source | None = None
    drafts: Drafts = field(default_factory=Drafts)
    translation: Translation | None = None
    guidance: Guidance | None = None
    generator: torch.Generator | None = None

    @property
    def output_flags(self) -> dict[str, bool]:
        """What the model is asked to return besides its logits."""
        return {name: True for name in ("output_attentions", "output_hidden_states") if getattr(self.config, name)}

    @property
    def source_tokens(self) -> int:
        """What is read besides the prompts, by an encoder or for guidance, pads not counted."""
        if self.source is not None:
            return self.source.tokens
        return 0 if self.guidance is None else self.guidance.other_tokens

    @property
    def rows(self) -> int:
        """Rows that those the model reads become."""
        return len(self.read[0].ids) * int(getattr(self.strategy, "branches", 1))

    @property
    def read(self) -> tuple[Prompt, torch.Tensor]:
        """What the model reads and its mask: with guidance more than the prompt."""
        return (self.prompt, self.mask) if self.guidance is None else (self.guidance.prompt, self.guidance.mask)

    @property
    def columns(self) -> int:
        """Columns that the model's side of the run has at most."""
        return self.read[1].shape[1] + self.new_tokens

    @property
    def course(self) -> Course:
        """What memory depends on."""
        outputs = self.prompt.extras.get("encoder_outputs")
        return Course(
            prompt_tokens=self.read[1].shape[1],
            new_tokens=self.new_tokens,
            prompts=len(self.read[0].ids),
            branches=int(getattr(self.strategy, "branches", 1)),
            source_tokens=0 if outputs is None else outputs[0].shape[1],
            chunk_tokens=self.chunk_tokens,
            ends_early=not self.length_is_known,
            max_cache_len=getattr(self.config, "max_cache_len", None),
            score_copies=score_copies(self.strategy, self.processing.given),
        )

    @property
    def untold(self) -> int:
        """Columns before the first one of which the id was given."""
        return self.before + self.prompt.unnamed

    @property
    def new_tokens(self) -> int:
        """Tokens a row gets at most."""
        return self.total - self.mask.shape[1]

    @property
    def task(self) -> Task:
        """What the strategy's flow gets."""
        return Task(
            ids=self.prompt.ids,
            mask=self.mask[:, self.before :],
            process=self.processing,
            ended=self.ended,
            last_column=self.total - self.untold,
            eos_ids=self.eos_ids,
            pad_id=self.pad_id,
            drafts=self.drafts,
            translation=self.translation,
            generator=self.generator,
        )

    @property
    def length_is_known(self) -> bool:
        """Whether nothing but the length can end the run."""
        return not (self.eos_ids or self.stop_strings or self.criteria or self.config.max_time is not None)

    def stopping(self) -> Stopping:
        time_criteria = StoppingCriteriaList()
        if self.config.max_time is not None:
            time_criteria.append(MaxTimeCriteria(self.config.max_time))
        return Stopping(len(self.prompt.ids), self.total - self.untold, self.eos_ids, self.criteria, time_criteria)


def read_request(
    model: PreTrainedModel,
    call: Call,
    tokenizer: Any,
    cache: Driven | None,
    *,
    assistant: PreTrainedModel | None,
    chunk_tokens: int | None,
    recover: Recover,
) -> Request:
    """Check everything that can be checked without running the model. Raises `InputError` and `OptionError`.

    cache: the live one that the call continues. assistant: the draft, for strategies that need one. chunk_tokens: what
    the engine's configuration says. recover: see `encode`.
    """
    check_model(model)
    # Left at None, transformers' arguments mean nothing.
    spare = set(inspect.signature(GenerationMixin.generate).parameters) | set(
        inspect.signature(model.forward).parameters
    )
    options = {name: value for name, value in call.options.items() if value is not None or name not in spare}
    generation_config = call.generation_config
    if options.get("synced_gpus") is False:
        del options["synced_gpus"]
    constraint = options.pop("prefix_allowed_tokens_fn", None)
    negative = {name: options.pop(name, None) for name in ARGUMENTS}
    config, model_inputs, lengths_given = _complete_config(model, generation_config, options)
    chosen = choose_strategy(config, call, options, assistant)
    check_applies(model, chosen, generation_config, options)
    check_said_ids(model, config, options)
    check_guidance(model, config.guidance_scale, negative)

    device, source, encode = prompt_device(model), None, None
    if model.config.is_encoder_decoder:
        _refuse_unknown(model, model_inputs | (dict(call.inputs) if isinstance(call.inputs, Mapping) else {}))
        prompt, source, encode = read_source(model, call.inputs, model_inputs, tokenizer, config, device, recover)
    else:
        prompt = read_prompt(call.inputs, model_inputs, tokenizer, config.bos_token_id, pad_id=config.pad_token_id)
        _refuse_unknown(model, prompt.extras)
        prompt = prompt.to(device)
        model._prepare_special_tokens(config, prompt.mask is not None, device=device, batch_size=len(prompt.ids))
    check_embeds(model, prompt)
    check_ids(model, prompt)
    mask = prompt.mask
    if mask is None and prompt.unnamed > 0:
        mask = torch.ones(len(prompt.ids), prompt.columns, dtype=torch.long, device=device)
    elif mask is None:
        known = known_mask(cache, prompt.ids)
        mask = torch.cat([known, _inferred_mask(model, prompt.ids[:, known.shape[1] :], config)], dim=1)
    mask = (mask != 0).long()
    name = "attention_mask" if source is None else "decoder_attention_mask"
    before = check_mask(prompt, mask, 0 if cache is None else cache.seen, name)
    check_extras(model, prompt, mask)
    chunk_tokens = config.prefill_chunk_size or chunk_tokens
    if source is None:
        check_pieces(prompt, chunk_tokens)
    infer_mask = functools.partial(_inferred_mask, model, config=config)
    guidance = read_guidance(model, prompt, mask, config, negative, tokenizer, cache, infer_mask)
    if guidance is None:
        prompt, mask = complete_extras(model, prompt, mask, cache, config)
    model._prepare_generated_length(
        generation_config=config,
        has_default_max_length="max_length" not in lengths_given,
        has_default_min_length="min_length" not in lengths_given,
        model_input_name="input_ids" if prompt.embeds is None else "inputs_embeds",
        input_ids_length=prompt.ids.shape[1],
        inputs_tensor=prompt.ids if prompt.embeds is None else prompt.embeds,
    )
    check_ids_are_known(_what_is_read(prompt, source), options)
    total = before + prompt.unnamed + config.max_length
    check_length(mask.shape[1], total)
    if source is not None:  # others need positions for what their cache lets them look at
        check_positions(model, None, mask.shape[1], total)

    eos, pad = config._eos_token_tensor, config._pad_token_tensor
    if pad is None and tokenizer is not None and tokenizer.pad_token_id is not None:
        pad = torch.tensor(tokenizer.pad_token_id)
    request = Request(
        prompt=prompt,
        mask=mask,
        before=before,
        total=total,
        config=config,
        strategy=chosen,
        processing=_processing(model, prompt, mask, source, config, scored(chosen), call.logits_processor, constraint),
        source=source,
        guidance=guidance,
        criteria=StoppingCriteriaList(call.stopping_criteria or []),
        eos_ids=() if eos is None else tuple(eos.tolist()),
        pad_id=0 if pad is None else int(pad),
        stop_strings=_stop_strings(config, tokenizer),
        ended=_ended(model, config, call.stopping_criteria, tokenizer),
        chunk_tokens=chunk_tokens,
        use_cache=options.get("use_cache", generation_config and generation_config.use_cache),
        generator=seeded(call.seed, device),
    )
    check_pads(model, request)
    if encode is not None:  # the first work, after all that can be checked
        encoded, source = encode()
        request = replace(request, prompt=encoded, source=source)
    return request


def _complete_config(
    model: PreTrainedModel, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any], set[str]]:
    """All parameters: those given, the model's own, the defaults. The rest of `options`: inputs of the model.

    Third, which of max_length and min_length were chosen: transformers counts those from the prompt's beginning.
    """
    configs = [config for config in (generation_config, model.generation_config) if config is not None]
    given = {
        name
        for name in ("max_length", "min_length")
        if options.get(name) is not None or any(getattr(config, name) is not None for config in configs)
    }
    # Whether there can be several is for the strategy to say, which transformers knows nothing of.
    returned = options.pop("num_return_sequences", None)
    try:
        config, model_inputs = model._prepare_generation_config(generation_config, **options)
    except (ValueError, TypeError, AttributeError) as error:  # transformers' own checks, of the model's settings too
        raise OptionError(f"these generation parameters cannot be: {error}") from error
    if returned is not None:
        options["num_return_sequences"] = config.num_return_sequences = returned
    for flag in ("output_attentions", "output_hidden_states"):  # kept in the config too
        model_inputs.pop(flag, None)
    return config, model_inputs, given


def _inferred_mask(model: PreTrainedModel, ids: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """The mask of a prompt that came without one, as transformers reads it off the pad ids."""
    if ids.numel() == 0:
        return torch.ones_like(ids)
    return model._prepare_attention_mask_for_generation(ids, config, {})


def _what_is_read(prompt: Prompt, source: Source | None) -> torch.Tensor:
    """By the encoder, if there is one: ids [rows, columns], or [rows, columns, ...] where they are not known."""
    if source is None:
        return prompt.ids if prompt.embeds is None else prompt.embeds
    # transformers stands in with ids below 0 for a source that was not given.
    is_unknown = source.inputs.ndim == 2 and bool((source.inputs < 0).any())
    return source.inputs[..., None] if is_unknown else source.inputs


def _processing(
    model: PreTrainedModel,
    prompt: Prompt,
    mask: torch.Tensor,
    source: Source | None,
    config: GenerationConfig,
    scored: int,
    given: Sequence | None,
    constraint: Callable | None,
) -> Processing:
    """scored: rows per prompt whose scores are processed at a time."""
    read = _what_is_read(prompt, source)
    mask = mask.repeat_interleave(scored, dim=0)
    if read.ndim == 2:  # in transformers 5.17 a processor would take the rows of the first prompt for all prompts
        read = read.repeat_interleave(scored, dim=0)
    try:
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=prompt.ids.shape[1],
            encoder_input_ids=read,
            logits_processor=LogitsProcessorList(given or []),
            device=str(mask.device),
            model_kwargs={"attention_mask" if source is None else "decoder_attention_mask": mask},
            prefix_allowed_tokens_fn=constraint,
        )
    except (ValueError, TypeError) as error:  # an impossible temperature, ..., maybe of the model's own settings
        raise OptionError(f"these generation parameters cannot be: {error}") from error
    return Processing(processors, prompt.ids)


def _ended(
    model: PreTrainedModel, config: GenerationConfig, given: Sequence | None, tokenizer: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Whether a text ends with the last of its ids, for any texts at once: see `Task`."""

    @functools.cache
    def criteria() -> StoppingCriteriaList:  # stop strings take a while to prepare
        return model._get_stopping_criteria(config, StoppingCriteriaList(given or []), tokenizer)

    if config.max_time is not None:
        criteria()  # the clock starts with the call, not with the first token
    return lambda ids: criteria()(ids, None)


def _stop_strings(config: GenerationConfig, tokenizer: Any) -> tuple[str, ...]:
    stops = config.stop_strings or ()
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    if stops and tokenizer is None:
        raise OptionError("stop_strings are looked for in the text: pass tokenizer=..., or give the model as a path")
    if "" in stops or config.stop_strings == "":
        raise OptionError("stop_strings: an empty stop string would end every text before it begins")
    return stops


def _refuse_unknown(model: PreTrainedModel, extras: dict[str, Any]) -> None:
    """Refuse model inputs that the model does not take, among them every misspelt parameter."""
    takes = set(inspect.signature(model.forward).parameters)
    takes |= set(inspect.signature(model.prepare_inputs_for_generation).parameters)
    takes -= _SET_BY_THE_ENGINE
    for name in extras:
        if name in _SET_BY_THE_ENGINE:
            raise OptionError(f"{name!r} is set by the engine in every step and cannot be an input: leave it out")
        if name not in takes:
            known = takes | set(GenerationConfig().to_dict()) | set(inspect.signature(parameters).parameters)
            meant = hint(name, known - _NO_PARAMETERS)
            raise OptionError(f"{type(model).__name__} and generate() know no input {name!r}; {meant}")


_SET_BY_THE_ENGINE = {
    "args", "kwargs", "model_kwargs", "labels", "logits_to_keep", "next_sequence_length", "is_first_iteration",
    "past_key_values", "use_cache", "cache_position", "return_dict", "output_attentions", "output_hidden_states",
    "decoder_inputs_embeds", "cache_params",
}  # fmt: skip
_NO_PARAMETERS = {"model_inputs", "transformers_version"}
