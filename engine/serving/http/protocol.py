"""The bodies of requests: fields of OpenAI's protocol, and those of ours under `engine`. Unknown fields are refused."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from transformers import PreTrainedTokenizerBase

MOST_LOGPROBS = 20
_Text: TypeAlias = Annotated[str, Field(max_length=2000)]
_Ids: TypeAlias = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_TEMPLATE_OWN = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class EngineOptions(_Body):
    """What OpenAI's protocol has no name for: parameters of `engine.generate` by their names.

    cache_config takes no folder: requests name no paths. chat_template_kwargs: what a model's template takes besides
    messages and tools.
    """

    cache: str | None = None
    cache_config: dict[str, Any] = {}
    strategy: str | None = None
    num_beams: int | None = Field(default=None, ge=1)
    num_beam_groups: int | None = Field(default=None, ge=1)
    diversity_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    penalty_alpha: float | None = Field(default=None, ge=0, le=1)
    prompt_lookup_num_tokens: int | None = Field(default=None, ge=1, le=256)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    min_new_tokens: int | None = Field(default=None, ge=0)
    json_schema: dict[str, Any] | None = None
    regex: _Text | None = None
    choices: list[_Text] | None = Field(default=None, min_length=1, max_length=1000)
    grammar: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("cache_config")
    @classmethod
    def _names_no_folder(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "folder" in value:
            raise ValueError("a request names no folder: the server's own is used")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _is_for_the_template(cls, value: dict[str, Any]) -> dict[str, Any]:
        if own := _TEMPLATE_OWN & set(value):
            raise ValueError(f"{', '.join(sorted(own))} cannot be set here")
        return value


class StreamOptions(_Body):
    include_usage: bool = False


class _Request(_Body):
    """What both kinds of requests have. user and metadata change nothing."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int = Field(default=1, ge=1)
    stop: _Text | Annotated[list[_Text], Field(max_length=16)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = Field(default=0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default={}, max_length=1024)
    user: str | None = None
    metadata: dict[str, str] | None = None
    engine: EngineOptions = EngineOptions()

    @field_validator("n", "presence_penalty", "frequency_penalty", "logit_bias", "stream", "engine", mode="before")
    @classmethod
    def _none_is_the_default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].get_default() if value is None else value

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream: true")
        return self


class Message(BaseModel):
    """Further fields are the template's business."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None

    @field_validator("content")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """Parts of text as one text."""
        if not isinstance(value, list):
            return value
        for part in value:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"a part of type {part.get('type')!r:.40}: parts are texts here")
        return "".join(part["text"] for part in value)


class ChatRequest(_Request):
    """Of /v1/chat/completions. max_completion_tokens and max_tokens are the same."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Any:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are the same thing, and differ: leave one out")
        if self.tool_choice == "auto" and not self.tools:
            raise ValueError("tool_choice is for tools, and there are none")
        return self


class CompletionRequest(_Request):
    """Of /v1/completions. best_of: the best n texts of a search with so many beams. max_tokens: 16 by default; 0 only
    scores the prompt, with echo and logprobs."""

    prompt: str | _Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[_Ids], Field(min_length=1)]
    max_tokens: int | None = Field(default=None, ge=0)
    best_of: int | None = Field(default=None, ge=1)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    response_format: dict[str, Any] | None = None

    @field_validator("echo", mode="before")
    @classmethod
    def _none_is_false(cls, value: Any) -> Any:
        return False if value is None else value

    @model_validator(mode="after")
    def _fits_together(self) -> Any:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of={self.best_of} texts are searched for, and n={self.n} returned: raise best_of")
        if self.best_of is not None and self.engine.num_beams is not None:
            raise ValueError("best_of and engine.num_beams are the same thing: leave one out")
        if self.max_tokens == 0 and not (self.echo and self.logprobs is not None):
            raise ValueError("max_tokens=0 generates nothing: it is for echo with logprobs, which score the prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One text or list of ids each."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # type: ignore[list-item, return-value]
