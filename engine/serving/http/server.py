"""Runs the app with uvicorn until a signal ends it."""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def allowed_hosts(host: str) -> tuple[str, ...] | None:
    """By which names a server may be called that listens at `host`: see `limits.Gate`."""
    return LOOPBACK if host in LOOPBACK else None


def run(app: FastAPI, host: str, port: int, drain_s: int) -> None:
    """Serve. SIGTERM and Ctrl-C: no new connections; requests that run have `drain_s` seconds to end."""
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_s,
    )
