"""A server as a process with little address space, and clients that mean no good beside one that asks every second.

    python tests/support/hostile.py run '{"prompts": 10, "half": 800, "header_mib": 150, "space_mib": 1500}'

One JSON line: answers of the good client, how late the latest was, also alone, resident memory before and after.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

HALF = (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 99\r\n\r\n{")  # fmt: skip
OVER_LONG = "ab " * 1_300_000


@contextmanager
def started(options: list[str], space_mib: int | None = None) -> Iterator[tuple[str, psutil.Process]]:
    """`engine serve` on a port of its own: its address, and its process. space_mib: all that it may map."""

    def limit() -> None:
        if space_mib is not None:
            resource.setrlimit(resource.RLIMIT_AS, (space_mib * 2**20, space_mib * 2**20))

    command = [sys.executable, "-m", "engine", "serve", "--port", "0", *options]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, stderr=log, preexec_fn=limit)

        def said() -> str:
            return Path(log.name).read_text()

        try:
            while " at http" not in said():
                assert process.poll() is None, said()
                time.sleep(0.1)
            yield said().split(" at ")[1].split()[0], psutil.Process(process.pid)
            assert process.poll() is None, f"the server ended with {process.returncode}: {said()}"
        finally:
            process.kill()
            process.wait()


def ask(url: str, prompt: str = "def f(", seconds: float = 60.0) -> tuple[int | str, float]:
    """The status of a completion, or the name of an error; and the seconds until it was there."""
    begun = time.monotonic()
    body = {"model": "shipped", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    try:
        status: int | str = httpx.post(f"{url}/v1/completions", json=body, timeout=seconds).status_code
    except httpx.HTTPError as error:
        status = type(error).__name__
    return status, time.monotonic() - begun


def send_header(address: tuple[str, int], mib: int) -> None:
    with suppress(OSError), socket.create_connection(address, timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        for _ in range(16 * mib):
            connection.sendall(b"x" * 2**16)


def attack(url: str, prompts: int, half: int, header_mib: int, seconds: float) -> Counter[int | str]:
    """All at once; the answers to the over-long prompts. seconds: for which connections stay open."""
    host, port = url.removeprefix("http://").split(":")
    answers: Counter[int | str] = Counter()
    work: list[Callable[[], Any]] = [lambda: answers.update([ask(url, OVER_LONG, 120)[0]])] * prompts
    work.append(lambda: send_header((host, int(port)), header_mib))
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    connections = []
    for number in range(half):
        with suppress(OSError):
            connections.append(socket.create_connection((host, int(port)), timeout=10))
            connections[-1].sendall(HALF[number % len(HALF)])
    for thread in threads:
        thread.join()
    time.sleep(seconds)
    for connection in connections:
        connection.close()
    return answers


def run(prompts: int, half: int, header_mib: int, space_mib: int | None, seconds: float = 10.0) -> dict[str, Any]:
    seen: list[tuple[int | str, float]] = []
    with started(["--prefix-store-gib", "0"], space_mib) as (url, process):

        def ask_for(wait: Callable[[], bool]) -> float:
            """Every second, until `wait` is over; the longest time that an answer took."""
            first = len(seen)
            while wait() or len(seen) < first + 5:
                seen.append(ask(url))
                time.sleep(max(0.0, 1 - seen[-1][1]))
            return round(max(seconds for _, seconds in seen[first:]), 2)

        alone_s = ask_for(lambda: False)
        before, cpu_s = process.memory_info(), sum(process.cpu_times()[:2])
        asked = {"url": url, "prompts": prompts, "half": half, "header_mib": header_mib, "seconds": seconds}
        attacker = subprocess.Popen([sys.executable, __file__, "attack", json.dumps(asked)], stdout=subprocess.PIPE)
        latest_s = ask_for(lambda: attacker.poll() is None)
        answers = json.loads(attacker.communicate()[0])
        cpu_s = sum(process.cpu_times()[:2]) - cpu_s
        time.sleep(3)
        after = process.memory_info()
    return {
        "asked": len(seen),
        "lost": sum(status != 200 for status, _ in seen),
        "statuses": dict(Counter(str(status) for status, _ in seen)),
        "alone_s": alone_s,
        "latest_s": latest_s,
        "server_cpu_s": round(cpu_s, 2),
        "over_long": answers,
        "before_mb": before.rss // 10**6,
        "after_mb": after.rss // 10**6,
        "grown": round(after.rss / before.rss - 1, 3),
        "space_mb": before.vms // 10**6,
    }


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    does = attack if sys.argv[1] == "attack" else run
    print(json.dumps(does(**json.loads(sys.argv[-1]))))
