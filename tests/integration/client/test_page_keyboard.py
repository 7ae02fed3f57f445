"""The page by keyboard alone, in a real browser: what is typed stays, and every step can be reached."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support.servers.browser import CHROMIUM, Tab
from tests.support.servers.running_server import RunningServer, running_server

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

MODEL, MODULE = "squeezenet1_1", "features.3.squeeze"
PASSES = "**/trocar_api.v1.ExtractionService/Extract"
GRADIENT = json.dumps([{"at": f"{MODULE}/grad_out", "op": "scale", "factor": 0}])
FIELDS = [
    ("attribute", {}, "Class", "tench"),
    ("look", {}, "Search modules by name or selector", "features.3"),
    ("change", {"change.edits": GRADIENT}, "Gradients of class", "15"),
    ("change", {"change.edits": GRADIENT}, "factor", "0.25"),
]
"""Panels, what their links have, and a text for one of their fields."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {MODEL: {"weights": "random:0", "categories": f"torchvision:{MODEL}"}}
    with running_server(models=models, device="cpu") as running:
        yield running


@pytest.mark.parametrize(("panel", "shown", "label", "text"), FIELDS, ids=[one[2] for one in FIELDS])
def test_half_a_text_stays_when_a_pass_ends(
    tab: Tab, url: str, panel: str, shown: dict[str, str], label: str, text: str
) -> None:
    chosen = {"panel": panel, "sample": "cat", "module": MODULE, **shown}
    tab.page.goto(f"{url}#{urlencode(chosen)}")
    tab.page.locator("main").get_by_role("button", name="Save").first.wait_for()
    tab.page.locator(".status progress").wait_for(state="detached")
    field = tab.page.locator("main").get_by_label(label, exact=True)
    held: list[Any] = []
    tab.page.route(PASSES, lambda call: held.append(call))  # noqa: PLW0108 - Playwright marks its handlers
    with tab.page.expect_request(PASSES):
        tab.page.get_by_role("button", name="coffee").click()
    field.fill("")
    field.press_sequentially(text[:2])
    assert held
    tab.page.unroute(PASSES)  # which lets them go
    tab.page.locator('.samples button[aria-pressed="true"]', has_text="coffee").wait_for()
    tab.page.locator(".status progress").wait_for(state="detached")
    field.press_sequentially(text[2:])
    assert field.input_value() == text


def go_to(tab: Tab, target: Any, key: str = "Tab") -> None:
    """Press a key until an element has the focus."""
    for _ in range(MOST_STOPS):
        tab.page.keyboard.press(key)
        if target.evaluate("one => one === document.activeElement"):
            return
    pytest.fail(f"{target} cannot be reached with {key}")


MOST_STOPS = 300


def test_from_a_sample_to_the_copied_code_of_an_edit(browser: Any, url: str) -> None:
    tab = Tab(browser, permissions=["clipboard-read", "clipboard-write"])
    page, keys = tab.page, tab.page.keyboard
    page.goto(url)
    page.get_by_role("button", name="cat").wait_for()
    go_to(tab, page.get_by_role("searchbox"))
    keys.type(MODULE)
    keys.press("Enter")
    go_to(tab, page.locator(f'button.module[data-path="{MODULE}"]'))
    keys.press("Enter")
    go_to(tab, page.get_by_role("button", name="cat"))
    keys.press("Enter")
    thumbnail = page.locator(".thumbnail").first
    thumbnail.wait_for()
    go_to(tab, thumbnail)
    keys.press("Enter")
    page.locator(".large canvas").wait_for()
    go_to(tab, page.get_by_role("tab", name="Look"), "Shift+Tab")
    keys.press("ArrowRight")
    add = page.get_by_role("button", name="Add an edit of")
    add.wait_for()
    go_to(tab, add)
    keys.press("Enter")
    picked = page.locator(".changes .thumbnail").first
    picked.wait_for()
    go_to(tab, picked)
    keys.press("Space")
    page.get_by_role("button", name="None of them").wait_for()
    page.locator('section.after[aria-busy="false"]').wait_for()
    copy = page.locator("button.copy").first
    go_to(tab, copy, "Shift+Tab")
    keys.press("Enter")
    page.get_by_role("button", name="Copied").wait_for()
    text = page.evaluate("navigator.clipboard.readText()")
    assert text == copy.get_attribute("data-text")
    assert "channels=[" in text
    page.close()
    assert tab.problems == []
