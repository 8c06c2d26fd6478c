"""What a call of `generate` said; each parameter is read once, before any work."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from engine import readers
from engine.errors import OptionError
from engine.parameters import PARAMETERS
from engine.readers import Reader, WrongValue
from engine.request.parameter_hints import hint

# Of calls that read a prompt, whatever the model's own settings say.
ONE_TOKEN: dict[str, object] = {
    "max_new_tokens": 1, "strategy": "greedy", "do_sample": False, "num_beams": 1, "num_return_sequences": 1,
    "guidance_scale": 1.0,
}  # fmt: skip
_SAME_NAMES = {"cache_config", "cache_implementation"}  # as fields of a GenerationConfig
_ARGUMENTS = {name for name, parameter in PARAMETERS.items() if not parameter.is_setting} - {"model_inputs"}
_ARGUMENTS |= _SAME_NAMES


@dataclass(frozen=True)
class Call:
    """arguments: the engine's own parameters that were given, each also an attribute; None is "not said".

    options: generation parameters of transformers and inputs of the model, mixed.
    """

    arguments: dict[str, object] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name not in _ARGUMENTS:
            raise AttributeError(f"a call has no {name}")
        return self.arguments.get(name)


def read_call(inputs: object = None, generation_config: GenerationConfig | None = None, **options: object) -> Call:
    """The arguments as given, in their places; `read_parameters` checks their types."""
    arguments = {name: options.pop(name) for name in _ARGUMENTS & set(options)}
    return Call({"inputs": inputs, "generation_config": generation_config} | arguments, options)


def _generation_config(value: object) -> GenerationConfig:
    """With all fields read. The one that was given stays as it is."""
    if isinstance(value, Mapping):
        field_names = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
        for name in value:
            if name not in field_names:
                raise WrongValue(f"has no field {name!r}; {hint(str(name), field_names)}")
        fields = {name: read("generation_config: " + name, entry, name) for name, entry in value.items()}
        try:
            return GenerationConfig(**fields)
        except (ValueError, TypeError, AttributeError) as error:
            raise WrongValue(f"has fields that contradict each other: {error}") from error
    if not isinstance(value, GenerationConfig):
        raise WrongValue
    config = copy.copy(value)
    for name in _FIELDS:
        if getattr(value, name, None) is not None:
            setattr(config, name, read("generation_config: " + name, getattr(value, name), name))
    return config


# Parameters that `engine.parameters` does not name: the rarer fields of a `GenerationConfig`, and two of transformers.
_RARER: dict[str, Reader] = {
    **dict.fromkeys(("max_cache_len", "prefill_chunk_size"), readers.POSITIVE),
    "encoder_no_repeat_ngram_size": readers.COUNT,
    "bos_token_id": readers.ID,
    "decoder_start_token_id": readers.SOME_IDS,
    "encoder_repetition_penalty": readers.OVER_0,
    "top_h": readers.SHARE,
    "assistant_confidence_threshold": readers.FINITE,
    "watermarking_config": Reader("a watermarking configuration of transformers", readers.watermark),
    "num_assistant_tokens_schedule": readers.TEXT,
    **dict.fromkeys(("remove_invalid_values", "token_healing", "return_dict_in_generate"), readers.FLAG),
    **dict.fromkeys(("disable_compile", "use_mtp", "low_memory", "is_assistant"), readers.FLAG),
}
_FIELDS = {name: parameter.reader for name, parameter in PARAMETERS.items() if parameter.is_setting} | _RARER
_READERS = {
    **{name: parameter.reader for name, parameter in PARAMETERS.items()},
    **_RARER,
    "generation_config": Reader("a GenerationConfig, or a dict of its fields", _generation_config),
    **dict.fromkeys(("synced_gpus", "trust_remote_code"), readers.FLAG),
}

# Parameters that shape a distribution to draw from.
SAMPLING = {name for name, parameter in PARAMETERS.items() if parameter.draws} | {"top_h"}


def read(label: str, value: object, name: str | None = None) -> object:
    """The value of the parameter `name` as it is kept; None stays None. label: its name in the `OptionError`."""
    reader = _READERS.get(name or label)
    if reader is None or value is None:
        return value
    try:
        return reader.read(value)
    except WrongValue as wrong:
        message = str(wrong)
        raise OptionError(
            f"{label} {message}" if message else f"{label}={value!r:.120}, but it is {reader.words}"
        ) from wrong


def read_parameters(call: Call) -> Call:
    """The call with every parameter read. Raises `OptionError`."""
    arguments = {name: read(name, value) for name, value in call.arguments.items()}
    options = {name: read(name, value) for name, value in call.options.items()}
    options.pop("trust_remote_code", None)  # about loading a model, as in transformers
    return Call(arguments, options)


def read_own(
    config: GenerationConfig, call_config: GenerationConfig | None, options: Mapping[str, object]
) -> dict[str, object]:
    """The fields of a model's own configuration that a call leaves to it, read. Raises `OptionError`."""
    sources = (options.get("do_sample"), getattr(call_config, "do_sample", None), config.do_sample)
    draws = next((value for value in sources if value is not None), False)
    unset = {name for name in _FIELDS if name not in options and getattr(call_config, name, None) is None}
    unset -= set() if draws else SAMPLING
    model_values = {name: getattr(config, name, None) for name in _FIELDS if name in unset}
    return {
        name: read(f"model.generation_config.{name}", entry, name)
        for name, entry in model_values.items()
        # 0 in place of None: a strategy that needs the number refuses it.
        if entry is not None and not (_FIELDS[name] is readers.POSITIVE and entry == 0)
    }
