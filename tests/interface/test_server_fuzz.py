"""Requests of all kinds against a server at once: right and broken ones, clients that leave, memory that is out.

Every text that comes to its end has to be that of the same request alone.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import psutil
import pytest
from injection import failing_at_random

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("llguidance", reason="the extra grammar is not installed")

from served import NAME, Served, served

import engine

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
_PROMPTS = ["def read(path):\n", "class Config:\n    def ", "import os, sys\n\nx = [1, 2", "for name in names:\n" * 12]
_VALUES = [None, True, False, 0, -1, 1, 2, 3.5, 1e308, -(2**63), 2**64, "", "x", "static", "\u0000", "\ud800",
           "é" * 300, [], {}, [[]], [None], ["a", 1], {"type": "text"}, {"a": {"b": []}}, "NaN"]  # fmt: skip
# Besides 200. 503 only where memory is out.
REFUSED = {400, 404, 413, 415, 429}


def right(random: Random) -> tuple[str, dict[str, Any]]:
    """A path and a body of a request that can be answered, the same text each time."""
    prompt, is_chat = random.choice(_PROMPTS), random.random() < 0.5
    body: dict[str, Any] = {"model": NAME, "max_tokens": random.randint(1, 16)}
    body |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    body |= random.choice([{"temperature": 0}, {"temperature": 1, "seed": random.randint(0, 9)}])
    body |= random.choice([{}, {}, {"stop": ["\n\n"]}, {"logit_bias": {"5": 5}}, {"frequency_penalty": 1}])
    if body["temperature"]:
        body |= random.choice([{}, {"n": 2}, {"top_p": 0.8}])
    else:
        caches = ["dynamic", "static", "quantized", "offloaded", "offloaded_quantized", "none"]
        ways = [{}, {}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"repetition_penalty": 1.3}]
        body["engine"] = random.choice([{}, {"cache": random.choice(caches)}]) | random.choice(ways)
        if random.random() < 0.2 and "cache" not in body["engine"]:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
            body["max_tokens"] = 30
        elif is_chat and "num_beams" not in body["engine"]:
            body |= random.choice([{}, {"logprobs": True, "top_logprobs": 2}])
        elif not is_chat:
            body |= random.choice([{}, {"echo": True}])
    return (CHAT if is_chat else COMPLETION), body


def broken(random: Random) -> tuple[str, bytes]:
    """A path and the bytes of a body in which something is wrong, or may be."""
    path, body = copy.deepcopy(right(random))
    kind = random.random()
    if kind < 0.1:
        text = json.dumps(body).encode()
        cut = random.randrange(len(text))
        return path, text[:cut] + bytes(random.randrange(256) for _ in range(random.randrange(4))) + text[cut + 2 :]
    if kind < 0.13:
        return path, json.dumps(body | {"user": "x" * 2**20}).encode()
    for _ in range(random.randint(1, 2)):
        inside = body
        while True:
            name = random.choice([*(inside if isinstance(inside, dict) else range(len(inside))), "what"])
            below = None if name == "what" else inside[name]
            if not isinstance(below, (dict, list)) or not below or random.random() < 0.4:
                break
            inside = below
        if isinstance(inside, dict) or name != "what":
            inside[name] = copy.deepcopy(random.choice(_VALUES))
    if random.random() < 0.3:
        name = random.choice(["n", "stop", "top_p", "seed", "stream", "best_of", "tools", "logprobs"])
        body[name] = copy.deepcopy(random.choice(_VALUES))
    body["max_tokens"] = body.get("max_tokens", 8)
    return path, json.dumps(body).encode()


def texts_of(path: str, answer: Any) -> list[Any]:
    """The texts of an answer, and why each has ended."""
    choices = answer["choices"]
    texts = [one["text"] if path == COMPLETION else one["message"]["content"] for one in choices]
    return list(zip(texts, [one["finish_reason"] for one in choices], strict=True))


def read_stream(path: str, lines: Iterator[str]) -> list[Any]:
    texts: dict[int, str] = {}
    reasons: dict[int, Any] = {}
    for line in lines:
        if not line or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise OutOfMemory(event["error"])
        for one in event["choices"]:
            said = one["text"] if path == COMPLETION else one["delta"].get("content", "")
            texts[one["index"]] = texts.get(one["index"], "") + said
            reasons[one["index"]] = one["finish_reason"] or reasons.get(one["index"])
    return [(texts[index], reasons[index]) for index in sorted(texts)]


class OutOfMemory(Exception):
    """In the middle of a stream."""


def fuzz(server: Served, requests: int, seed: int = 0, clients: int = 8, share: float = 0.001) -> Counter[str]:
    """Send so many; what happened. Raises `AssertionError` for any answer that may not be."""
    kinds = [right(Random(number)) for number in range(min(60, requests))]
    expected = []
    for path, body in kinds:
        answer = server.http.post(path, json=body)
        assert answer.status_code == 200, (body, answer.text)
        expected.append(texts_of(path, answer.json()))
    happened: Counter[str] = Counter()

    def send(number: int) -> None:
        random = Random(f"{seed} {number}")
        kind = random.random()
        headers = {"Content-Type": "application/json"}
        if kind < 0.35:
            path, content = broken(random)
            limit = random.choice([60, 60, 0.05])
            try:
                answer = server.http.post(path, content=content, headers=headers, timeout=limit)
            except httpx.TimeoutException:
                happened["broken, left"] += 1
                return
            assert answer.status_code in REFUSED | {200, 503}, (content, answer.status_code, answer.text)
            assert answer.status_code == 200 or b"data:" in answer.content or answer.json()["error"]["message"], content
            happened[f"broken, {answer.status_code}"] += 1
            return
        which = random.randrange(len(kinds))
        path, body = kinds[which]
        if kind < 0.5:  # leaves
            try:
                with server.http.stream(
                    "POST", path, json=body | {"stream": True}, timeout=random.random() * 0.3
                ) as answer:
                    for _ in zip(answer.iter_lines(), range(random.randrange(6)), strict=False):
                        pass
            except httpx.TimeoutException:
                pass
            happened["left"] += 1
            return
        try:
            if kind < 0.75:
                with server.http.stream("POST", path, json=body | {"stream": True}) as answer:
                    status, found = answer.status_code, None
                    answer.read() if status != 200 else None
                    if status == 200:
                        found = read_stream(path, answer.iter_lines())
            else:
                answer = server.http.post(path, json=body)
                status, found = (
                    answer.status_code,
                    texts_of(path, answer.json()) if answer.status_code == 200 else None,
                )
        except OutOfMemory:
            status, found = 503, None
        if status in (429, 503):
            happened[str(status)] += 1
            return
        assert status == 200, (body, answer.text)
        assert found == expected[which], (body, found, expected[which])
        happened["complete"] += 1

    with (
        failing_at_random(server.gen.model, share, Random(seed)) as outs,
        ThreadPoolExecutor(clients) as pool,
    ):
        for _ in pool.map(send, range(requests)):
            pass
    server.wait_until_idle()
    return happened + outs


@pytest.mark.parametrize("requests", [40, pytest.param(800, marks=pytest.mark.slow)])
def test_every_text_is_that_of_its_request_alone(requests):
    gen = engine.Generator(engine.SHIPPED_MODEL, config=engine.EngineConfig(prefix_store_bytes=2**24))
    with served(gen) as server:
        happened = fuzz(server, requests // 2)
        before = psutil.Process().memory_info().rss
        happened += fuzz(server, requests // 2, seed=1)
        grown = psutil.Process().memory_info().rss - before
        assert not server.service._open
        assert (
            server.metric('requests_total{outcome="failed"}')
            <= happened["503"] + happened["left"] + happened["out of memory"]
        )
    assert happened["complete"] > requests // 4
    assert happened["broken, 400"] > requests // 12
    assert happened["left"] > requests // 12
    assert happened["out of memory"] > 0
    assert grown < 100_000_000, f"{grown:,} bytes after {happened}"
