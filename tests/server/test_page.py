"""The live page in Chromium, against a real server process: chat by keyboard, the engine, a phone, the dark.

Screenshots go into the test's temporary folder ($JAXINFER_SCREENSHOTS, where set), to be looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

webdriver = pytest.importorskip("selenium.webdriver")

from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="chromium and chromedriver are not installed"),
    pytest.mark.timeout(300),
]

STORIES = Path(__file__).parents[1] / "golden" / "stories260k"
PHONE = (360, 740)
DESK = (1280, 900)


class Page:
    """A browser that shows the page of one server."""

    def __init__(self, browser: Any, address: str, shots: Path):
        self.browser, self.address, self.shots = browser, address, shots

    def open(self) -> None:
        self.browser.get(self.address + "/")
        self.wait(lambda: self.text("connection-text") in ("live", "wants an API key"))

    def element(self, name: str) -> Any:
        return self.browser.find_element(By.ID, name)

    def text(self, name: str) -> str:
        return self.browser.execute_script("return document.getElementById(arguments[0]).textContent", name)

    def script(self, source: str, *arguments: Any) -> Any:
        return self.browser.execute_script(source, *arguments)

    def focused(self) -> str:
        return self.script("return document.activeElement.id")

    def answers(self) -> list[str]:
        return self.script(
            "return [...document.querySelectorAll('.message.assistant .text')].map(e => e.textContent)"
        )

    def busy(self) -> bool:
        return bool(self.browser.find_elements(By.CSS_SELECTOR, ".message.busy"))

    def wait(self, check: Callable[[], Any], seconds: float = 30.0) -> Any:
        end = time.monotonic() + seconds
        while not (seen := check()):
            assert time.monotonic() < end, f"not in time; console: {self.browser.get_log('browser')}"
            time.sleep(0.05)
        return seen

    def shoot(self, name: str) -> None:
        assert self.browser.save_screenshot(str(self.shots / f"{name}.png"))

    def resize(self, size: tuple[int, int]) -> None:
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 2, "mobile": size[0] < 600}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        feature = {"features": [{"name": "prefers-color-scheme", "value": name}]}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)

    def pixels(self, name: str) -> str:
        """What a canvas shows, as the URL of its picture."""
        return self.script("return document.getElementById(arguments[0]).toDataURL()", name)


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wanted = os.environ.get("JAXINFER_SCREENSHOTS")
    folder = Path(wanted) if wanted else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Generator[Callable[..., str]]:
    """Starts real servers on free ports, and ends them with the module; gives their addresses."""
    running: list[subprocess.Popen] = []

    def launch(model: str | Path, *flags: str) -> str:
        log = tmp_path_factory.mktemp("server") / "log"
        command = [sys.executable, "serve.py", str(model), "--port", "0", *flags]
        with log.open("wb") as file:
            server = subprocess.Popen(
                command, cwd=Path(__file__).parents[2], stdout=file, stderr=file, env=os.environ
            )
        running.append(server)
        end = time.monotonic() + 200
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            assert server.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.1)
        return found.group()

    yield launch
    for server in running:
        server.send_signal(signal.SIGTERM)
    for server in running:
        assert server.wait(30) == 0  # with the page open: a watcher must not hold the end up


@pytest.fixture(scope="module")
def address(start: Callable[..., str]) -> str:
    flags = ["--max-num-seqs", "8", "--max-model-len", "512", "--max-num-batched-tokens", "64"]
    return start(STORIES, *flags, "--num-pages", "400", "--page-size", "8", "--warmup", "lazy")


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any, address: str, shots: Path) -> Generator[Page]:
    """The page, open; whatever the test did, nothing was said on the console and no other host was asked."""
    page = Page(browser, address, shots)
    page.resize(DESK)
    page.scheme("light")
    browser.get_log("browser"), browser.get_log("performance")
    page.open()
    yield page
    assert not browser.get_log("browser")
    asked = re.findall(
        r'"url":"((?:https?|wss?)://[^"]*)"', "".join(e["message"] for e in browser.get_log("performance"))
    )
    assert asked
    assert {url for url in asked if not url.startswith(address + "/")} == set()


def write(page: Page, *keys: str) -> None:
    """Type where the focus is."""
    webdriver.ActionChains(page.browser).send_keys(*keys).perform()


def chord(page: Page, modifier: str, key: str) -> None:
    webdriver.ActionChains(page.browser).key_down(modifier).send_keys(key).key_up(modifier).perform()


def tab_to(page: Page, name: str) -> None:
    for _ in range(20):
        if page.focused() == name:
            return
        write(page, Keys.TAB)
    pytest.fail(f"{name} cannot be reached with Tab")


def set_length(page: Page, tokens: int) -> None:
    page.script("document.getElementById('max-tokens').value = arguments[0]", str(tokens))


def test_a_chat_by_keyboard_alone(page: Page):
    set_length(page, 150)
    before = page.pixels("map")
    tab_to(page, "input")
    write(page, "Once upon a time")
    chord(page, Keys.SHIFT, Keys.ENTER)
    write(page, "there was a cat")
    assert page.element("input").get_attribute("value") == "Once upon a time\nthere was a cat"
    write(page, Keys.ENTER)
    lengths: set[int] = set()

    def ended() -> bool:
        lengths.add(len(page.answers()[-1]) if page.answers() else 0)
        return bool(page.answers()) and not page.busy()

    page.wait(ended)
    (answer,) = page.answers()
    assert len(answer) > 50
    assert len(lengths) > 2, f"the answer came at once: {lengths}"
    assert "150 tokens" in page.script("return document.querySelector('.note').textContent")
    assert page.text("announce") == f"Answer: {answer}"
    page.wait(lambda: page.pixels("map") != before)
    page.wait(
        lambda: page.script("return document.querySelector('#first-token td:last-child').textContent") != "0"
    )
    # A second turn, which the model is told with the first.
    assert page.focused() == "input"
    write(page, "The dog", Keys.ENTER)
    page.wait(lambda: len(page.answers()) == 2 and not page.busy())
    page.shoot("desk-light")


def test_stop_keeps_what_was_said(page: Page):
    set_length(page, 400)
    write_into(page, "Lily went to the park")
    page.wait(lambda: page.answers() and len(page.answers()[0]) > 20)
    tab_to(page, "stop")
    write(page, Keys.ENTER)
    page.wait(lambda: not page.busy())
    (said,) = page.answers()
    assert page.text("announce") == "Stopped."
    assert page.focused() == "input"
    # The engine has let go of it.
    page.wait(lambda: page.text("running") == "0")
    assert page.answers() == [said]


def test_errors_are_shown_and_the_text_is_given_back(page: Page):
    set_length(page, 100_000)
    write_into(page, "Tom had a ball")
    page.wait(lambda: not page.busy() and page.browser.find_elements(By.CSS_SELECTOR, ".message .error"))
    assert "max_tokens" in page.script("return document.querySelector('.error').textContent")
    assert page.element("input").get_attribute("value") == "Tom had a ball"
    assert "max_tokens" in page.text("announce")
    logged = [entry for entry in page.browser.get_log("browser") if "400" not in entry["message"]]
    assert not logged  # Chromium itself writes a line for the 400


def write_into(page: Page, text: str) -> None:
    page.element("input").click()
    write(page, text, Keys.ENTER)


def test_a_wrong_setting_is_shown_and_nothing_is_sent(page: Page):
    asked = "return performance.getEntriesByType('resource').filter(e => e.name.includes('/v1/')).length"
    for field, wrong, right in (("max-tokens", "0", "5"), ("temperature", "-1", "0.75")):
        page.script("document.getElementById(arguments[0]).value = arguments[1]", field, wrong)
        write_into(page, "Once")
        page.wait(lambda: page.text("settings-error"))
        assert page.focused() == field
        assert page.element(field).get_attribute("aria-invalid") == "true"
        assert page.text("announce") == page.text("settings-error")
        assert page.element("input").get_attribute("value") == "Once"
        assert page.script(asked) == 0
        page.script("document.getElementById(arguments[0]).value = arguments[1]", field, right)
        page.shoot(f"wrong-{field}")
        write(page, Keys.ESCAPE)  # the settings lie over the message
        page.element("input").clear()
    write_into(page, "Once")
    page.wait(lambda: page.answers() and not page.busy())
    assert page.text("settings-error") == ""
    assert page.answers()[0]


def test_a_page_that_may_not_watch_can_chat(page: Page):
    """Nobody has told it what the model is when the first message is sent."""
    with httpx.Client(base_url=page.address) as client:
        watchers = [client.stream("GET", "/live") for _ in range(8)]
        with contextlib.ExitStack() as stack:
            page.browser.get("about:blank")
            for one in watchers:
                stack.enter_context(one)
            page.browser.get(page.address + "/")
            page.wait(lambda: "watch the engine already" in page.text("connection-text"))
            set_length(page, 5)
            write_into(page, "Once")
            page.wait(lambda: page.answers() and not page.busy())
            assert page.answers()[0]
    page.browser.get_log("browser")  # Chromium itself writes a line for the 429


def test_the_engine_at_work(page: Page):
    """Several requests at once, of which two share a prompt."""
    body = {
        "prompt": "One day a little girl named Lily found a needle in her room. She knew",
        "max_tokens": 380,
    }
    bodies = [{**body, "n": 2}, {**body, "prompt": "Once upon a time"}, {**body, "prompt": "Tom and Sam"}]
    asking = [
        threading.Thread(
            target=httpx.post,
            args=(page.address + "/v1/completions",),
            kwargs={"json": {**b, "ignore_eos": True}, "timeout": 60},
        )
        for b in bodies
    ]
    for thread in asking:
        thread.start()
    page.wait(lambda: page.text("running") == "4")
    page.wait(lambda: re.search(r"[1-9]\d* shared", page.text("pages-text")))
    page.wait(lambda: len(page.browser.find_elements(By.CSS_SELECTOR, "#rows tr")) == 3)
    page.shoot("desk-busy")
    page.scheme("dark")
    page.wait(lambda: page.script("return matchMedia('(prefers-color-scheme: dark)').matches"))
    page.shoot("desk-busy-dark")
    page.scheme("light")
    for thread in asking:
        thread.join()
    page.wait(lambda: page.text("running") == "0")
    assert "live" in page.script("return document.getElementById('connection').className")


def test_a_phone(page: Page):
    page.resize(PHONE)
    set_length(page, 60)
    write_into(
        page, "Once there was a very-long-word-without-any-place-to-break-it-at-all-of-any-kind-whatsoever"
    )
    page.wait(lambda: page.answers() and not page.busy())
    assert page.script("return innerWidth") == 360
    assert page.script("return document.documentElement.scrollWidth") == 360
    for name in ("send", "stop", "clear"):
        box = page.script(
            "return document.getElementById(arguments[0]).getBoundingClientRect().toJSON()", name
        )
        assert 0 <= box["left"] < box["right"] <= 360
        assert box["height"] >= 36
    page.shoot("phone-chat")
    page.script("document.getElementById('settings').open = true")
    assert page.script("return document.documentElement.scrollWidth") == 360
    page.shoot("phone-settings")
    page.script("document.getElementById('settings').open = false")
    page.script("document.getElementById('engine').scrollIntoView()")
    page.shoot("phone-engine")


def luminance(page: Page, selector: str, kind: str) -> float:
    """0 black .. 1 white: the relative luminance (WCAG 2) of an element's colour."""
    colour = page.script(
        "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", selector, kind
    )
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_can_be_read(page: Page, scheme: str):
    page.scheme(scheme)
    ground = luminance(page, "body", "backgroundColor")
    assert (ground < 0.2) == (scheme == "dark")
    panel = luminance(page, "#chat", "backgroundColor")
    for selector, behind in (
        ("h1", ground),
        ("#model", ground),
        ("dt", ground),
        ("label", panel),
        (".legend", panel),
    ):
        light, dark = sorted((luminance(page, selector, "color"), behind), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, selector
    light, dark = sorted(
        (luminance(page, "#send", "color"), luminance(page, "#send", "backgroundColor")), reverse=True
    )
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_everything_is_named_and_focus_is_seen(page: Page):
    unnamed = page.script(
        """
        const those = (selector, nameless) => [...document.querySelectorAll(selector)].filter(nameless);
        return [
          ...those("input, textarea", (e) => !e.labels.length),
          ...those("button, summary", (e) => !e.textContent.trim()),
          ...those("canvas, [role=region]", (e) => !e.getAttribute("aria-label")),
        ].map((e) => e.outerHTML);
        """
    )
    assert unnamed == []
    tab_to(page, "input")
    assert page.script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.script("return document.querySelectorAll('[role=status]').length") == 2


def test_nothing_moves_while_it_runs(page: Page):
    places = """
        return ["input", "map", "steps", "history", "latency", "requests"].map((id) => {
          const box = document.getElementById(id).getBoundingClientRect();
          return [id, box.left, box.top, box.width, box.height];
        });
    """
    page.wait(lambda: "tok/s" in page.text("rate"))
    before = page.script(places)
    set_length(page, 200)
    write_into(page, "Once upon a time")
    for _ in range(20):
        assert page.script(places) == before
        time.sleep(0.05)
    page.wait(lambda: not page.busy())
    assert page.script(places) == before


def test_a_key_is_asked_for_and_used(browser: Any, start: Callable[..., str], shots: Path):
    address = start(
        STORIES, "--max-model-len", "256", "--num-pages", "100", "--warmup", "lazy", "--api-key", "s3cret"
    )
    page = Page(browser, address, shots)
    page.resize(DESK)
    page.open()
    page.wait(lambda: page.focused() == "key")
    write(page, "wrong", Keys.ENTER)
    page.wait(
        lambda: "not valid" in page.script("return document.querySelector('#key-form label').textContent")
    )
    page.shoot("key")
    page.wait(lambda: page.focused() == "key")
    write(page, "s3cret", Keys.ENTER)
    page.wait(lambda: page.text("connection-text") == "live")
    set_length(page, 20)
    write_into(page, "Once")
    page.wait(lambda: page.answers() and not page.busy())
    assert page.answers()[0]
    assert "s3cret" not in browser.current_url


def test_without_a_chat_template_the_text_is_continued(
    browser: Any, start: Callable[..., str], shots: Path, tmp_path: Path
):
    model = tmp_path / "plain"
    shutil.copytree(STORIES, model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    page = Page(
        browser, start(model, "--max-model-len", "256", "--num-pages", "60", "--warmup", "lazy"), shots
    )
    page.resize(DESK)
    page.open()
    page.wait(lambda: page.text("chat-title") == "Continue a text")
    write_into(page, "Once upon a")
    page.wait(lambda: page.answers() and not page.busy())
    write_into(page, "Then")
    page.wait(lambda: len(page.answers()) == 2 and not page.busy())
    assert all(page.answers())


@pytest.mark.model
def test_a_chat_with_a_real_model(browser: Any, start: Callable[..., str], shots: Path):
    flags = ["--max-model-len", "512", "--max-num-seqs", "4", "--warmup", "lazy"]
    page = Page(browser, start("smollm2-135m", *flags), shots)
    page.resize(DESK)
    page.open()
    page.wait(lambda: page.text("model") == "smollm2-135m")
    assert page.text("chat-title") == "Chat"
    set_length(page, 40)
    page.script("document.getElementById('temperature').value = '0'")
    write_into(page, "What is the capital of France?")
    page.wait(lambda: page.answers() and not page.busy(), 120)
    assert "Paris" in page.answers()[0]
    write_into(page, "And which country did I ask about?")
    page.wait(lambda: len(page.answers()) == 2 and not page.busy(), 120)
    assert re.search("Fran|Fren", page.answers()[1])  # nothing else in the second question says so
    page.shoot("desk-model")
