"""The daemon's web page in a real headless Chromium."""

import json
import urllib.request
from collections.abc import Iterator

import pytest

from tests.client.engine import Engine, keys, prefix
from tests.support import Daemon
from tests.support.browser import Browser

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("8MiB", ["--segment-size", "1MiB", "--metrics", "127.0.0.1:0"]) as running:
        yield running


@pytest.fixture(scope="module")
def engine(daemon: Daemon) -> Iterator[Engine]:
    with Engine(daemon.socket, model=HOSTILE) as attached:
        for name in "abcdefghijklmnop":
            attached.store(keys(name, 10))
        attached.session.lookup([prefix(keys("p", 20))])
        yield attached


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture
def browser(chromium: Browser, daemon: Daemon, engine: Engine) -> Browser:
    """The page is open and has drawn itself."""
    chromium.complaints.clear()
    chromium.look(1280, 900)
    chromium.go(daemon.url + "/")
    chromium.until("document.documentElement.dataset.drawn")
    return chromium


def text(browser: Browser, part: str) -> str:
    return str(browser.ask(f"document.getElementById('{part}').innerText"))


def test_it_shows_what_the_daemon_knows(browser: Browser, engine: Engine) -> None:
    assert text(browser, "state") == "serving"
    assert "of 8 MiB" in text(browser, "t-memory")
    assert text(browser, "t-engines") == "1"
    assert engine.declared.digest.hex()[:12] in text(browser, "spaces")
    assert "engine under test" in text(browser, "sessions")
    assert f"to make room in namespace {engine.declared.namespace_number}" in text(browser, "evictions")
    assert "50.0 %" in text(browser, "spaces")
    assert "Lookup" in text(browser, "slow")
    assert "segment-size" in browser.ask("document.getElementById('config').textContent")
    assert browser.complaints == []


def test_it_needs_nothing_from_anywhere_else(browser: Browser, daemon: Daemon) -> None:
    names = browser.ask("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert set(names) == {daemon.url + "/api/status.json"}
    assert browser.complaints == []


def test_what_peers_call_themselves_stays_text(browser: Browser) -> None:
    assert HOSTILE in text(browser, "spaces")
    assert browser.ask("document.querySelectorAll('img, main script').length") == 0
    assert browser.ask("document.title") == "kvhost: serving"


def test_the_policy_lets_only_the_pages_own_script_run(browser: Browser) -> None:
    browser.ask(
        "(() => { const made = document.createElement('script'); "
        "try { made.text = \"document.title = 'taken'\"; } catch { return; } "
        "document.body.append(made); })()"
    )
    assert browser.ask("document.title") == "kvhost: serving"
    assert browser.complaints
    with urllib.request.urlopen(browser.ask("location.href"), timeout=5) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy


@pytest.mark.parametrize(("dark", "colour"), [(False, "rgb(246, 247, 248)"), (True, "rgb(15, 20, 24)")])
def test_it_is_light_and_dark_as_people_like_it(browser: Browser, dark: bool, colour: str) -> None:
    browser.look(1280, 900, dark=dark)
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == colour


@pytest.mark.parametrize("width", [320, 390, 800, 1280])
def test_it_fits_a_phone(browser: Browser, width: int) -> None:
    browser.look(width, 800, phone=width < 500)
    assert browser.ask("document.documentElement.scrollWidth") == width


def test_everything_can_be_reached_with_the_keyboard(browser: Browser) -> None:
    reached = []
    for _ in range(20):
        browser.press("Tab", 9)
        reached.append(browser.ask("document.activeElement.id || document.activeElement.className"))
    assert reached[0] == "skip"
    for part in ("c-hit", "c-flow", "scroll", "h-config"):
        assert part in reached
    browser.ask("document.getElementById('c-flow').focus()")
    browser.press("ArrowLeft", 37)
    assert "/s" in text(browser, "r-flow")
    browser.ask("document.getElementById('h-config').focus()")
    browser.press("Enter", 13, "\r")
    assert browser.ask("document.getElementById('details').open")


def test_a_daemon_that_is_gone_is_said_to_be(chromium: Browser) -> None:
    with Daemon("4MiB", ["--metrics", "127.0.0.1:0"]) as mortal:
        chromium.go(mortal.url + "/")
        chromium.until("document.getElementById('state').dataset.state === 'serving'")
    chromium.until("document.getElementById('state').dataset.state === 'lost'")
    assert "does not answer" in text(chromium, "notice")


def test_the_document_is_small_and_complete(daemon: Daemon, engine: Engine) -> None:
    with urllib.request.urlopen(daemon.url + "/api/status.json", timeout=5) as answer:
        document = json.load(answer)
    assert document["sessions"][0]["number"] == engine.session.number
    assert set(document) >= {"memory", "namespaces", "evictions", "anomalies", "config", "history", "totals"}
    assert "boot_id" not in document
