"""The server's page in a real browser: it streams, changes the cache, and its pictures move."""

import shutil
import time

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("playwright", reason="no browser can be run")

from playwright.sync_api import sync_playwright
from served import served

import engine

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]


@pytest.fixture(scope="module")
def server():
    gen = engine.Generator(engine.SHIPPED_MODEL, config=engine.EngineConfig(prefix_store_bytes=2**27))
    with served(gen) as found:
        yield found


@pytest.fixture
def page(server):
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.problems = []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("request", lambda request: request.url.startswith(server.url) or page.problems.append(request.url))
        page.goto(server.url)
        yield page
        assert not page.problems
        browser.close()


def until(page, expression, seconds=60):
    """Wait until it is true: the page's own security policy lets no script of a test wait there."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.05)


def painted(page, canvas):
    """How many pixels of a canvas are not empty."""
    script = """id => {
        const canvas = document.getElementById(id);
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.filter((value, i) => i % 4 === 3 && value > 0).length;
    }"""
    return page.evaluate(script, canvas)


def test_a_conversation(server, page, tmp_path):
    until(page, "document.getElementById('cache').options.length > 5")
    assert page.inner_text("#model") == "shipped"
    page.fill("#tokens", "200")
    page.fill("#message", "def count_words(path):")
    page.press("#message", "Enter")
    until(page, "document.querySelector('.assistant').textContent.length > 20")
    early = page.inner_text(".assistant")
    page.wait_for_selector(".note", timeout=60_000)
    complete = page.inner_text(".assistant")
    assert complete.startswith(early.rstrip())
    assert len(complete) > len(early)  # it came piece by piece
    assert "tokens in" in page.inner_text(".note")

    page.select_option("#cache", "quantized")
    page.select_option("#strategy", "beam")
    page.fill("#message", "import os\n\ndef main():")
    page.click("#send")
    until(page, "document.querySelectorAll('.note').length === 2")
    assert "prompt tokens were stored" in page.inner_text(".note >> nth=1")
    until(page, "Number(document.getElementById('hits').value.split(' ')[2]) > 10")
    for canvas in ("rate-plot", "rows-plot", "bytes-plot"):
        assert painted(page, canvas) > 50, canvas
    page.fill("#message", "x = 1 " * 2000)
    page.press("#message", "Enter")
    page.wait_for_selector(".error")
    assert "tokens" in page.inner_text(".error")
    page.screenshot(path=tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_a_key():
    gen = engine.Generator(engine.SHIPPED_MODEL)
    with served(gen, api_key="k") as server, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(server.url)
        page.wait_for_selector("#key:visible")
        page.fill("#key", "k")
        page.press("#key", "Tab")
        until(page, "document.getElementById('cache').options.length > 5")
        page.fill("#tokens", "8")
        page.fill("#message", "x = 1")
        page.press("#message", "Enter")
        page.wait_for_selector(".note", timeout=60_000)
        browser.close()
