"""`engine serve` as a process: it starts, answers, and lets requests end when it is stopped."""

import json
import signal
import sys
import time

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("openai")

import httpx
from served import command


def test_a_stop_waits_for_requests():
    with command("--name", "small", "--max-tokens", "400", KVENGINE_API_KEY="k") as server:
        headers = {"Authorization": "Bearer k"}
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        [model] = httpx.get(f"{server.url}/v1/models", headers=headers).json()["data"]
        assert model["id"] == "small"
        assert model["engine"]["max_tokens"] == 400
        body = {"model": "small", "prompt": "def f(", "max_tokens": 150, "stream": True, "logit_bias": {"0": -100}}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            events = [line.removeprefix("data: ") for line in lines]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(20) in (0, -signal.SIGTERM)
        assert "Serving small at http://127.0.0.1" in server.said
        assert "Traceback" not in server.said


@pytest.mark.slow
def test_a_stop_does_not_wait_longer_than_it_may():
    options = ["--cache", "quantized", "--cache-option", "nbits=2"]
    with command("--max-tokens", "2000", "--drain-seconds", "1", *options) as server:
        body = {"model": "shipped", "prompt": "def f(", "max_tokens": 1900, "stream": True, "logit_bias": {"0": -100}}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            begun = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            *_, error, done = [line.removeprefix("data: ") for line in lines if line]
            assert "shutting down" in json.loads(error)["error"]["message"]
            assert json.loads(error)["partial"][0]
            assert done == "[DONE]"
            server.process.wait(20)
            assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["a", "--model", "b"], "the model was given twice"),
        (["--api-key", "ä"], "--api-key"),
        (["--api-key", ""], "the API key is empty"),
        (["--max-body-mib", "inf"], "--max-body-mib inf is no size"),
        (["--prefix-store-gib", "inf"], "--prefix-store-gib inf is no size"),
        (["--cache", "nothing"], "nothing"),
        (["--cache-option", "nbits=4"], "--cache-option"),
        (["--cache", "quantized", "--cache-option", "nbits=9"], "9 bits"),
        (["--cache", "sink"], "window_length"),
        (["--port", "70000"], "port"),
        (["--max-batch", "0"], "max-batch"),
        (["/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_wrong_options(cli, options, said):
    done = cli(["serve", *options])
    assert done.exit_code == 2
    assert said in done.stderr


def test_without_the_extra(cli, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("engine.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = cli(["serve"])
    assert done.exit_code == 2
    assert "pip install 'kvengine[serve]'" in done.stderr
