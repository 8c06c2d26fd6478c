"""One call's arguments, checked and put in order before any work. The only file that asks transformers'
`GenerationMixin` for its private helpers: how a `GenerationConfig` is completed, and which processors it means."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMode
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

import strategies
from configs import nearest
from engine.errors import InputError, OptionError
from engine.inputs import Prompt, read_prompt
from engine.runner import PER_TOKEN_EXTRAS
from engine.stopping import Stopping
from strategies import Strategy

_STRATEGY_OF_MODE = {GenerationMode.GREEDY_SEARCH: "greedy", GenerationMode.SAMPLE: "sampling"}

# Options of `GenerationConfig` that mean something elsewhere, or nothing here: refused rather than ignored.
_REFUSED = {
    "token_healing": "it is not available here",
    "disable_compile": "nothing is compiled unless EngineConfig(compile=...) says so",
    "compile_config": "give EngineConfig(compile=...) to a Generator instead",
    "return_legacy_cache": "caches are objects here; take `out.cache`",
    "low_memory": "it belongs to contrastive search, which is not available",
}


@dataclass(frozen=True)
class Request:
    """total: columns when the run ends at the latest. before: columns the cache holds before `prompt.ids` begin."""

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

    @property
    def output_flags(self) -> dict[str, bool]:
        """What the model is asked to return besides its logits."""
        return {name: True for name in ("output_attentions", "output_hidden_states") if getattr(self.config, name)}

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
        rows, last_column = self.prompt.ids.shape[0], self.total - self.before
        return Stopping(rows, last_column, self.eos_ids, self.criteria, time_criteria)


def read_request(
    model: PreTrainedModel,
    tokenizer: Any,
    inputs: Any,
    *,
    cache_seen: int,
    strategy: str | Strategy | None,
    generation_config: GenerationConfig | None,
    logits_processor: LogitsProcessorList | Sequence | None,
    stopping_criteria: StoppingCriteriaList | Sequence | None,
    options: dict[str, Any],
) -> Request:
    """Check everything that can be checked without running the model. Raises `InputError` and `OptionError`.

    options: generation parameters and model inputs by keyword, mixed, as `model.generate` takes them.
    """
    if model.training:
        raise InputError("the model is in training mode, where dropout makes its text random: call model.eval() first")
    if model.config.is_encoder_decoder:
        raise InputError(f"{type(model).__name__} is an encoder-decoder model; only decoder-only models are supported")
    max_new_tokens = options.get("max_new_tokens", generation_config and generation_config.max_new_tokens)
    if max_new_tokens is not None and max_new_tokens < 1:
        raise OptionError(f"max_new_tokens={max_new_tokens}, but a generation has at least one new token")
    options = dict(options)
    constraint = {name: options.pop(name, None) for name in _PROCESSOR_ARGUMENTS}

    lengths_given = {
        name: options.get(name) is not None
        or (generation_config is not None and getattr(generation_config, name) is not None)
        or getattr(model.generation_config, name) is not None
        for name in ("max_length", "min_length")
    }
    try:
        config, model_inputs = model._prepare_generation_config(generation_config, **options)
    except ValueError as error:  # transformers' own checks of its parameters
        raise OptionError(str(error)) from error
    for flag in ("output_attentions", "output_hidden_states"):  # kept in the config too
        model_inputs.pop(flag, None)
    _refuse_unknown(model, model_inputs)
    chosen = _choose_strategy(config, strategy, options, generation_config)
    for name, remedy in _REFUSED.items():
        if getattr(config, name, None):
            raise OptionError(f"{name}={getattr(config, name)!r} cannot apply: {remedy}")

    prompt = read_prompt(inputs, model_inputs, tokenizer, config.bos_token_id)
    prompt = _to_device(prompt.repeat(config.num_return_sequences), model.device)
    model._prepare_special_tokens(config, prompt.mask is not None, device=model.device, batch_size=len(prompt.ids))
    mask, before = _check_prompt(model, prompt, config, cache_seen)
    _check_extras(prompt, mask)

    model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=not lengths_given["max_length"],
        has_default_min_length=not lengths_given["min_length"],
        model_input_name="input_ids",
        input_ids_length=prompt.ids.shape[1],
        inputs_tensor=prompt.ids,
    )
    total = before + config.max_length
    _check_length(model, mask.shape[1], total)
    if config.prefill_chunk_size is not None:
        raw = sorted(set(prompt.extras) & set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL))
        if raw:
            raise OptionError(f"prefill_chunk_size cannot cut {', '.join(raw)} into pieces: read the prompt at once")

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
        processors=_processors(model, prompt, mask, config, logits_processor, constraint),
        criteria=StoppingCriteriaList(stopping_criteria or []),
        eos_ids=frozenset() if eos is None else frozenset(eos.tolist()),
        pad_id=0 if pad is None else int(pad),
        stop_strings=_stop_strings(config, tokenizer),
    )


def _processors(
    model: PreTrainedModel,
    prompt: Prompt,
    mask: torch.Tensor,
    config: GenerationConfig,
    given: Sequence | None,
    constraint: dict[str, Any],
) -> LogitsProcessorList:
    try:
        return model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=prompt.ids.shape[1],
            encoder_input_ids=prompt.ids,
            logits_processor=LogitsProcessorList(given or []),
            device=str(model.device),
            model_kwargs={"attention_mask": mask},
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


def _refuse_unknown(model: PreTrainedModel, model_inputs: dict[str, Any]) -> None:
    taken = set(inspect.signature(model.forward).parameters)
    taken |= set(inspect.signature(model.prepare_inputs_for_generation).parameters)
    taken -= {"args", "kwargs", "model_kwargs", "labels"}
    if "inputs_embeds" in model_inputs:
        raise OptionError("inputs_embeds are not supported: give the prompt as token ids")
    for name in model_inputs:
        if name not in taken:
            known = sorted(taken | set(GenerationConfig().to_dict()) | set(_PROCESSOR_ARGUMENTS) | _CALL_ARGUMENTS)
            raise OptionError(f"{type(model).__name__} and generate() know no option {name!r}; {nearest(name, known)}")


_CALL_ARGUMENTS = {
    "cache",
    "cache_config",
    "strategy",
    "streamer",
    "logits_processor",
    "stopping_criteria",
    "tokenizer",
}


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


def _to_device(prompt: Prompt, device: torch.device) -> Prompt:
    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return Prompt(move(prompt.ids), move(prompt.mask), {name: move(value) for name, value in prompt.extras.items()})


def _check_prompt(
    model: PreTrainedModel, prompt: Prompt, config: GenerationConfig, cache_seen: int
) -> tuple[torch.Tensor, int]:
    """The mask of all columns up to the end of the prompt, and how many of them come before `prompt.ids`."""
    ids, mask, before = prompt.ids, prompt.mask, 0
    rows, tokens = ids.shape
    if ids.numel() == 0:
        raise InputError(f"the prompt is empty ({rows} rows of {tokens} tokens): the model needs a token to begin with")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise InputError(
            f"token id {wrong} is outside the model's vocabulary of {vocabulary} tokens (0 to {vocabulary - 1})"
        )
    if mask is None:
        mask = model._prepare_attention_mask_for_generation(ids, config, {})
        may_be_right_padded = rows > 1
    else:
        may_be_right_padded = True
        if list(mask.shape) == [rows, cache_seen + tokens] and cache_seen > 0:
            before = cache_seen  # only the new tokens were given; the mask also covers those in the cache
        elif mask.shape != ids.shape:
            raise InputError(
                f"attention_mask has shape {list(mask.shape)}, but the token ids have {list(ids.shape)}: "
                "it needs one entry per token"
            )
    mask = (mask != 0).long()
    if may_be_right_padded and bool((mask[:, -1] == 0).any()):
        raise InputError(
            "the prompts are padded on the right, so the model would continue after pads: "
            "pad on the left (tokenizer.padding_side = 'left')"
        )
    if cache_seen >= before + tokens:
        raise InputError(
            f"the cache holds {cache_seen} tokens and the prompt has {before + tokens}: nothing is left to feed. "
            "Give the whole conversation, with at least one token that the cache has not seen"
        )
    return mask, before


def _check_extras(prompt: Prompt, mask: torch.Tensor) -> None:
    for name in ("position_ids", *PER_TOKEN_EXTRAS):
        value = prompt.extras.get(name)
        if value is not None and value.shape[-1] != mask.shape[1]:
            raise InputError(
                f"{name} has shape {list(value.shape)}, but the mask covers {mask.shape[1]} tokens: "
                "its last dimension needs one entry per token"
            )


def _check_length(model: PreTrainedModel, prompt_columns: int, total: int) -> None:
    if total <= prompt_columns:
        raise OptionError(
            f"max_length={total} leaves no room after {prompt_columns} prompt tokens: raise it, or use max_new_tokens"
        )
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    # The last new token is never fed, so it needs no position.
    if positions is not None and total - 1 > positions:
        raise InputError(
            f"{prompt_columns} prompt tokens and {total - prompt_columns} new ones need {total - 1} positions, but the "
            f"model has {positions}: shorten the prompt or max_new_tokens (or raise config.max_position_embeddings if "
            "its positions are known to reach further)"
        )
