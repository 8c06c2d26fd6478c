"""The arguments of one call: the parameters that `generate` and `stream` share, and what a call said of them.

Nothing is imported here that takes time: `import engine` shows these parameters to editors before torch is there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from configs import CacheConfig

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.cache_utils import Cache as TransformersCache
    from transformers.generation.streamers import BaseStreamer

    from caches import EngineCache
    from strategies import Strategy

    AnyCache: TypeAlias = str | CacheConfig | TransformersCache | EngineCache

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F")

# Of calls that read a prompt, whatever the model's own settings say.
ONE_TOKEN: dict[str, Any] = {
    "max_new_tokens": 1, "strategy": "greedy", "do_sample": False, "num_beams": 1, "num_return_sequences": 1,
    "guidance_scale": 1.0,
}  # fmt: skip


def parameters(
    inputs: Any = None,
    generation_config: GenerationConfig | dict[str, Any] | None = None,
    *,
    tokenizer: Any = None,
    # The cache.
    cache: AnyCache | None = None,
    cache_config: dict[str, Any] | CacheConfig | None = None,
    trust_cache: bool = False,
    past_key_values: TransformersCache | tuple | None = None,
    cache_implementation: str | None = None,
    use_cache: bool | None = None,
    return_legacy_cache: bool | None = None,
    on_oom: Sequence[str] | None = None,
    # How tokens are chosen.
    strategy: str | Strategy | None = None,
    seed: int | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
    epsilon_cutoff: float | None = None,
    eta_cutoff: float | None = None,
    num_return_sequences: int | None = None,
    num_beams: int | None = None,
    num_beam_groups: int | None = None,
    diversity_penalty: float | None = None,
    length_penalty: float | None = None,
    early_stopping: bool | str | None = None,
    penalty_alpha: float | None = None,
    assistant_model: PreTrainedModel | str | Path | None = None,
    assistant_tokenizer: Any = None,
    num_assistant_tokens: int | None = None,
    prompt_lookup_num_tokens: int | None = None,
    max_matching_ngram_size: int | None = None,
    # How scores are changed.
    repetition_penalty: float | None = None,
    no_repeat_ngram_size: int | None = None,
    bad_words_ids: list[list[int]] | None = None,
    sequence_bias: Any = None,
    suppress_tokens: list[int] | None = None,
    begin_suppress_tokens: list[int] | None = None,
    forced_bos_token_id: int | None = None,
    forced_eos_token_id: int | list[int] | None = None,
    exponential_decay_length_penalty: tuple[int, float] | None = None,
    renormalize_logits: bool | None = None,
    guidance_scale: float | None = None,
    negative_prompt: str | Sequence[str] | None = None,
    negative_prompt_ids: torch.Tensor | None = None,
    negative_prompt_attention_mask: torch.Tensor | None = None,
    logits_processor: Sequence[Any] | Callable[..., Any] | None = None,
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
    # How chat messages are read.
    continue_final_message: bool | None = None,
    add_generation_prompt: bool | None = None,
    sanitize_control_tokens: bool | None = None,
    # What form texts have.
    response_format: dict[str, Any] | type | Sequence[Any] | None = None,
    json_schema: dict[str, Any] | str | type | Sequence[Any] | None = None,
    regex: str | Sequence[str | None] | None = None,
    choices: Sequence[str] | Sequence[Sequence[str] | None] | None = None,
    grammar: str | Sequence[str | None] | None = None,
    # When it ends.
    max_new_tokens: int | None = None,
    min_new_tokens: int | None = None,
    max_length: int | None = None,
    min_length: int | None = None,
    max_time: float | None = None,
    stop_strings: str | list[str] | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    stopping_criteria: Sequence[Any] | Callable[..., Any] | None = None,
    cancellation: Any = None,
    # What comes back.
    streamer: BaseStreamer | None = None,
    top_logprobs: int | None = None,
    output_scores: bool | None = None,
    output_logits: bool | None = None,
    output_attentions: bool | None = None,
    output_hidden_states: bool | None = None,
    **model_inputs: Any,
) -> None:
    """What `generate` and `stream` take besides a model; documented at `engine.generate`. It is never called.

    None is "not said". model_inputs: inputs of the model's forward, and the rarer parameters of a `GenerationConfig`.
    """


def takes(
    source: Callable[P, Any], documented_by: Callable[..., Any] | None = None
) -> Callable[[Callable[Concatenate[F, ...], R]], Callable[Concatenate[F, P], R]]:
    """Decorate a function of `(first, ..., **arguments)` whose parameters after the first are those of `source`.

    documented_by: the function whose docstring describes these parameters; that part is added to the docstring.
    """

    def decorated(function: Callable[Concatenate[F, ...], R]) -> Callable[Concatenate[F, P], R]:
        own = inspect.signature(function)
        shown = [next(iter(own.parameters.values())), *inspect.signature(source).parameters.values()]
        function.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
        if documented_by is not None:
            documentation = inspect.getdoc(documented_by) or ""
            sections = documentation[documentation.index("inputs :") :]  # the first parameter is another one here
            function.__doc__ = f"{inspect.getdoc(function)}\n\nParameters\n----------\n{sections}"
        return function

    return decorated


@dataclass(frozen=True)
class Call:
    """The `parameters` of a call. options: generation parameters of transformers and inputs of the model, mixed."""

    inputs: Any = None
    tokenizer: Any = None
    cache: AnyCache | None = None
    cache_config: dict[str, Any] | CacheConfig | None = None
    trust_cache: bool = False
    past_key_values: TransformersCache | tuple | None = None
    cache_implementation: str | None = None
    return_legacy_cache: bool | None = None
    on_oom: Sequence[str] | None = None
    strategy: str | Strategy | None = None
    generation_config: GenerationConfig | None = None
    seed: int | None = None
    assistant_model: PreTrainedModel | None = None
    assistant_tokenizer: Any = None
    logits_processor: list[Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    sanitize_control_tokens: bool | None = None
    response_format: Any = None
    json_schema: Any = None
    regex: Any = None
    choices: Any = None
    grammar: Any = None
    stopping_criteria: list[Any] | None = None
    cancellation: Any = None
    streamer: BaseStreamer | None = None
    top_logprobs: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


_OWN = {one.name for one in fields(Call)} - {"options"}


def read_call(inputs: Any = None, generation_config: Any = None, **arguments: Any) -> Call:
    """The arguments as given, in their places; `engine.request.parameters.read_parameters` checks their types."""
    own = {name: arguments.pop(name) for name in _OWN & set(arguments)}
    return Call(inputs=inputs, generation_config=generation_config, **own, options=arguments)
