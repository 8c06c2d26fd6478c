"""A server in a thread of this process or in one of its own, on a port of its own."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from openai import OpenAI

import engine
from engine.server.app import make_app
from engine.server.listening import LOOPBACK
from engine.server.reading import Limits
from engine.server.server import uvicorn_config
from engine.server.service import Service

NAME = "shipped"


@dataclass
class Served:
    """url: without a path. http: a client of it. openai: OpenAI's own client."""

    url: str
    gen: engine.Generator
    service: Service
    http: httpx.Client
    openai: OpenAI

    def metric(self, name: str) -> float:
        """A value of /metrics, by its name with labels."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.rpartition(" ")[0] == f"kvengine_{name}":
                return float(line.rpartition(" ")[2])
        return 0.0

    def wait_until_idle(self, seconds: float = 20) -> None:
        self.wait_for(lambda: not (self.service._open or self.service.state.running), seconds)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{len(self.service._open)} are open, {self.service.state}"
            time.sleep(0.01)


@contextmanager
def served(
    gen: engine.Generator,
    *,
    context_tokens: int | None = 2048,
    max_tokens: int = 256,
    max_rows: int = 8,
    max_time_s: float = 60,
    max_queue: int = 64,
    most_bytes: int = 2**20,
    api_key: str | None = None,
) -> Iterator[Served]:
    service = Service(gen, NAME, Limits(context_tokens, max_tokens, max_rows, max_time_s), max_queue)
    app = make_app(service, most_bytes, api_key, LOOPBACK)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        server = uvicorn.Server(uvicorn_config(app, 5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        url = f"http://127.0.0.1:{port}"
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        client: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": api_key or "none", "max_retries": 0}
        try:
            with httpx.Client(base_url=url, headers=headers, timeout=60) as http, OpenAI(**client) as openai:
                yield Served(url, gen, service, http, openai)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@dataclass
class Command:
    """`engine serve` in a process of its own. said: what it has written so far."""

    process: subprocess.Popen
    log: Path
    url: str = ""

    @property
    def said(self) -> str:
        return self.log.read_text()


@contextmanager
def command(*options: str, space_mib: int | None = None, **environment: str) -> Iterator[Command]:
    """It once it answers, and an end of it. space_mib: all that it may map."""

    def limit() -> None:
        if space_mib is not None:
            resource.setrlimit(resource.RLIMIT_AS, (space_mib * 2**20, space_mib * 2**20))

    words = [sys.executable, "-m", "engine", "serve", "--port", "0", *options]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(words, stderr=log, preexec_fn=limit, env=os.environ | environment)
        found, end = Command(process, Path(log.name)), time.monotonic() + 60
        try:
            while " at http" not in found.said:
                assert process.poll() is None, found.said
                assert time.monotonic() < end, found.said
                time.sleep(0.1)
            found.url = found.said.split(" at ")[1].split()[0]
            yield found
        finally:
            process.kill()
            process.wait()
