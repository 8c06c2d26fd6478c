"""The server's page in a real browser, with answers that the test gives."""

import json
import shutil
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("playwright", reason="no browser can be run")

from playwright.sync_api import expect, sync_playwright

from engine.server import app

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
MODEL = {"id": "tiny", "engine": {"caches": ["dynamic", "static"], "max_tokens": 64, "max_rows": 2}}
USAGE = {"completion_tokens": 3, "prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}
LONG = "word " * 60


def streamed(text, is_complete=True):
    """The events of an answer."""
    pieces = [text] if len(text) > 200 else [word + " " for word in text.split()]
    events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    events += [{"choices": [], "usage": USAGE}] if is_complete else [{"error": {"message": "memory is out"}}]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


class Server:
    """What the page is served with. bodies: of the requests. pending: the request that has no answer yet, where
    `holds`."""

    def __init__(self):
        self.bodies, self.pending, self.holds, self.answer = [], None, False, streamed("an answer")

    def serve(self, route):
        path = urlsplit(route.request.url).path
        if path in app._PAGE:
            name, kind = app._PAGE[path]
            content = (app.files("engine.server") / "page" / name).read_bytes()
            route.fulfill(body=content, content_type=kind, headers=app._SAFE)
        elif path == "/v1/models":
            route.fulfill(json={"data": [MODEL]})
        elif path == "/v1/chat/completions":
            self.bodies.append(route.request.post_data_json)
            self.pending = route
            if not self.holds:
                self.reply()
        else:
            route.fulfill(status=404)

    def reply(self):
        self.pending.fulfill(body=self.answer, content_type="text/event-stream; charset=utf-8")

    @property
    def roles(self):
        """Of the messages that were sent last."""
        return [message["role"] for message in self.bodies[-1]["messages"]]


@pytest.fixture(scope="module")
def tab():
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.set_default_timeout(10_000)
        yield tab
        browser.close()


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def page(tab, server):
    problems = []

    def note(error):
        problems.append(str(error))

    tab.on("pageerror", note)
    tab.route("**", server.serve)
    tab.goto("http://page.test/")
    expect(tab.locator("#model")).to_have_text("tiny")
    yield tab
    tab.unroute("**")
    tab.remove_listener("pageerror", note)
    assert not problems


def say(page, text="a question"):
    page.fill("#message", text)
    page.press("#message", "Enter")


def is_inside(page, element):
    """Whether the window shows all of it."""
    box, size = page.locator(element).last.bounding_box(), page.viewport_size
    return box["y"] >= 0 and box["y"] + box["height"] <= size["height"] and box["x"] + box["width"] <= size["width"]


def test_long_conversations_scroll(server, page):
    server.answer = streamed(LONG)
    for turn in range(20):
        say(page, f"question {turn}")
        expect(page.locator(".note")).to_have_count(turn + 1)
    assert len(server.roles) == 39
    for width, height in [(1280, 800), (390, 844), (390, 400)]:  # the last one has a keyboard on the screen
        page.set_viewport_size({"width": width, "height": height})
        expect(page.locator(".note").last).to_be_in_viewport(ratio=1)
        assert is_inside(page, "#message")
        assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")

    server.holds = True
    say(page)
    expect(page.locator("#stop")).to_be_visible()
    page.evaluate("document.getElementById('messages').scrollTop = 0")
    page.wait_for_timeout(50)
    server.reply()
    expect(page.locator(".note")).to_have_count(21)
    assert page.evaluate("document.getElementById('messages').scrollTop") == 0  # the reader is elsewhere


@pytest.mark.parametrize("way", ["button", "keyboard", "Escape"])
def test_a_stop_before_the_first_token(server, page, way):
    server.holds = True
    say(page, "first")
    expect(page.locator("#stop")).to_be_visible()
    say(page, "second")  # which has to wait
    if way == "button":
        page.click("#stop")
    elif way == "keyboard":
        page.press("#stop", "Enter")
    else:
        page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#message")).to_be_focused()
    expect(page.locator("#message")).to_have_value("first\nsecond")
    expect(page.locator(".message")).to_have_count(0)
    server.holds = False
    page.keyboard.press("Enter")
    expect(page.locator(".note")).to_have_count(1)
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "first\nsecond"}]
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("answer", "shown", "roles"),
    [
        (streamed("half of it", is_complete=False), ["half of it ", "memory is out"], ["user", "assistant", "user"]),
        (streamed(""), ["the model ended its answer before the first word"], ["user"]),
        ("data: ", ["the connection ended before the answer did"], ["user"]),
    ],
    ids=["fails", "empty", "cut"],
)
def test_an_answer_without_an_end(server, page, answer, shown, roles):
    server.answer = answer
    say(page)
    expect(page.locator(".message:not(.user)")).to_have_text(shown)
    expect(page.locator("#status")).to_have_text(shown[-1])
    assert page.input_value("#message") == ("" if "assistant" in roles else "a question")
    server.answer = streamed("an answer")
    say(page)
    expect(page.locator(".note")).to_have_count(1)
    assert server.roles == roles


def test_enter_in_an_input_method_does_not_send(server, page):
    page.focus("#message")
    session = page.context.new_cdp_session(page)
    session.send("Input.imeSetComposition", {"text": "かんじ", "selectionStart": 3, "selectionEnd": 3})
    page.evaluate("""() => {
        const box = document.getElementById("message");
        box.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", isComposing: true, bubbles: true}));
        box.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", keyCode: 229, bubbles: true}));
    }""")
    assert page.input_value("#message") == "かんじ"
    session.send("Input.insertText", {"text": "漢字"})
    assert not server.bodies
    page.press("#message", "Enter")
    expect(page.locator(".note")).to_have_count(1)
    assert server.bodies[0]["messages"][0]["content"] == "漢字"


def test_what_a_screen_reader_is_told(server, page):
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    page.evaluate("""() => {
        window.told = [];
        const status = document.getElementById("status");
        new MutationObserver(() => told.push(status.textContent)).observe(status, {childList: true});
    }""")
    server.holds = True
    say(page)
    expect(page.locator("#messages")).to_have_attribute("aria-busy", "true")
    server.reply()
    expect(page.locator("#messages")).to_have_attribute("aria-busy", "false")
    assert page.evaluate("told") == ["The model answers.", "an answer "]
    live = "[...document.querySelectorAll('[aria-live], [role=status], output')]"
    told = f"{live}.filter(element => element.getAttribute('aria-live') !== 'off').map(element => element.id)"
    assert page.evaluate(told) == ["status"]


def test_only_what_the_server_can_is_offered(server, page):
    options = page.locator("#cache option").all_inner_texts()
    assert options == ["the server's", "dynamic", "static"]
    assert page.locator("#beams").is_disabled()  # 4 of them, and the server computes 2 rows
    assert page.input_value("#tokens") == "64"
    page.fill("#tokens", "")
    say(page)
    expect(page.locator(".note")).to_have_count(1)
    assert "max_tokens" not in server.bodies[0]  # the server's own limit


def test_a_new_chat_while_an_answer_comes(server, page):
    server.holds = True
    say(page, "old")
    expect(page.locator("#stop")).to_be_visible()
    page.click("#new")
    expect(page.locator("#message")).to_be_focused()
    expect(page.locator("#send")).to_be_visible()
    assert page.input_value("#message") == ""
    server.holds = False
    say(page, "new")
    expect(page.locator(".note")).to_have_count(1)
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "new"}]
