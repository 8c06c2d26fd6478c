"""The bodies of requests: fields of OpenAI's protocol, and those of ours under `engine`. Unknown fields are refused.

Ranges of parameters of `generate`, and the fields under `engine`, follow from `engine.parameters`.
"""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    field_validator,
    model_validator,
)
from transformers import PreTrainedTokenizerBase

from engine.parameters import PARAMETERS
from engine.parameters import Field as RequestField

_STOP_STRINGS = 16
_STOP_CHARACTERS = 400  # of all stop strings: searches prepare a table of them
# Larger ones may nest so deeply that the library for grammars, which is recursive, has no stack left.
_SCHEMA_CHARACTERS = 16_384
_SIZES_OF_THE_SERVER = ("folder", "max_batch_size", "device", "dtype", "layer_device_map")
_Text: TypeAlias = Annotated[str, Field(max_length=2000)]
_Objects: TypeAlias = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=1000)]
_TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
_UNKNOWN_FIELDS = 16  # of which each has an error of its own
_TEMPLATE_OWN = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def _at_most(limit: int) -> BeforeValidator:
    """Refuses larger objects before their entries are read: each wrong one would cost time for an error of its own."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"{len(value):,} entries, and this server reads {limit:,}")
        return value

    return BeforeValidator(check)


def _of_moderate_size(schema: object) -> object:
    try:
        size = len(json.dumps(schema))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if size > _SCHEMA_CHARACTERS:
        raise ValueError(f"the schema has {size:,} characters as JSON, and this server reads {_SCHEMA_CHARACTERS:,}")
    return schema


_Schema: TypeAlias = Annotated[dict[str, Any], AfterValidator(_of_moderate_size)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, body: object) -> object:
        if not isinstance(body, dict):
            return body
        if (unknown := len(body.keys() - cls.model_fields.keys())) > _UNKNOWN_FIELDS:
            raise ValueError(f"{unknown:,} unknown fields: leave them out")
        return {name: value for name, value in body.items() if value is not None}


# How types of `engine.parameters` are read from JSON, where pydantic's way would take too much.
_TYPES: dict[object, object] = {
    dict: _Schema,
    list: Annotated[list[_Text], Field(fail_fast=True, min_length=1, max_length=1000)],
}


def _limits(name: str) -> object:
    """The range of a parameter of `generate` in a request."""
    field, reader = PARAMETERS[name].field or RequestField(), PARAMETERS[name].reader
    if field.type is not None or reader is None:
        return Field(max_length=field.most)
    minimum = reader.least if field.least is None else field.least
    return Field(ge=minimum, le=reader.most if field.most is None else field.most)


def _type(name: str) -> object:
    """What a parameter of `generate` is in a request."""
    field, reader = PARAMETERS[name].field or RequestField(), PARAMETERS[name].reader
    value_type: Any = field.type or (reader and reader.scalar)
    value_type = _TYPES.get(value_type, value_type)
    return Annotated[value_type | None, _limits(name)]


_in_requests = {name: parameter.field for name, parameter in PARAMETERS.items() if parameter.field}
_fields: dict[str, Any] = {name: (_type(name), None) for name, field in _in_requests.items() if not field.name}
_Parameters: Any = create_model("_Parameters", __base__=_Body, **_fields)


class EngineOptions(_Parameters):
    """What OpenAI's protocol has no name for: parameters of `engine.generate` by their names.

    cache_config has plain values, and no folder: requests name no paths. chat_template_kwargs: what a model's template
    takes besides messages and tools.
    """

    cache_config: Annotated[dict[str, bool | int | float | str], _at_most(32)] = Field(default={})
    chat_template_kwargs: dict[str, object] = Field(default={})

    @field_validator("cache_config")
    @classmethod
    def _sets_nothing_of_the_server(cls, value: dict[str, Any]) -> dict[str, object]:
        if reserved := [name for name in _SIZES_OF_THE_SERVER if name in value]:
            raise ValueError(f"a request cannot set {', '.join(reserved)}")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _is_for_the_template(cls, value: dict[str, Any]) -> dict[str, object]:
        if reserved := _TEMPLATE_OWN & set(value):
            raise ValueError(f"{', '.join(sorted(reserved))} cannot be set here")
        return value


class StreamOptions(_Body):
    include_usage: bool = False


class _Request(_Body):
    """What both kinds of requests have. user and metadata change nothing."""

    model: str
    max_tokens: Annotated[int | None, _limits("max_new_tokens")] = None
    temperature: Annotated[float | None, _limits("temperature")] = None  # below 0.001 only 0
    top_p: Annotated[float | None, _limits("top_p")] = None
    n: Annotated[int, _limits("num_return_sequences")] = 1
    stop: object = None
    seed: Annotated[int | None, _limits("seed")] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = Field(default=0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0, ge=-2, le=2)
    logit_bias: Annotated[dict[_TokenId, Annotated[float, Field(ge=-100, le=100)]], _at_most(1024)] = {}
    user: str | None = None
    metadata: Annotated[dict[str, str], _at_most(64)] | None = None
    response_format: _Schema | None = None
    engine: EngineOptions = EngineOptions()

    @field_validator("temperature")
    @classmethod
    def _is_no_tiny_number(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < 0.001:
            raise ValueError(f"{value} is so small that no score is a number: 0 is greedy")
        return value

    @field_validator("stop")
    @classmethod
    def _are_stop_strings(cls, value: object) -> object:
        """By hand: a union has an error for each of its kinds."""
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("stop is a text or a list of texts")
        if len(texts) > _STOP_STRINGS:
            raise ValueError(f"{len(texts):,} stop strings, and this server reads {_STOP_STRINGS}")
        if "" in texts or sum(map(len, texts)) > _STOP_CHARACTERS:
            raise ValueError(f"stop strings have at least one character each, and {_STOP_CHARACTERS} together at most")
        return texts

    @property
    def has_form(self) -> bool:
        """Whether the answer has a form: a schema, a regex, a list of choices or a grammar."""
        options = self.engine
        forms = (options.json_schema, options.regex, options.choices, options.grammar)
        return any(form is not None for form in forms) or (self.response_format or {}).get("type", "text") != "text"

    @model_validator(mode="after")
    def _options_apply(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream: true")
        if self.engine.min_new_tokens and self.has_form:
            raise ValueError("engine.min_new_tokens cannot apply: the form of the answer decides where it ends")
        return self


class Message(BaseModel):
    """Further fields are the template's business."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | _Objects | None = None

    @field_validator("content")
    @classmethod
    def _as_text(cls, value: object) -> object:
        """Parts of text as one text."""
        if not isinstance(value, list):
            return value
        for item in value:
            if set(item) != {"type", "text"} or item["type"] != "text" or not isinstance(item["text"], str):
                raise ValueError(f"a part with {list(item)!a:.80}: parts have a type, which is text, and a text")
        return "".join(item["text"] for item in value)


class ChatRequest(_Request):
    """Of /v1/chat/completions. max_completion_tokens and max_tokens are the same.

    continue_final_message, add_generation_prompt, sanitize_control_tokens: see `engine.chat_template.TemplateOptions`.
    """

    echo: ClassVar[bool] = False  # of completions alone
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[int | None, _limits("max_new_tokens")] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, _limits("top_logprobs")] = None
    tools: _Objects | None = None
    tool_choice: Literal["none", "auto"] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    sanitize_control_tokens: bool = True

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are the same thing, and differ: leave one out")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt contradict each other: leave one out")
        if self.tool_choice == "auto" and not self.tools:
            raise ValueError("tool_choice is for tools, and there are none")
        return self


class CompletionRequest(_Request):
    """Of /v1/completions. best_of: the best n texts of a search with so many beams. max_tokens: 16 by default; 0 only
    scores the prompt, with echo and logprobs."""

    prompt: Any
    max_tokens: int | None = Field(default=None, ge=0)
    best_of: int | None = Field(default=None, ge=1)
    echo: bool = False
    logprobs: Annotated[int | None, _limits("top_logprobs")] = None

    @field_validator("prompt")
    @classmethod
    def _is_a_prompt(cls, value: object) -> object:
        """By hand: a union of lists would have an error for each of its elements."""
        is_prompt = isinstance(value, str) or _are_ids(value)
        if is_prompt or (isinstance(value, list) and value and all(isinstance(text, str) for text in value)):
            return value
        if isinstance(value, list) and value and all(map(_are_ids, value)):
            return value
        raise ValueError(
            "a prompt is a text, a list of texts, token ids, or a list of lists of token ids; none is empty"
        )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of={self.best_of} texts are searched for, and n={self.n} returned: raise best_of")
        if self.best_of is not None and self.engine.num_beams is not None:
            raise ValueError("best_of and engine.num_beams are the same thing: leave one out")
        if self.max_tokens == 0 and not (self.echo and self.logprobs is not None):
            raise ValueError("max_tokens=0 generates nothing: it is for echo with logprobs, which score the prompt")
        if self.max_tokens == 0 and (idle := sorted(self.model_fields_set - _OF_SCORING)):
            raise ValueError(f"max_tokens=0 generates nothing, so {', '.join(idle)} cannot apply: leave it out")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One text or list of ids each."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt


_OF_SCORING = {
    "model", "prompt", "max_tokens", "echo", "logprobs", "stream", "stream_options", "temperature", "seed", "n", "user",
    "metadata",
}  # fmt: skip


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token < 2**31 for token in value)
