"""From the body of a request to a prompt and the parameters of `engine.generate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jinja2 import Environment, meta

import strategies
from configs import ConfigError
from engine.chat_template import TemplateOptions, ids_of, written
from engine.errors import InputError, OptionError
from engine.prompt import text_ids
from engine.server.bodies import ChatRequest, CompletionRequest
from engine.server.texts import Texts
from strategies import Strategy
from strategies.operations import needs_of

_COMPLETION_TOKENS = 16  # by default, as OpenAI's completions have it
_CANDIDATES = 4  # of a search that names none: the defaults of the strategies
MOST_LOGPROBS_WRITTEN = 1_000_000  # in an answer
_MOST_TOKENS = 2**20  # of a size in cache_config, for models without a limit


@dataclass(frozen=True)
class Limits:
    """What a request may ask for.

    context_tokens: of prompt and answer together; None for no limit. max_tokens: new ones per text, also where more are
    asked for. max_rows: rows that are computed at once. max_time_s: from the beginning of a text, which then ends as it
    is.
    """

    context_tokens: int | None
    max_tokens: int
    max_rows: int
    max_time_s: float


class Penalties:
    """presence_penalty and frequency_penalty of OpenAI's protocol: a logits processor.

    A token that the answer has already loses `presence`, and `frequency` as often as the answer has it.
    """

    def __init__(self, presence: float, frequency: float, prompt_columns: int):
        self._presence, self._frequency, self._prompt_columns = presence, frequency, prompt_columns

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answer = ids[:, self._prompt_columns :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def characters(body: ChatRequest | CompletionRequest) -> int:
    """Of the texts that are tokenized, about."""
    if isinstance(body, CompletionRequest):
        return sum(len(prompt) for prompt in body.prompts if isinstance(prompt, str))
    written = sum(len(message.content or "") + len(str(message.model_extra or "")) for message in body.messages)
    return written + len(str(body.tools or ""))


def chat_ids(body: ChatRequest, texts: Texts) -> list[int]:
    """The messages as the model's template writes them. Raises `InputError`, `MemoryError`."""
    tokenizer = texts.tokenizer
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    tools = None if body.tool_choice == "none" else body.tools
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("the model has no chat template: use /v1/completions")
    _check_template(tokenizer.chat_template, body.engine.chat_template_kwargs, tools)
    options = replace(TemplateOptions.of(body), more={"tools": tools} | body.engine.chat_template_kwargs)
    text = written(tokenizer, messages, options)
    return texts.ids(text, lambda text: ids_of(tokenizer, text, options))


def continues(body: ChatRequest | CompletionRequest) -> bool:
    """Whether the answer goes on with a text of the request."""
    if not isinstance(body, ChatRequest):
        return True
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    return bool(TemplateOptions.of(body).resolved(messages).continue_final_message)


def _check_template(template: str, arguments: Mapping[str, object], tools: object) -> None:
    """Refuse what the template has no place for. Raises `InputError`."""
    try:
        variables = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
    except Exception:  # it has words of its own, and may have any variable
        return
    missing = [name for name in (*arguments, *(["tools"] if tools else [])) if name not in variables]
    if missing:
        raise InputError(f"the model's chat template has no place for {', '.join(missing)}: leave it out")


def completion_ids(body: CompletionRequest, texts: Texts) -> list[list[int]]:
    """The ids of each prompt. Raises `InputError`."""
    return [
        texts.ids(prompt, lambda text: text_ids(text, texts.tokenizer)) if isinstance(prompt, str) else prompt
        for prompt in body.prompts
    ]


_OF_SEARCHES = {
    "strategy", "num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping",
}  # fmt: skip


def parameters(body: ChatRequest | CompletionRequest, prompt_tokens: int, limits: Limits) -> dict[str, object]:
    """The parameters of `engine.generate` for a prompt of so many tokens. Raises `OptionError`, `InputError`."""
    options = body.engine.model_dump(exclude_none=True, exclude={"chat_template_kwargs"})
    options["cache_config"] = options["cache_config"] or None
    if isinstance(body, CompletionRequest) and body.best_of is not None:
        options["num_beams"] = body.best_of
    arguments = options | {"max_new_tokens": new_tokens(body, prompt_tokens, limits), "max_time": limits.max_time_s}
    for name in ("temperature", "top_p", "seed", "response_format"):
        if (value := getattr(body, name)) is not None:
            arguments[name] = value
    if body.stop:
        arguments["stop_strings"] = body.stop
    if body.logit_bias:
        arguments["sequence_bias"] = {(token,): bias for token, bias in body.logit_bias.items()}
    if body.presence_penalty or body.frequency_penalty:
        arguments["logits_processor"] = [Penalties(body.presence_penalty, body.frequency_penalty, prompt_tokens)]
    arguments["num_return_sequences"] = body.n  # also where the model's own settings have another number
    likeliest, searches = logprobs_asked(body), _OF_SEARCHES & arguments.keys()
    if not searches and (body.temperature == 0 or likeliest is not None):
        arguments["num_beams"] = 1  # also where the model's own settings have more
    if likeliest is not None:
        named = _named(arguments)
        if arguments.get("num_beams", 1) > 1 or (named is not None and needs_of(named).rows_are_beams):
            raise OptionError(
                "logprobs cannot apply to a beam search (best_of, engine.num_beams): leave one of them out"
            )
        arguments["top_logprobs"] = likeliest
    _check_rows(arguments, limits)
    return _as_drawn(arguments)


def logprobs_asked(body: ChatRequest | CompletionRequest) -> int | None:
    """How many of the likeliest tokens are reported with each; None for no log probabilities at all."""
    if isinstance(body, CompletionRequest):
        return body.logprobs
    return (body.top_logprobs or 0) if body.logprobs else None


def new_tokens(body: ChatRequest | CompletionRequest, prompt_tokens: int, limits: Limits) -> int:
    """How many new tokens a text gets at most: what was asked for, as far as there is room.

    Raises `InputError` where the context has no room for any.
    """
    asked = body.max_tokens
    if isinstance(body, ChatRequest):
        asked = body.max_completion_tokens if asked is None else asked
    elif asked is None:
        asked = _COMPLETION_TOKENS
    context, limit = limits.context_tokens, limits.max_tokens
    if context is not None:
        limit = min(limit, context - prompt_tokens)
        if limit < (asked != 0):
            raise InputError(
                f"the prompt has {prompt_tokens:,} tokens, but the model's context has {context:,} for prompt and "
                "answer: shorten the prompt"
            )
    if asked is None and (likeliest := logprobs_asked(body)) is not None:
        return max(1, min(limit, MOST_LOGPROBS_WRITTEN // (body.n * (1 + likeliest))))
    return limit if asked is None else min(asked, limit)


def _check_rows(arguments: dict[str, Any], limits: Limits) -> None:
    asked: dict[str, int] = {
        name: arguments[name] for name in ("num_beams", "num_return_sequences") if name in arguments
    }
    if "penalty_alpha" in arguments:
        asked["top_k"] = arguments.get("top_k") or _CANDIDATES
    if (named := _named(arguments)) is not None:
        asked["strategy"] = needs_of(named).rows_per_prompt
    for name, rows in asked.items():
        if rows > limits.max_rows:
            descriptions = {
                "num_return_sequences": f"n={rows}",
                "strategy": f"strategy={named and named.name!r} computes {rows}",
            }
            raise OptionError(
                f"{descriptions.get(name, f'{name}={rows}')} rows at once, but this server computes {limits.max_rows} "
                "at most"
            )
    limit = _MOST_TOKENS if limits.context_tokens is None else limits.context_tokens
    for name, size in (arguments["cache_config"] or {}).items():
        if isinstance(size, (int, float)) and size > limit:
            raise OptionError(f"cache_config: {name}={size}, but the model's context has {limit} tokens")
    if (min_new_tokens := arguments.get("min_new_tokens", 0)) > arguments["max_new_tokens"]:
        raise OptionError(f"min_new_tokens={min_new_tokens} is more than max_tokens={arguments['max_new_tokens']}")


def _as_drawn(arguments: dict[str, Any]) -> dict[str, object]:
    """With `do_sample`: temperature 0 is greedy, where top_p and its like leave the likeliest token, and what only
    drawing makes sense of asks for it."""
    searches = arguments.get("num_beams", 1) > 1 or any(
        map(arguments.get, ("num_beam_groups", "penalty_alpha", "strategy"))
    )
    if arguments.get("temperature") == 0:
        if arguments["num_return_sequences"] > 1 and not searches:
            raise OptionError(
                f"n={arguments['num_return_sequences']} with temperature 0 would be the same text so many times: raise "
                "the temperature, or set engine.num_beams"
            )
        shaped = ("temperature", "top_p", "min_p") if searches else ("temperature", "top_p", "min_p", "top_k")
        return {name: value for name, value in arguments.items() if name not in shaped} | {"do_sample": False}
    draws = any(name in arguments for name in ("temperature", "top_p", "min_p"))
    draws |= not searches and ("top_k" in arguments or arguments["num_return_sequences"] > 1)
    if draws:
        return arguments | {"do_sample": True}
    never_draws = "penalty_alpha" in arguments or getattr(type(_named(arguments)), "samples", None) is False
    return arguments | {"do_sample": False} if never_draws else arguments  # whatever the model's own settings say


def _named(arguments: dict[str, Any]) -> Strategy | None:
    """The strategy that the request names; None where it names none, or one that `engine.generate` refuses."""
    try:
        name = arguments["strategy"]
        return strategies.build(
            name, **{option: arguments[option] for option in strategies.options(name) if option in arguments}
        )
    except (KeyError, ConfigError):
        return None
