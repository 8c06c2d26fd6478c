"""The server as a process under clients that mean no good beside one that asks every second, and with a full disk."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress

import psutil
import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("openai")

import httpx
from served import command

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")]
HALF = (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 99\r\n\r\n{")  # fmt: skip


def ask(url, prompt="def f(", seconds=60.0):
    """The status of a completion, or the name of an error; and the seconds until it was there."""
    begun = time.monotonic()
    body = {"model": "shipped", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    try:
        status = httpx.post(f"{url}/v1/completions", json=body, timeout=seconds).status_code
    except httpx.HTTPError as error:
        status = type(error).__name__
    return status, time.monotonic() - begun


def send_long_header(address):
    with suppress(OSError), socket.create_connection(address, timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        for _ in range(320):
            connection.sendall(b"x" * 2**16)


def attack(url, answers):
    """All at once; the answers to prompts that are far too long."""
    host, port = url.removeprefix("http://").split(":")
    work = [lambda: answers.update([ask(url, "ab " * 1_300_000, 120)[0]])] * 3
    threads = [threading.Thread(target=one) for one in (*work, lambda: send_long_header((host, int(port))))]
    for thread in threads:
        thread.start()
    connections = []
    for number in range(200):
        with suppress(OSError):
            connections.append(socket.create_connection((host, int(port)), timeout=10))
            connections[-1].sendall(HALF[number % len(HALF)])
    for thread in threads:
        thread.join()
    time.sleep(3)
    for connection in connections:
        connection.close()


def test_hostile_clients_cost_others_nothing():
    seen, answers = [], Counter()

    def latest(goes_on):
        """The longest time that an answer took, of five and more that are asked for every second."""
        first = len(seen)
        while goes_on() or len(seen) < first + 5:
            seen.append(ask(server.url))
            time.sleep(max(0.0, 1 - seen[-1][1]))
        return max(seconds for _, seconds in seen[first:])

    with command("--prefix-store-gib", "0", space_mib=1500) as server:
        process = psutil.Process(server.process.pid)
        alone_s, before = latest(lambda: False), process.memory_info().rss
        attacker = threading.Thread(target=attack, args=(server.url, answers))
        attacker.start()
        latest_s = latest(attacker.is_alive)
        attacker.join()
        time.sleep(3)
        assert server.process.poll() is None, server.said
        assert abs(process.memory_info().rss / before - 1) < 0.1
    assert {status for status, _ in seen} == {200}
    assert answers == {400: 3}
    assert latest_s < 3 * alone_s + 2


def test_a_full_disk_under_the_prefix_store(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], capture_output=True)
    if not os.path.ismount(tmp_path):
        pytest.skip("no file system can be mounted here")
    try:
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"prefix_store_bytes": 6_000_000, "prefix_store_folder": str(tmp_path)}))
        with command("--config", str(config)) as server:
            with suppress(OSError), open(tmp_path / "others", "wb", buffering=0) as file:
                while file.write(bytes(2**16)) == 2**16:
                    pass

            def ask(first, prompts):
                """Long prompts, of which no two begin alike."""
                for number in range(first, first + prompts):
                    body = {"model": "shipped", "prompt": f"x{number} = [{'1, ' * 500}", "max_tokens": 3}
                    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
                    assert answer.status_code == 200, answer.text

            def metric(name):
                lines = httpx.get(f"{server.url}/metrics").text.splitlines()
                return next(float(line.split()[-1]) for line in lines if line.startswith(f"kvengine_{name} "))

            ask(0, 8)
            assert metric("prefix_store_failures_total") > 0
            assert metric("prefix_store_bytes") <= 6_000_000
            assert not list(tmp_path.rglob("*.json"))[1:]
            os.unlink(tmp_path / "others")
            subprocess.run(["mount", "-o", "remount,size=200m", str(tmp_path)], check=True)
            ask(8, 4)
            assert list(tmp_path.rglob("*.safetensors"))
            assert httpx.get(f"{server.url}/health").status_code == 200
            assert server.process.poll() is None, server.said
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
