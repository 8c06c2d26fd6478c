"""What a call of `generate` said: the engine's own parameters, and those of transformers and of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.parameters import PARAMETERS

# Of calls that read a prompt, whatever the model's own settings say.
ONE_TOKEN: dict[str, Any] = {
    "max_new_tokens": 1, "strategy": "greedy", "do_sample": False, "num_beams": 1, "num_return_sequences": 1,
    "guidance_scale": 1.0,
}  # fmt: skip
_SAME_NAMES = {"cache_config", "cache_implementation"}  # as fields of a GenerationConfig
OWN = {name for name, row in PARAMETERS.items() if not row.of_config} - {"model_inputs"} | _SAME_NAMES


@dataclass(frozen=True)
class Call:
    """own: the engine's own parameters that were given, which are attributes too; None is "not said".

    options: generation parameters of transformers and inputs of the model, mixed.
    """

    own: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name not in OWN:
            raise AttributeError(f"a call has no {name}")
        return self.own.get(name)


def read_call(inputs: Any = None, generation_config: Any = None, **arguments: Any) -> Call:
    """The arguments as given, in their places; `engine.request.parameters.read_parameters` checks their types."""
    own = {name: arguments.pop(name) for name in OWN & set(arguments)}
    return Call({"inputs": inputs, "generation_config": generation_config} | own, arguments)
