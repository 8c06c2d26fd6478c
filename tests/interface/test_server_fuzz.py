"""The server under requests of all kinds at once: see `server_fuzz`."""

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("llguidance", reason="the extra grammar is not installed")

import psutil
from served import served
from server_fuzz import fuzz

import engine


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
