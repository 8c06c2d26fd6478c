"""The routes of the server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

import strategies
from caches.platform.out_of_memory import is_out_of_memory
from engine.errors import InputError
from engine.result import StreamChunk
from engine.server.answers import error
from engine.server.bodies import ChatRequest, CompletionRequest
from engine.server.gate import Gate, places_of
from engine.server.service import Job, Refusal, Service, refusal
from engine.version import __version__

T = TypeVar("T")
_logger = logging.getLogger("engine")
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/favicon.ico": ("favicon.svg", "image/svg+xml"),
}
_SAFE = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_STREAMED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def make_app(
    service: Service, most_bytes: int, api_key: str | None = None, hosts: tuple[str, ...] | None = None
) -> FastAPI:
    """most_bytes: of a request's body. api_key, hosts: see `gate.Gate`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(title="kvengine", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(Gate, posted=(_CHAT, _COMPLETIONS), most_bytes=most_bytes, api_key=api_key, hosts=hosts)

    @app.post(_CHAT)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _answered(service, body, request)

    @app.post(_COMPLETIONS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _answered(service, body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [_described(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.name:
            message = f"the model {name!r:.100} is not here: this server has {service.name!r}"
            return JSONResponse(error(message, "invalid_request_error", "model_not_found"), 404)
        return JSONResponse(_described(service))

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/health")
    async def is_alive() -> Response:
        alive = service.is_alive
        return JSONResponse({"status": "ok" if alive else "the batch has stopped"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for path, (name, media_type) in _PAGE.items():
        app.add_api_route(path, _file(name, media_type), include_in_schema=False)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, wrong: RequestValidationError) -> Response:
        service.metrics.ended("refused")
        problem, *further = wrong.errors()
        if problem["type"] == "json_invalid":
            message = f"the body is no JSON: {problem['ctx']['error']} at character {problem['loc'][-1]}"
            return JSONResponse(error(message, "invalid_request_error"), 400)
        param = ".".join(str(field) for field in problem["loc"] if field != "body")
        count = f" (and {len(further)} more)" if further else ""
        message = f"{param or 'the body'}: {problem['msg'].removeprefix('Value error, ')}{count}"
        return JSONResponse(error(message, "invalid_request_error", param=param or None), 400)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, wrong: HTTPException) -> Response:
        if (cause := wrong.__cause__) is not None:  # of a body that cannot be parsed
            return _failed(service, _unread(cause))
        message = str(wrong.detail)
        if wrong.status_code in (404, 405):
            asked = f"{request.method} {request.url.path}"
            message = f"{message}: {asked:.100}; this server has POST {_CHAT}, POST {_COMPLETIONS} and GET /v1/models"
        return JSONResponse(error(message, "invalid_request_error"), wrong.status_code, wrong.headers)

    return app


def _unread(cause: BaseException) -> Exception:
    """Why a body could not be parsed, as an error that `refusal` has an answer to."""
    if is_out_of_memory(cause):
        return MemoryError()
    if isinstance(cause, RecursionError):
        return InputError("the body is nested too deeply")
    if isinstance(cause, UnicodeDecodeError):
        return InputError(f"the body is no text in UTF-8: byte {cause.start:,} cannot be read")
    return InputError(f"the body cannot be read: {type(cause).__name__}")


def _file(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    content = (files("engine.server") / "page" / name).read_bytes()

    async def send() -> Response:
        return Response(content, media_type=f"{media_type}; charset=utf-8", headers=_SAFE)

    return send


def _described(service: Service) -> dict[str, object]:
    limits = service.limits
    abilities = {"caches": service.caches, "strategies": strategies.names(), "context_tokens": limits.context_tokens}
    maxima = {"max_tokens": limits.max_tokens, "max_rows": limits.max_rows}
    return {"id": service.name, "object": "model", "created": 0, "owned_by": "kvengine", "engine": abilities | maxima}


async def _answered(service: Service, body: ChatRequest | CompletionRequest, request: Request) -> Response:
    """Run a request to its end, or until its first chunk is there where it streams."""
    try:
        job = await _while_connected(request, service.begin(body))
        chunks = service.chunks(job)
        async with AsyncExitStack() as on_error:
            on_error.push_async_callback(chunks.aclose)
            chunk = await _while_connected(request, anext(chunks) if body.stream else _to_end(chunks))
            on_error.pop_all()
    except _Disconnected:
        service.metrics.ended("cancelled")
        return Response(status_code=499)
    except Exception as failed:
        return _failed(service, failed)
    if chunk is not None:
        events = _events(service, job, chunk, chunks)
        return StreamingResponse(events, media_type="text/event-stream", headers=_STREAMED)
    service.metrics.ended("ok")
    return await asyncio.to_thread(lambda: JSONResponse(_complete(job)))  # log probabilities take a while


async def _to_end(chunks: AsyncIterator[object]) -> None:
    async for _ in chunks:
        pass


class _Disconnected(Exception):
    """The client has left."""


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """What `work` returns. Raises `_Disconnected` if the client leaves before."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _Disconnected
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        del work, working, leaving  # an error has this frame, and with it the task would have itself, and its memory


def _failed(service: Service, failed: Exception) -> Response:
    refused = _counted_refusal(service, failed)
    return JSONResponse(refused.body, refused.status, refused.headers)


def _counted_refusal(service: Service, failed: Exception) -> Refusal:
    """The answer to an error. The log has the place of an unknown one, but no message, which may hold a text."""
    refused = failed if isinstance(failed, Refusal) else refusal(failed)
    service.metrics.ended("full" if refused.status == 429 else "failed" if refused.status >= 500 else "refused")
    if refused.status == 500:
        origin = failed.__cause__ or failed
        _logger.error("a request failed with %s at %s", type(origin).__name__, places_of(origin))
    return refused


def _complete(job: Job) -> dict[str, object]:
    """The object of a request that does not stream."""
    choices = []
    for number, text in enumerate(job.texts):
        echoed, scored = _echo(job, number) if job.body.echo else ("", [])
        if text.request is None:
            indices = range(number * job.rows, (number + 1) * job.rows)
            choices += [job.answer.choice(index, echoed, scored, "", [], "length") for index in indices]
            continue
        result = text.request.result()
        assert result.text is not None
        for row, text_of_row in enumerate(result.text):
            logprobs = [] if result.logprobs is None else result.logprobs[row]
            index, reason = number * job.rows + row, result.finish_reasons[row]
            text_of_row = job.answer.with_space(index, result.tokens[row], text_of_row)
            choices.append(job.answer.choice(index, echoed, scored, text_of_row, logprobs, reason))
    return job.answer.complete(choices, job.usage)


def _echo(job: Job, number: int) -> tuple[str, list[Any]]:
    """The text of a prompt, and its tokens with log probabilities where they are wanted."""
    assert isinstance(job.body, CompletionRequest)
    text, prompt = job.texts[number], job.body.prompts[number]
    prompt_text = (
        prompt if isinstance(prompt, str) else job.answer.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
    )
    return prompt_text, text.prompt_logprobs() if job.answer.logprobs is not None else []


async def _events(
    service: Service, job: Job, begun: tuple[int, Any], chunks: AsyncIterator[tuple[int, Any]]
) -> AsyncIterator[str]:
    """The chunks as server-sent events. begun: the first of the chunks."""
    options, outcome = job.body.stream_options, "cancelled"
    asks_usage = options is not None and options.include_usage

    def event(written: dict[str, Any]) -> str:
        return _event({"usage": None} | written if asks_usage else written)

    try:
        for written in _objects(job, *begun):
            yield event(written)
        async for chunk in chunks:
            for written in _objects(job, *chunk):
                yield event(written)
        if asks_usage:
            yield _event(job.answer.usage_chunk(job.usage))
        yield "data: [DONE]\n\n"
        outcome = "ok"
    except Exception as failed:
        outcome = ""
        yield _event(_counted_refusal(service, failed).body)
        yield "data: [DONE]\n\n"
    finally:
        job.cancel()
        if outcome:
            service.metrics.ended(outcome)


def _event(written: Mapping[str, object]) -> str:
    return f"data: {json.dumps(written)}\n\n"


def _objects(job: Job, index: int, chunk: StreamChunk | None) -> list[dict[str, object]]:
    """What is written for a chunk: see `Service.chunks`."""
    if chunk is not None:
        return [job.answer.chunk(index, chunk)]
    indices = range(index, index + job.rows)
    if job.answer.is_chat:
        return [job.answer.first(choice) for choice in indices]
    if not job.body.echo:
        return []
    prompt_text, scored = _echo(job, index // job.rows)
    reason = "length" if job.texts[index // job.rows].request is None else None  # nothing follows
    return [job.answer.echo(choice, prompt_text, scored, reason) for choice in indices]
