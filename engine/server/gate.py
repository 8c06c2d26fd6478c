"""What is refused before a request is read: bodies that are too large or too slow, other hosts, a missing key.

Every answer has the header x-request-id: that of the request, or one that is made here.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import traceback
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any, TypeAlias

from caches.platform.host_allocator import give_back_freed_memory
from caches.platform.out_of_memory import is_out_of_memory
from engine.server.answers import error
from engine.server.listening import host_name

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_logger = logging.getLogger("engine")
_BODY_S = 30.0  # for a body to arrive
_MOST_BODIES = 32  # of the largest size, that arrive at once
_LARGE_BYTES, _GIVE_BACK_S = 2**16, 1.0  # of a body; after its request, for all that end meanwhile
# A body that is too large is read up to so many times the limit and discarded: many clients read no answer before they
# have sent everything.
_READ_FACTOR = 8
_REQUEST_ID = re.compile(rb"[\w.:=+/-]{1,128}", re.ASCII)


def places_of(failed: BaseException) -> str:
    """Where an error was raised, for the log: its message may hold a text."""
    frames = traceback.extract_tb(failed.__traceback__)
    return ", ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames))


class Gate:
    """An ASGI middleware. api_key: what requests under /v1 and /metrics bring as a bearer token; None for no key.

    posted: the paths whose bodies are read. hosts: names by which the server may be called; None for any. It keeps web
    pages of others, whose names resolve to this machine, from using a server that is for this machine alone.
    """

    def __init__(
        self, app: App, posted: Collection[str], most_bytes: int, api_key: str | None, hosts: tuple[str, ...] | None
    ):
        self._app, self._posted = app, posted
        self._most_bytes, self._api_key, self._hosts = most_bytes, api_key, hosts
        self._arriving = 0  # bytes of bodies
        self._gives_back = False  # memory, soon

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        asked = headers.get(b"x-request-id", b"")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex.encode()
        has_begun = False

        async def send_named(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
            await send(message)

        try:
            await self._answer(scope, headers, receive, send_named)
        except Exception as failed:
            if has_begun:
                raise
            _logger.error(
                "request %s failed with %s at %s", request_id.decode(), type(failed).__name__, places_of(failed)
            )
            status, message = 500, f"an error of the server's own: {type(failed).__name__}"
            if is_out_of_memory(failed):
                status, message = 503, "memory is out: try again later"
            await _refuse(send_named, status, error(message, "server_error"))

    async def _answer(
        self, scope: MutableMapping[str, Any], headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        if (refusal := self._refusal(scope["path"], headers)) is not None:
            await _refuse(send, *refusal)
            return
        if scope["method"] != "POST" or scope["path"] not in self._posted:  # what is wrong there is not the body
            # Of an answer to HEAD the protocol leaves out the body.
            await self._app({**scope, "method": "GET"} if scope["method"] == "HEAD" else scope, receive, send)
            return
        if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
            message = "the body is JSON: send the header Content-Type: application/json"
            await _refuse(send, 415, error(message, "invalid_request_error"))
            return
        if (coding := headers.get(b"content-encoding", b"identity").strip().lower()) not in (b"identity", b""):
            message = f"the body is coded as {coding.decode('latin-1')!r:.40}: send it plain, without Content-Encoding"
            await _refuse(send, 415, error(message, "invalid_request_error"))
            return
        try:
            body = await asyncio.wait_for(self._read_body(headers, receive), _BODY_S)
        except asyncio.TimeoutError:
            message = f"the body did not arrive within {_BODY_S:.0f} s"
            await _refuse(send, 408, error(message, "invalid_request_error"))
            return
        if body is None:
            return
        if isinstance(body, int):
            message = f"the body has {body:,} bytes, and this server reads {self._most_bytes:,}"
            await _refuse(send, 413, error(message, "invalid_request_error"))
            return
        is_large = len(body) > _LARGE_BYTES
        replayed = _replayed(body, receive)
        del body
        try:
            await self._app(scope, replayed, send)
        finally:
            if is_large and not self._gives_back:
                self._gives_back = True
                asyncio.get_running_loop().call_later(_GIVE_BACK_S, self._give_back)

    def _give_back(self) -> None:
        """The memory of large bodies and their tokens, which the allocator would keep."""
        self._gives_back = False
        asyncio.get_running_loop().run_in_executor(None, give_back_freed_memory)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> tuple[int, dict[str, object]] | None:
        name = host_name(headers.get(b"host", b"").decode("latin-1"))
        if self._hosts is not None and name not in self._hosts:
            return 403, error("this server does not go by that host name", "invalid_request_error")
        if self._api_key is not None and (path.startswith("/v1") or path == "/metrics"):
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            is_right = hmac.compare_digest(key.strip(), self._api_key.encode())
            if scheme.lower() != b"bearer" or not is_right:
                message = "the API key is missing or wrong: send the header Authorization: Bearer KEY"
                return 401, error(message, "authentication_error", "invalid_api_key")
        return None

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | int | None:
        """The body; its bytes where these are too many; None where the client has left."""
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > _READ_FACTOR * self._most_bytes:
            return int(declared[:20])
        received, size = [], 0
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                piece = message.get("body", b"")
                size += len(piece)
                if size <= self._most_bytes:
                    received.append(piece)
                    self._arriving += len(piece)
                if self._arriving > _MOST_BODIES * self._most_bytes:
                    raise MemoryError
                if not message.get("more_body") or size > _READ_FACTOR * self._most_bytes:
                    return b"".join(received) if size <= self._most_bytes else size
        finally:
            self._arriving -= sum(map(len, received))


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` with the body, which was read, before what comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


async def _refuse(send: Send, status: int, body: Mapping[str, object]) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status in (408, 413, 503):  # what is left of the body is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
