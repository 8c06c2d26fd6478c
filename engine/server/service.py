"""`Service`: runs the texts of HTTP requests in one batch."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from caches import CacheError
from caches.platform.out_of_memory import is_out_of_memory
from caches.platform.undo import on_failure
from configs import ConfigError
from engine.errors import (
    EngineError,
    GenerationCancelled,
    GenerationInterrupted,
    InputError,
    OptionError,
    OutOfMemoryError,
)
from engine.memory.plan import usable_caches
from engine.prompt import EncodedPrompt
from engine.request.inputs.checks import check_vocabulary
from engine.result import Generation, StreamChunk, TokenLogprob
from engine.scoring import scoring
from engine.server.answers import Answer, added, error
from engine.server.bodies import ChatRequest, CompletionRequest
from engine.server.metrics import Metrics, TokenClock
from engine.server.reading import (
    MOST_LOGPROBS_WRITTEN,
    Limits,
    characters,
    chat_ids,
    completion_ids,
    continues,
    logprobs_asked,
    parameters,
)
from engine.server.texts import LONG_CHARACTERS, Texts
from engine.serving.batch import Batch
from engine.serving.batch_request import BatchRequest
from engine.serving.counts import BatchState

_ENCODED_TOKENS = 4096  # of a prompt, for encoders whose settings have no limit
_NO_MEMORY = "memory is out, so the request was not read: try again later, or send a shorter one"


class ServedGenerator(Protocol):
    """A `Generator`."""

    model: Any
    tokenizer: object

    @property
    def pools(self) -> dict[str, int]: ...

    @property
    def prefix_failures(self) -> int: ...

    def batch(self, *, slots: int) -> Batch: ...


class Refusal(Exception):
    """An answer with an error: its HTTP status, its body, and seconds after which to try again."""

    def __init__(self, status: int, body: Mapping[str, object], retry_s: int | None = None):
        super().__init__(status)
        self.status, self.body = status, body
        self.headers = {} if retry_s is None else {"Retry-After": str(retry_s)}

    @classmethod
    def of_bad_request(cls, message: str) -> Refusal:
        return cls(400, error(message, "invalid_request_error"))


@dataclass
class _Text:
    """A prompt and what is generated after it. scored: the run that gives the log probabilities of the prompt; None
    where they are not echoed. request: the run that continues it; None where nothing is generated.
    """

    ids: list[int]
    clock: TokenClock
    scored: BatchRequest | None = None
    request: BatchRequest | None = None

    @property
    def runs(self) -> list[BatchRequest]:
        return [run for run in (self.scored, self.request) if run is not None]

    def prompt_logprobs(self) -> list[TokenLogprob | int]:
        """Of the prompt's tokens; the first one has none."""
        if self.scored is None:
            return [self.ids[0]]
        logprobs = self.scored.result().logprobs
        assert logprobs is not None
        return [self.ids[0], *logprobs[0]]

    def check_scored(self) -> None:
        """Raise `EngineError` if the time was out before all of the prompt was scored."""
        if self.scored is not None and self.scored.result().finish_reasons != ["length"]:
            raise EngineError("the time of the request was out before its prompt was scored")


@dataclass
class Job:
    """The texts of one HTTP request."""

    body: ChatRequest | CompletionRequest
    answer: Answer
    texts: list[_Text] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Texts per prompt."""
        return self.body.n

    @property
    def runs(self) -> list[BatchRequest]:
        return [run for text in self.texts for run in text.runs]

    def cancel(self) -> None:
        for run in self.runs:
            run.cancel()

    @property
    def usage(self) -> dict[str, object]:
        results = [text.request.result() for text in self.texts if text.request is not None]
        return added(results, sum(len(text.ids) for text in self.texts))


class Service:
    """generator: with a tokenizer. name: of the model, in requests. limits: per request. max_queue: prompts that may
    wait for a slot."""

    def __init__(self, generator: ServedGenerator, name: str, limits: Limits, max_queue: int):
        if generator.tokenizer is None:
            raise OptionError("a server needs a tokenizer: Generator(model, tokenizer)")
        self._generator, self.name, self.limits, self._max_queue = generator, name, limits, max_queue
        self._has_encoder = generator.model.config.is_encoder_decoder  # then its answer has a context of its own
        self._prompt_tokens = _prompt_tokens(generator.model.config, limits.context_tokens)
        self._texts = Texts(generator.tokenizer, self._prompt_tokens)
        self._long_texts = ThreadPoolExecutor(1, "long texts")  # one at a time, and short ones do not wait for them
        self._batch = generator.batch(slots=limits.max_rows)
        self._open: set[asyncio.Task[None]] = set()  # one for each run, until its end
        self._typical_s = 1.0  # of a run
        self.caches = usable_caches(generator.model)  # their names
        self.metrics = Metrics(self)

    @property
    def state(self) -> BatchState:
        return self._batch.state

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered."""
        return self._batch.is_alive

    @property
    def prefix_bytes(self) -> int:
        return self._generator.pools["prefix_bytes"]

    @property
    def prefix_failures(self) -> int:
        return self._generator.prefix_failures

    async def close(self) -> None:
        """Cancel what still runs."""
        await asyncio.to_thread(self._batch.close, True)
        await asyncio.gather(*self._open, return_exceptions=True)

    async def begin(self, body: ChatRequest | CompletionRequest) -> Job:
        """Submit the texts of a request. Raises `Refusal`."""
        if body.model != self.name:
            message = f"the model {body.model!r:.100} is not here: this server has {self.name!r}"
            raise Refusal(404, error(message, "invalid_request_error", "model_not_found"))
        likeliest, is_chat = logprobs_asked(body), isinstance(body, ChatRequest)
        goes_on = continues(body) and not self._has_encoder
        answer = Answer(self.name, is_chat, self._generator.tokenizer, likeliest, goes_on, body.has_form)
        job = Job(body, answer)
        scores = body.echo and likeliest is not None
        needed = (1 if isinstance(body, ChatRequest) else len(body.prompts)) * ((body.max_tokens != 0) + scores)
        self._check_encoder(body)
        self._check_room(needed)  # before the prompts are read, which takes a while, and after
        try:
            with on_failure(job.cancel):
                prompts, arguments_of_all = await self._reading(body)
                self._check_size(body, prompts, arguments_of_all)
                self._check_room(needed)
                for ids, arguments in zip(prompts, arguments_of_all, strict=True):
                    text = _Text(ids, self.metrics.clock())
                    job.texts.append(text)
                    if scores and len(ids) > 1:
                        counted = len(ids) if body.max_tokens == 0 else 0  # else with the run that generates
                        text.scored = self._submitted(ids[:1], is_chat, _scoring(ids, arguments), counted)
                    if body.max_tokens != 0:
                        text.request = self._submitted(ids, is_chat, arguments, len(ids))
        except EngineError as failed:
            raise refusal(failed) from None
        return job

    def _check_encoder(self, body: ChatRequest | CompletionRequest) -> None:
        if not self._has_encoder:
            return
        asked = ["echo"] if body.echo else []
        asked += [name for name in ("presence_penalty", "frequency_penalty") if getattr(body, name)]
        if asked:
            message = f"{', '.join(asked)}: the model has an encoder, so its answer does not continue the prompt"
            raise Refusal.of_bad_request(message)

    def _check_size(
        self, body: ChatRequest | CompletionRequest, prompts: list[list[int]], arguments_of_all: list[dict[str, Any]]
    ) -> None:
        """Refuse more log probabilities than can be written."""
        likeliest = logprobs_asked(body)
        if likeliest is None:
            return
        lengths = [
            (len(ids) if body.echo else 0) + arguments["max_new_tokens"]
            for ids, arguments in zip(prompts, arguments_of_all, strict=True)
        ]
        count = body.n * sum(lengths) * (1 + likeliest)
        if count > MOST_LOGPROBS_WRITTEN:
            message = (
                f"the answer may have {count:,} log probabilities, and this server writes {MOST_LOGPROBS_WRITTEN:,}"
            )
            raise Refusal.of_bad_request(f"{message}: ask for fewer texts, tokens or top_logprobs")

    async def _reading(self, body: ChatRequest | CompletionRequest) -> tuple[list[list[int]], list[dict[str, object]]]:
        """See `_read`, in another thread."""
        pool = self._long_texts if characters(body) > LONG_CHARACTERS else None
        return await asyncio.get_running_loop().run_in_executor(pool, self._read, body)

    def _read(self, body: ChatRequest | CompletionRequest) -> tuple[list[list[int]], list[dict[str, object]]]:
        """The prompts' ids, and the parameters of each."""
        texts, model = self._texts, self._generator.model
        prompts = [chat_ids(body, texts)] if isinstance(body, ChatRequest) else completion_ids(body, texts)
        for ids in prompts:
            if self._has_encoder and len(ids) > self._prompt_tokens:
                raise InputError(
                    f"the prompt has {len(ids):,} tokens, but the model's encoder reads {self._prompt_tokens:,}: "
                    "shorten the prompt"
                )
            check_vocabulary(model, torch.tensor(ids, device="cpu"))
        check_vocabulary(model, torch.tensor([*body.logit_bias], device="cpu"), "logit_bias: ")
        return prompts, [parameters(body, 0 if self._has_encoder else len(ids), self.limits) for ids in prompts]

    def _check_room(self, needed: int) -> None:
        limit = self.limits.max_rows + self._max_queue
        if needed > limit:
            message = f"{needed} prompts in one request (one that is scored and continued counts twice)"
            raise Refusal.of_bad_request(f"{message}, and this server takes {limit} at once: send fewer prompts")
        if len(self._open) + needed > limit:
            wait_s = math.ceil(self._typical_s * len(self._open) / self.limits.max_rows)
            message = f"{len(self._open)} prompts run or wait, and this server takes {limit} at once: try again later"
            raise Refusal(429, error(message, "rate_limit_error", "queue_full"), max(1, wait_s))

    def _submitted(
        self, ids: list[int], is_chat: bool, parameters: Mapping[str, object], prompt_tokens: int
    ) -> BatchRequest:
        prompt = EncodedPrompt(torch.tensor([ids], device="cpu"), is_chat, stops_in_prompt=False)
        request = self._batch.submit(prompt, **parameters)
        task = asyncio.create_task(self._count(request, prompt_tokens))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return request

    async def _count(self, request: BatchRequest, prompt_tokens: int) -> None:
        """Wait for the end of a run, and measure it. prompt_tokens: 0 where they are counted with another run."""
        begun = time.monotonic()
        result: object = None
        try:
            result = await request
        except EngineError as failed:
            result = getattr(failed, "partial", None)
        except Exception:  # an error of the engine's own; `chunks` reports it
            return
        if isinstance(result, Generation):
            self.metrics.add(result, prompt_tokens if result.stats.prompt_tokens else 0)
        self._typical_s += 0.1 * (time.monotonic() - begun - self._typical_s)

    async def chunks(self, job: Job) -> AsyncGenerator[tuple[int, StreamChunk | None], None]:
        """The chunks of all texts as they come, with the index of the choice; None before the first of each prompt.
        Raises the error of the first run that fails."""
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def read(number: int, text: _Text) -> None:
            try:
                if text.scored is not None:
                    await text.scored
                    text.check_scored()
                first_choice, has_begun = number * job.rows, False
                async for chunk in _chunks_of(text):
                    if not has_begun:
                        queue.put_nowait((first_choice, None))
                        has_begun = True
                    if chunk is not None:
                        text.clock.see(chunk)
                        queue.put_nowait((first_choice + chunk.row, chunk))
                queue.put_nowait(None)
            except Exception as failed:
                queue.put_nowait(failed)

        tasks = [asyncio.create_task(read(number, text)) for number, text in enumerate(job.texts)]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            job.cancel()  # of runs that have ended it changes nothing
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)


def _prompt_tokens(config: Any, context: int | None) -> Any:
    """How many tokens a prompt may have; None for no limit. An encoder reads all of them at once: it has one always."""
    if not config.is_encoder_decoder:
        return context
    encoder_config = config.get_text_config(encoder=True)
    names = ("max_encoder_position_embeddings", "max_position_embeddings")
    return next((size for name in names if (size := getattr(encoder_config, name, None))), context or _ENCODED_TOKENS)


async def _chunks_of(text: _Text) -> AsyncIterator[StreamChunk | None]:
    """Those of the run that continues a prompt, or None once where there is no such run."""
    if text.request is None:
        yield None
        return
    async for chunk in text.request:
        yield chunk


def _scoring(ids: Sequence[int], arguments: Mapping[str, object]) -> dict[str, object]:
    """The parameters of the run that gives the log probabilities of a prompt."""
    shared = {
        name: arguments[name] for name in ("cache", "cache_config", "max_time", "top_logprobs") if name in arguments
    }
    return scoring([ids]) | shared


def refusal(failed: Exception) -> Refusal:
    """The answer to an error of a request."""
    if isinstance(failed, OutOfMemoryError):
        body = error(str(failed), "server_error", "out_of_memory")
        return Refusal(503, body | _partial(failed), retry_s=5)
    if is_out_of_memory(failed):
        return Refusal(503, error(_NO_MEMORY, "server_error", "out_of_memory"), retry_s=5)
    if isinstance(failed, GenerationCancelled):
        return Refusal(503, error("the server is shutting down", "server_error") | _partial(failed))
    if isinstance(failed, GenerationInterrupted) and isinstance(failed.__cause__, OptionError):
        return Refusal(400, error(str(failed), "invalid_request_error") | _partial(failed))
    if isinstance(failed, GenerationInterrupted):
        return Refusal(500, error(str(failed), "server_error") | _partial(failed))
    if isinstance(failed, (InputError, OptionError, ConfigError, CacheError)):
        return Refusal.of_bad_request(str(failed))
    if isinstance(failed, EngineError):
        return Refusal(503, error(str(failed), "server_error"))
    return Refusal(500, error(f"an error of the server's own: {type(failed).__name__}", "server_error"))


def _partial(failed: GenerationInterrupted) -> dict[str, object]:
    return {"partial": failed.partial.text}
