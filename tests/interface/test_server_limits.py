"""What the server refuses before there is work, and what it says: sizes, times, connections, broken bodies."""

import copy
import gzip
import json
import logging
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("openai")

import httpx
from encoder_decoders import tiny_encoder_decoder
from served import NAME, served
from starlette.requests import Request

import engine
from engine.server import connections, gate, texts
from engine.server.connections import Connection
from engine.server.listening import allowed_hosts, close, host_name, listen
from engine.server.texts import LONG_CHARACTERS, Texts

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "def read(path):\n"}]
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def gen():
    return engine.Generator(engine.SHIPPED_MODEL)


@pytest.fixture(scope="module")
def server(gen):
    with served(gen) as found:
        yield found


def complete(server, prompt="def f(", **fields):
    return server.http.post(COMPLETION, json={"model": NAME, "prompt": prompt, "temperature": 0} | fields)


# New tokens.


def test_more_new_tokens_than_there_is_room_for_are_as_many_as_there_is(gen):
    with served(gen, max_tokens=8) as server:
        for asked in (8, 9, 10**9):
            usage = complete(server, max_tokens=asked, logit_bias={"0": -100}).json()["usage"]
            assert usage["completion_tokens"] == 8
        usage = complete(server, [5] * 2045, max_tokens=9, logit_bias={"0": -100}).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2045, 3)
        refused = complete(server, [5] * 2048, max_tokens=9)
        assert refused.status_code == 400
        assert "context has 2,048" in refused.json()["error"]["message"]


def test_log_probabilities_of_a_chat_without_a_limit_are_those_that_can_be_written(gen, monkeypatch):
    monkeypatch.setattr("engine.server.reading.MOST_LOGPROBS_WRITTEN", 30)
    body = {"model": NAME, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "logit_bias": {"0": -100}}
    with served(gen) as server:
        assert server.http.post(CHAT, json=body).json()["usage"]["completion_tokens"] == 10


# Long texts.


class Counted:
    """A tokenizer with a token per two characters, which remembers how many characters it has read at once."""

    def __init__(self):
        self.sizes = []

    def read(self, text):
        return self(text)["input_ids"]

    def get_vocab(self):
        return {"ab": 0, "longest": 1}

    def __call__(self, text, add_special_tokens=True):
        self.sizes.append(len(text))
        return {"input_ids": [0] * (len(text) // 2)}


def test_a_text_that_cannot_fit_is_not_tokenized():
    tokenizer = Counted()
    with pytest.raises(engine.InputError, match="701 characters, but the model's context has 100 tokens of 7"):
        Texts(tokenizer, 100).ids("a" * 701, tokenizer.read)
    assert tokenizer.sizes == []
    assert len(Texts(tokenizer, 100).ids("a" * 700, tokenizer.read)) == 350
    assert len(Texts(tokenizer, None).ids("a" * 10**6, tokenizer.read)) == 5 * 10**5


@pytest.mark.parametrize(("name", "most"), [("bart", 64), ("t5", 4096)])
def test_an_encoder_reads_as_much_as_it_can_and_no_more(name, most, gen):
    """All at once: ten times as much would take a hundred times the time and memory, and nobody else is served."""
    config = copy.deepcopy(tiny_encoder_decoder(name).config)
    config.update({"vocab_size": len(gen.tokenizer), "eos_token_id": 2})
    config.update({} if name == "t5" else {"max_position_embeddings": most})
    model = type(tiny_encoder_decoder(name))(config).eval()
    with served(engine.Generator(model, gen.tokenizer), context_tokens=None, most_bytes=2**22) as server:
        assert complete(server, [5] * min(most, 100), max_tokens=2).status_code == 200
        for prompt in ([5] * (most + 1), "x " * 100_000):
            answer = complete(server, prompt)
            assert answer.status_code == 400
            assert "shorten the prompt" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("size", "read"), [(1, 1), (2, 2), (20, 4)])
def test_of_a_long_text_the_beginning_is_tokenized_first(size, read):
    """It shows whether the rest need be: here a text has half as many tokens as characters."""
    tokenizer = Counted()
    assert len(Texts(tokenizer, 10**6).ids("a" * size * LONG_CHARACTERS, tokenizer.read)) == size * LONG_CHARACTERS // 2
    assert len(tokenizer.sizes) == read
    tokenizer.sizes.clear()
    with pytest.raises(engine.InputError, match=r"the first 262,144 of 655,360 characters .* have 131,072 tokens"):
        Texts(tokenizer, 10**5).ids("a" * 10 * LONG_CHARACTERS, tokenizer.read)
    assert tokenizer.sizes == [LONG_CHARACTERS, 4 * LONG_CHARACTERS]


def test_without_memory_a_text_is_not_tokenized(server, monkeypatch):
    """The tokenizer would end the process."""

    def no_memory(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(texts.mmap, "mmap", no_memory)
    for path, more in ((COMPLETION, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        refused = server.http.post(path, json={"model": NAME} | more)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "out_of_memory")
        assert refused.headers["Retry-After"]
    monkeypatch.undo()
    assert complete(server).status_code == 200


def test_long_texts_are_read_one_at_a_time_and_short_ones_do_not_wait(gen, monkeypatch):
    running, most, go_on = [], [], threading.Event()
    tokenized = texts._tokenized

    def slowly(text, read):
        if len(text) >= LONG_CHARACTERS:
            running.append(text)
            most.append(len(running))
            assert go_on.wait(30)
            running.pop()
        return tokenized(text, read)

    monkeypatch.setattr(texts, "_tokenized", slowly)
    with served(gen, context_tokens=4096) as server, ThreadPoolExecutor(8) as pool:
        long = [pool.submit(complete, server, "ab " * 30_000) for _ in range(4)]
        server.wait_for(lambda: bool(running))
        assert complete(server, max_tokens=2).status_code == 200
        with pytest.raises(httpx.ReadTimeout):  # one that leaves is not read at all
            server.http.post(COMPLETION, json={"model": NAME, "prompt": "abc" * 30_000}, timeout=0.2)
        go_on.set()
        answers = [one.result() for one in long]
    assert {one.status_code for one in answers} == {400}
    assert "context has 4,096" in answers[0].json()["error"]["message"]
    assert (len(most), max(most)) == (4, 1)


# Bodies.

GZIPPED = gzip.compress(b"{}", mtime=0)  # without the time, which the names of tests would carry


@pytest.mark.parametrize(
    ("content", "headers", "status", "said"),
    [
        (GZIPPED, {"Content-Encoding": "gzip"}, 415, "coded as 'gzip'"),
        (b"{}", {"Content-Encoding": "br"}, 415, "coded as 'br'"),
        (GZIPPED, {}, 400, "no text in UTF-8"),
        (b'{"model": "\xff"}', {}, 400, "no text in UTF-8: byte 11"),
        (b"[" * 10**5, {}, 400, "nested too deeply"),
        (b"{", {}, 400, "no JSON: Expecting property name .* at character 1"),
        (b'{"model": }', {}, 400, "no JSON: Expecting value at character 10"),
        (b"", {}, 400, "required"),
        (b"[]", {}, 400, "dictionary"),
    ],
)
def test_bodies_that_cannot_be_read(server, content, headers, status, said):
    answer = server.http.post(CHAT, content=content, headers=JSON | headers)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert re.search(said, error["message"]), error
    assert error["param"] is None


def test_a_body_for_which_there_is_no_memory(server, monkeypatch):
    async def fail(*_):
        raise MemoryError

    monkeypatch.setattr(Request, "json", fail)
    answer = complete(server)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")


def test_bodies_that_arrive_at_once_have_a_limit(gen, monkeypatch):
    monkeypatch.setattr(gate, "_MOST_BODIES", 0.5)
    with served(gen) as server:
        assert complete(server, "x" * 2**19).status_code == 503
        assert complete(server, "x").status_code == 200
        assert complete(server, "x" * 2**19).status_code == 503


def test_every_answer_has_the_id_of_its_request(server, monkeypatch, caplog):
    get, post = server.http.get, server.http.post
    answers = [get("/health"), get("/nothing"), post(CHAT, content=b"{", headers=JSON), post(CHAT, content=b"")]
    answers += [get("/health", headers={"Host": "elsewhere.example"}), complete(server), complete(server, stream=True)]
    ids = [one.headers["x-request-id"] for one in answers]
    assert len(set(ids)) == len(ids)
    for asked, is_taken in (("a-b.c:1/2+3=", True), ("a b", False), ("x" * 129, False)):
        assert (get("/health", headers={"X-Request-ID": asked}).headers["x-request-id"] == asked) is is_taken
    monkeypatch.setattr("engine.server.app._described", lambda *_: 1 / 0)
    with caplog.at_level(logging.ERROR, "engine"):
        failed = get("/v1/models", headers={"X-Request-ID": "mine"})
    assert (failed.status_code, failed.headers["x-request-id"]) == (500, "mine")
    assert "ZeroDivisionError" in failed.json()["error"]["message"]
    assert "mine failed with ZeroDivisionError" in caplog.text


def test_what_the_server_is(server):
    assert server.http.get("/version").json() == {"version": engine.__version__}
    described = server.http.get("/openapi.json").json()
    assert described["info"]["version"] == engine.__version__
    assert "max_completion_tokens" in json.dumps(described["components"]["schemas"]["ChatRequest"])


# Names.


@pytest.mark.parametrize(
    "host", ["localhost:80@evil.com", "localhost:80:90", "localhost/", "evil.com#localhost", "user@localhost", "",
             "localhost:x", "[::1", "local host", "localhost:123456", "[::1]x", "loc\u00e4lhost"],
)  # fmt: skip
def test_names_that_are_none(server, host):
    assert host_name(host) == ""
    if host.isascii():
        assert server.http.get("/health", headers={"Host": host}).status_code in (400, 403)
    with pytest.raises(engine.OptionError, match="no name of a host"):
        allowed_hosts("0.0.0.0", [host])


# Connections.


def opened(server, content):
    host, port = server.url.removeprefix("http://").split(":")
    found = socket.create_connection((host, int(port)), timeout=20)
    found.sendall(content)
    return found


def is_closed(connection, seconds):
    """Whether the server closes it in time; what it sent is read."""
    connection.settimeout(seconds)
    try:
        while connection.recv(2**16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


POST = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
HALF = [b"", b"GET /health HT", HEALTH + b"X: ", POST + b"Content-Length: 9\r\n\r\n{",
        HEALTH + b"Content-Length: 99999\r\n\r\nx", HEALTH + b"\r\nGET /he"]  # fmt: skip


def test_half_a_request_is_closed_in_time(server, monkeypatch):
    """Also where a byte comes now and then."""
    monkeypatch.setattr(connections, "_REQUEST_S", 0.4)
    quiet, trickling = ([opened(server, content) for content in HALF] for _ in range(2))
    end, stop = time.monotonic() + 10, threading.Event()

    def trickle():
        while not stop.wait(0.05):
            for connection in trickling:
                with suppress(OSError):
                    connection.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    assert all(is_closed(connection, 10) for connection in [*quiet, *trickling])
    assert time.monotonic() < end
    stop.set()
    thread.join()
    for connection in [*quiet, *trickling]:
        connection.close()
    assert complete(server, max_tokens=3).status_code == 200


def test_an_answer_that_is_not_read_ends(gen, monkeypatch):
    monkeypatch.setattr(connections, "_READING_S", 0.3)
    monkeypatch.setattr("engine.server.app._event", lambda written: "data: " + "x" * 2**20 + "\n\n")
    body = json.dumps({"model": NAME, "prompt": "def f(", "stream": True, "max_tokens": 200, "logit_bias": {"0": -100}})
    with served(gen) as server, opened(server, POST + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()):
        server.wait_for(lambda: server.metric('requests_total{outcome="cancelled"}') == 1)
        server.wait_until_idle()


def test_a_long_header_is_refused_at_once(server):
    begun = time.monotonic()
    with opened(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ") as connection:
        with suppress(OSError):
            for _ in range(2000):
                connection.sendall(b"x" * 2**16)
        assert is_closed(connection, 5)
    assert time.monotonic() - begun < 5
    assert server.http.get("/health").status_code == 200


def test_connections_that_say_nothing_keep_nobody_out(gen, monkeypatch):
    monkeypatch.setattr(Connection, "most", 20)
    with served(gen) as server:
        idle = []
        for number in range(60):
            idle.append(opened(server, HALF[number % 4]))
            if len(idle) % 10 == 0:
                assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        assert complete(server, max_tokens=3).status_code == 200
        assert all(is_closed(one, 5) for one in idle[:35])
        for one in idle:
            one.close()


# The port.


def test_a_port_that_is_taken_is_said_before_a_model_is_looked_for(cli):
    [taken] = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    try:
        with pytest.raises(engine.OptionError, match=f"port {port} of 127.0.0.1 is taken"):
            listen("127.0.0.1", port)
        done = cli(["serve", "/nowhere/at/all", "--port", str(port)])
    finally:
        close([taken])
    assert done.exit_code == 2
    assert f"port {port} of 127.0.0.1 is taken by another process" in done.stderr
    close(listen("127.0.0.1", port))
    with pytest.raises(engine.OptionError, match="no address of this machine"):
        listen("no.such.name.invalid", 0)


def test_all_addresses_of_a_name_have_one_port():
    sockets = listen("localhost", 0)
    assert len({one.getsockname()[1] for one in sockets}) == 1
    close(sockets)
