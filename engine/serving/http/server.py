"""Runs the app with uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence

import uvicorn
from fastapi import FastAPI

from engine.serving.http.gate import host_name
from engine.serving.http.service import Service

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_AFTER_S = 5  # from the end of the runs to that of the last answers


def allowed_hosts(host: str, more: Sequence[str] = ()) -> tuple[str, ...] | None:
    """By which names a server may be called that listens at `host`: see `gate.Gate`."""
    if host == "localhost" or _is_loopback(host):
        return (*LOOPBACK, host.lower(), *map(host_name, more))
    return tuple(map(host_name, more)) or None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Server(uvicorn.Server):
    """Cancels what runs `drain_s` seconds after the signal, so that clients get what there is.

    started: called with the address, once requests are taken.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: int, started: Callable[[str], None]):
        super().__init__(config)
        self._service, self._drain_s, self._announce = service, drain_s, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        port = self.servers[0].sockets[0].getsockname()[1]
        self._announce(f"http://{host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async def cancel() -> None:
            await asyncio.sleep(self._drain_s)
            await self._service.close()

        cancelling = asyncio.create_task(cancel())
        try:
            await super().shutdown(sockets)
        finally:
            cancelling.cancel()


def run(
    app: FastAPI, service: Service, host: str, port: int, drain_s: int, started: Callable[[str], None] = lambda _: None
) -> None:
    """Serve. SIGTERM and Ctrl-C: no new connections; requests that run have `drain_s` seconds to end.

    port: 0 for any that is free. started: called with the address once requests are taken.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_s + _AFTER_S,
    )
    _Server(config, service, drain_s, started).run()
