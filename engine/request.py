"""One call's arguments, checked and put in order before any work. The only file that asks transformers'
`GenerationMixin` for its private helpers: how a `GenerationConfig` is completed, and which processors it means."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from transformers.generation import GenerationMode

import strategies
from caches import Driven
from configs import nearest
from engine.checks import (
    check_applies,
    check_embeds,
    check_extras,
    check_ids,
    check_length,
    check_mask,
    check_model,
    check_pieces,
)
from engine.dispatch import prompt_device
from engine.encoder import Source, encode
from engine.errors import OptionError
from engine.extras import complete_extras
from engine.inputs import Prompt, read_prompt
from engine.session import known_mask
from engine.stopping import Stopping
from strategies import Strategy

_STRATEGY_OF_MODE = {GenerationMode.GREEDY_SEARCH: "greedy", GenerationMode.SAMPLE: "sampling"}


@dataclass(frozen=True)
class Request:
    """total: columns when the run ends at the latest. before: columns the cache holds before those of `prompt`.

    source_tokens: what an encoder has read for this call, pads not counted.
    """

    prompt: Prompt
    mask: torch.Tensor
    before: int
    total: int
    config: GenerationConfig
    strategy: Strategy
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    eos_ids: frozenset[int]
    pad_id: int
    stop_strings: tuple[str, ...]
    chunk_tokens: int | None
    use_cache: bool | None
    source_tokens: int = 0

    @property
    def output_flags(self) -> dict[str, bool]:
        """What the model is asked to return besides its logits."""
        return {name: True for name in ("output_attentions", "output_hidden_states") if getattr(self.config, name)}

    @property
    def untold(self) -> int:
        """Columns before the first one of which the id was given."""
        return self.before + self.prompt.unnamed

    @property
    def new_tokens(self) -> int:
        """Tokens a row gets at most."""
        return self.total - self.mask.shape[1]

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
    tokenizer: Any,
    inputs: Any,
    *,
    cache: Driven | None,
    strategy: str | Strategy | None,
    generation_config: GenerationConfig | None,
    logits_processor: LogitsProcessorList | Sequence | None,
    stopping_criteria: StoppingCriteriaList | Sequence | None,
    chunk_tokens: int | None,
    options: dict[str, Any],
) -> Request:
    """Check everything that can be checked without running the model. Raises `InputError` and `OptionError`.

    options: generation parameters and model inputs by keyword, mixed, as `model.generate` takes them.
    """
    check_model(model)
    # Left at None, transformers' arguments mean nothing.
    spare = set(inspect.signature(GenerationMixin.generate).parameters) | set(
        inspect.signature(model.forward).parameters
    )
    options = {name: value for name, value in options.items() if value is not None or name not in spare}
    if options.get("synced_gpus") is False:
        del options["synced_gpus"]
    constraint = {name: options.pop(name, None) for name in _PROCESSOR_ARGUMENTS}
    config, model_inputs, lengths_given = _complete_config(model, generation_config, options)
    chosen = _choose_strategy(config, strategy, options, generation_config)
    check_applies(chosen, generation_config, options)

    device, source = prompt_device(model), None
    if model.config.is_encoder_decoder:
        _refuse_unknown(model, model_inputs | (dict(inputs) if isinstance(inputs, Mapping) else {}))
        prompt, source = encode(model, inputs, model_inputs, tokenizer, config, device)
    else:
        prompt = read_prompt(inputs, model_inputs, tokenizer, config.bos_token_id)
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
    before = check_mask(prompt, mask, 0 if cache is None else cache.seen)
    check_extras(prompt, mask)
    chunk_tokens = config.prefill_chunk_size or chunk_tokens
    if source is None:
        check_pieces(prompt, chunk_tokens)
    prompt, mask = complete_extras(model, prompt, mask, cache, config)
    model._prepare_generated_length(
        generation_config=config,
        has_default_max_length="max_length" not in lengths_given,
        has_default_min_length="min_length" not in lengths_given,
        model_input_name="input_ids" if prompt.embeds is None else "inputs_embeds",
        input_ids_length=prompt.ids.shape[1],
        inputs_tensor=prompt.ids if prompt.embeds is None else prompt.embeds,
    )
    total = before + prompt.unnamed + config.max_length
    check_length(mask.shape[1], total)

    eos, pad = config._eos_token_tensor, config._pad_token_tensor
    if pad is None and tokenizer is not None and tokenizer.pad_token_id is not None:
        pad = torch.tensor(tokenizer.pad_token_id)
    return Request(
        prompt=prompt,
        mask=mask,
        before=before,
        total=total,
        config=config,
        strategy=chosen,
        processors=_processors(model, prompt, mask, source, config, logits_processor, constraint),
        source_tokens=0 if source is None else source.tokens,
        criteria=StoppingCriteriaList(stopping_criteria or []),
        eos_ids=frozenset() if eos is None else frozenset(eos.tolist()),
        pad_id=0 if pad is None else int(pad),
        stop_strings=_stop_strings(config, tokenizer),
        chunk_tokens=chunk_tokens,
        use_cache=options.get("use_cache", generation_config and generation_config.use_cache),
    )


def _complete_config(
    model: PreTrainedModel, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any], set[str]]:
    """All parameters: those given, the model's own, the defaults. The rest of `options`: inputs of the model.

    Third, which of max_length and min_length somebody chose: transformers counts those from the prompt's beginning.
    """
    max_new_tokens = options.get("max_new_tokens", generation_config and generation_config.max_new_tokens)
    if max_new_tokens is not None and (not isinstance(max_new_tokens, int) or max_new_tokens < 1):
        raise OptionError(
            f"max_new_tokens={max_new_tokens!r}, but a generation has a whole number of new tokens, 1 or more"
        )
    configs = [config for config in (generation_config, model.generation_config) if config is not None]
    given = {
        name
        for name in ("max_length", "min_length")
        if options.get(name) is not None or any(getattr(config, name) is not None for config in configs)
    }
    try:
        config, model_inputs = model._prepare_generation_config(generation_config, **options)
    except ValueError as error:  # transformers' own checks of its parameters
        raise OptionError(str(error)) from error
    for flag in ("output_attentions", "output_hidden_states"):  # kept in the config too
        model_inputs.pop(flag, None)
    return config, model_inputs, given


def _inferred_mask(model: PreTrainedModel, ids: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """The mask of a prompt that came without one, as transformers reads it off the pad ids."""
    if ids.shape[0] == 1 or ids.numel() == 0:  # a row alone has nothing to be padded to
        return torch.ones_like(ids)
    return model._prepare_attention_mask_for_generation(ids, config, {})


def _processors(
    model: PreTrainedModel,
    prompt: Prompt,
    mask: torch.Tensor,
    source: Source | None,
    config: GenerationConfig,
    given: Sequence | None,
    constraint: dict[str, Any],
) -> LogitsProcessorList:
    read = prompt.ids if prompt.embeds is None else prompt.embeds
    # transformers stands in for a source that was not given with ids that are none.
    read = read if source is None else source.inputs.clamp(min=0) if source.inputs.ndim == 2 else source.inputs
    try:
        return model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=prompt.ids.shape[1],
            encoder_input_ids=read,
            logits_processor=LogitsProcessorList(given or []),
            device=str(mask.device),
            model_kwargs={"attention_mask" if source is None else "decoder_attention_mask": mask},
            **constraint,
        )
    except ValueError as error:  # an impossible temperature, top_p, ...
        raise OptionError(str(error)) from error


def _stop_strings(config: GenerationConfig, tokenizer: Any) -> tuple[str, ...]:
    stops = config.stop_strings or ()
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    if stops and tokenizer is None:
        raise OptionError("stop_strings are looked for in the text: pass tokenizer=..., or give the model as a path")
    if "" in stops:
        raise OptionError("an empty stop string would end every text before it begins")
    return stops


# Arguments of `generate` that only build logits processors.
_PROCESSOR_ARGUMENTS = ("prefix_allowed_tokens_fn", "negative_prompt_ids", "negative_prompt_attention_mask")


def _refuse_unknown(model: PreTrainedModel, extras: dict[str, Any]) -> None:
    """Refuse model inputs that the model does not take, among them every misspelt option."""
    takes = set(inspect.signature(model.forward).parameters)
    takes |= set(inspect.signature(model.prepare_inputs_for_generation).parameters)
    takes -= _SET_BY_THE_ENGINE
    for name in extras:
        if name in _SET_BY_THE_ENGINE:
            raise OptionError(f"{name!r} is set by the engine in every step and cannot be an input: leave it out")
        if name not in takes:
            known = sorted(takes | set(GenerationConfig().to_dict()) | set(_PROCESSOR_ARGUMENTS) | _CALL_ARGUMENTS)
            raise OptionError(f"{type(model).__name__} and generate() know no input {name!r}; {nearest(name, known)}")


_CALL_ARGUMENTS = {
    "cache",
    "cache_config",
    "return_legacy_cache",
    "strategy",
    "streamer",
    "logits_processor",
    "stopping_criteria",
    "tokenizer",
}
_SET_BY_THE_ENGINE = {
    "args", "kwargs", "model_kwargs", "labels", "logits_to_keep", "next_sequence_length", "is_first_iteration",
    "past_key_values", "use_cache", "cache_position", "return_dict", "output_attentions", "output_hidden_states",
}  # fmt: skip


def _choose_strategy(
    config: GenerationConfig,
    strategy: str | Strategy | None,
    options: dict[str, Any],
    generation_config: GenerationConfig | None,
) -> Strategy:
    """The named strategy, or the one that the parameters mean in transformers. They may not contradict each other."""
    implied = _STRATEGY_OF_MODE.get(mode := config.get_generation_mode())
    if implied is None:
        raise OptionError(
            f"these options ask for {mode.value.replace('_', ' ')}, which is not available; "
            f"strategies: {', '.join(strategies.names())}"
        )
    chosen = strategies.build(strategy or implied) if strategy is None or isinstance(strategy, str) else strategy
    do_sample = options.get("do_sample", generation_config and generation_config.do_sample)
    if do_sample is not None and do_sample != chosen.samples:
        raise OptionError(f"strategy={chosen.name!r} contradicts do_sample={do_sample}: leave one of them out")
    if config.num_return_sequences > 1 and not chosen.samples:
        raise OptionError(
            f"num_return_sequences={config.num_return_sequences}, but {chosen.name} gives the same text every time; "
            "use do_sample=True"
        )
    config.do_sample = chosen.samples
    return chosen
