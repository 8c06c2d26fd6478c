"""Concurrent clients over HTTP on model "small": `engine serve` beside `transformers serve`, each in its own process.

The clients of a server start together. Each asks for one text after another, ragged prompts with a number of new tokens
of their own, as a stream. Measured are tokens per second of all, and the time from a request to its first token.
transformers serves without and with its continuous batching. The texts are compared.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import torch
import typer
from common import SHAPES, llama, picked, report
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Request = tuple[str, int]
"""A prompt, and how many new tokens are wanted."""


def save_model(shape: dict[str, int], folder: Path) -> None:
    """With a tokenizer whose tokens are words of their own."""
    llm = llama(**shape)
    llm.config.eos_token_id, llm.config.pad_token_id = None, 0
    llm.generation_config.max_new_tokens = 1024
    llm.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(shape["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder)


def requests_of(clients: int, each: int, vocabulary: int) -> list[list[Request]]:
    """For each client one after another: 8 to 512 tokens in, 8 to 128 out."""
    draw = random.Random(0)

    def one() -> Request:
        words = [f"w{draw.randrange(1, vocabulary)}" for _ in range(draw.randint(8, 512))]
        return " ".join(words), draw.randint(8, 128)

    return [[one() for _ in range(each)] for _ in range(clients)]


@contextmanager
def running(command: list[str], threads: int) -> Iterator[str]:
    """A server in a process of its own, once it answers; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=environment)
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + 180
            while True:
                try:
                    httpx.get(f"{url}/health", timeout=5)
                    break
                except httpx.TransportError:
                    if process.poll() is not None or time.monotonic() > end:
                        log.seek(0)
                        raise SystemExit(f"{command[0]} did not start:\n{log.read().decode()}") from None
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


async def ask(http: httpx.AsyncClient, model: str, request: Request) -> tuple[float, str]:
    """Seconds to the first token, and the text."""
    prompt, new = request
    body = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True}
    begun, first_s, text = time.perf_counter(), math.nan, ""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise SystemExit(f"a request failed: {event['error']}")
            said = event["choices"][0]["text"] if event["choices"] else ""
            if said and math.isnan(first_s):
                first_s = time.perf_counter() - begun
            text += said or ""
    return first_s, text.strip()


async def load(url: str, model: str, asked: list[list[Request]]) -> dict[str, Any]:
    """All clients at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:

        async def client(requests: list[Request]) -> list[tuple[float, str]]:
            return [await ask(http, model, request) for request in requests]

        await ask(http, model, ("w1 w2 w3", 4))  # warm-up
        begun = time.perf_counter()
        answers = [one for found in await asyncio.gather(*map(client, asked)) for one in found]
        seconds = time.perf_counter() - begun
    firsts = sorted(first for first, _ in answers)
    new = sum(new for requests in asked for _, new in requests)
    came = sum(len(text.split()) for _, text in answers)
    return {
        "s": seconds,
        "tokens_per_s": came / seconds,
        "first_s": {"median": median(firsts), "p95": firsts[math.ceil(0.95 * len(firsts)) - 1], "most": firsts[-1]},
        "tokens": came,
        "tokens_asked": new,
        "texts": [text for _, text in answers],
    }


def main(
    model: str = "small",
    clients: str = "8,32",
    each: Annotated[str, typer.Option(help="requests of a client, for each number of clients")] = "4,2",
    only: Annotated[str, typer.Option(help="names with ; between, or 'all'")] = "all",
    threads: int = 2,
    out: Path | None = None,
) -> None:
    torch.set_num_threads(threads)
    cases: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(SHAPES[model], Path(folder))
        engine = [sys.executable, "-m", "engine", "serve", folder, "--name", folder, "--max-tokens", "128"]
        # The command of the environment: transformers has no module to run.
        peer = [str(Path(sys.executable).with_name("transformers")), "serve", folder, "--device", "cpu"]
        servers = {
            "kvengine": engine,
            "transformers": peer,
            "transformers, continuous batching": [*peer, "--continuous-batching"],
        }
        for count, per_client in zip(map(int, clients.split(",")), map(int, each.split(",")), strict=True):
            asked = requests_of(count, per_client, SHAPES[model]["vocab_size"])
            found: dict[str, Any] = {}
            for name, command in picked(servers, only).items():
                with running(command, threads) as url:
                    found[name] = asyncio.run(load(url, folder, asked))
                first = found[name]["first_s"]
                print(
                    f"{count:3} clients, {name:34} {found[name]['s']:7.1f} s {found[name]['tokens_per_s']:7.1f} "
                    f"tokens/s, first token {first['median']:6.2f} s, p95 {first['p95']:6.2f} s",
                    flush=True,
                )
            texts = {name: one.pop("texts") for name, one in found.items()}
            wanted = next(iter(texts.values()))
            for name, own in texts.items():
                found[name]["same_texts"] = sum(a == b for a, b in zip(wanted, own, strict=True))
            cases[str(count)] = {"requests": count * per_client, "servers": found}
    report("serve", out, model=model, cases=cases)


if __name__ == "__main__":
    typer.run(main)
