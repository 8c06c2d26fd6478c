"""Runs the app with uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from engine.server.connections import ACCEPTED, HEAD_BYTES, Connection
from engine.server.listening import BACKLOG
from engine.server.service import Service

_AFTER_S = 5  # from the end of the runs to that of the last answers


class _Server(uvicorn.Server):
    """Cancels what runs `drain_s` seconds after the signal, so that clients get what there is.

    started: called with the address, once requests are taken.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: int, started: Callable[[str], None]):
        super().__init__(config)
        self._service, self._drain_s, self._announce = service, drain_s, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for opened in sockets or ():
            opened.listen(BACKLOG)  # uvicorn's own is that of `ACCEPTED`
        host, port, *_ = self.servers[0].sockets[0].getsockname()
        self._announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async def cancel() -> None:
            await asyncio.sleep(self._drain_s)
            await self._service.close()

        cancelling = asyncio.create_task(cancel())
        try:
            await super().shutdown(sockets)
        finally:
            cancelling.cancel()


def uvicorn_config(app: FastAPI, drain_s: int) -> uvicorn.Config:
    """drain_s: for requests that run when the server is stopped. See `connections` for the limits."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        h11_max_incomplete_event_size=HEAD_BYTES,
        backlog=ACCEPTED,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_s + _AFTER_S,
    )


def run(
    app: FastAPI,
    service: Service,
    sockets: list[socket.socket],
    drain_s: int,
    started: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve. SIGTERM and Ctrl-C: no new connections; requests that run have `drain_s` seconds to end.

    sockets: see `listening.listen`. started: called with the address once requests are taken.
    """
    _Server(uvicorn_config(app, drain_s), service, drain_s, started).run(sockets)
