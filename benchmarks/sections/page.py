"""The page: first paint, and from a click on a module to its channels, in headless Chromium."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from shutil import which
from typing import Any

import trocar
from benchmarks.measuring import Effort
from benchmarks.report import Row, Table, row
from benchmarks.served import served

_MODEL = "resnet50"
_MODULES = ("layer1.0.conv1", "layer1.1.conv1")
"""64 channels of 56 x 56 values each; one after the other, so that every click changes what is shown."""
_LOADS, _CLICKS = 20, 60
_WARM_UP = 5
_TIMEOUT_MS = 120_000
_FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
_FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_CLICK = """name => new Promise((resolve) => {
  const before = performance.now();
  [...document.querySelectorAll("button.module")].find((one) => one.dataset.path === name).click();
  const look = () => {
    const isShown = document.querySelector(".values h2")?.firstChild?.data.trim() === name;
    const canvases = document.querySelectorAll(".thumbnail canvas");
    if (isShown && canvases.length === 64 && [...canvases].every((one) => one.width === 56)) {
      requestAnimationFrame(() => resolve(performance.now() - before));
    } else requestAnimationFrame(look);
  };
  look();
})"""
_NOTE = (
    "Chromium, the page and the server share this machine. First paint: the browser's own "
    "`first-contentful-paint`, nothing cached. Click: from the click until the 64 channels of 56 x 56 values "
    "are drawn; the pass of resnet50 is part of it."
)


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    chromium = which("chromium") or which("chromium-browser") or which("google-chrome")
    if chromium is None:
        rows = [row(name, None, target, unit="s", reason="no Chromium") for name, target in _TARGETS.items()]
        return [Table("The page", rows, note=_NOTE)]
    with (
        served([f"{_MODEL}=random:0"]) as server,
        trocar.connect(server.address) as client,
        client.page() as page,
        browser(chromium) as opened,
    ):
        paints = [first_paint_s(opened, page.url) for _ in range(effort.of(_LOADS))]
        clicks = click_s(opened, page.url, effort.of(_CLICKS))
    return [
        Table(
            "The page", [_row("first paint, 95th percentile", paints), _row(_CLICK_NAME, clicks)], note=_NOTE
        )
    ]


_CLICK_NAME = f"click to 64 channels, {_MODEL}, 95th percentile"
_TARGETS = {"first paint, 95th percentile": 1.0, _CLICK_NAME: 0.3}


def _row(name: str, seconds: list[float]) -> Row:
    ordered = sorted(seconds)
    at = min(len(ordered) - 1, int(0.95 * len(ordered)))
    return row(name, ordered[at], _TARGETS[name], f"median {ordered[len(ordered) // 2]:.2g} s", unit="s")


@contextmanager
def browser(chromium: str) -> Iterator[Any]:
    """Start a browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=_FLAGS, timeout=_TIMEOUT_MS)
        yield opened
        opened.close()


def first_paint_s(opened: Any, url: str) -> float:
    """Return the time of the first paint, in a session of its own."""
    context = opened.new_context()
    tab = context.new_page()
    tab.goto(url)
    tab.locator("button.module").first.wait_for()
    milliseconds = tab.evaluate(_FIRST_PAINT)
    context.close()
    return float(milliseconds) / 1e3


def click_s(opened: Any, url: str, count: int) -> list[float]:
    """Return the time of each click, until what was asked for is drawn."""
    tab = opened.new_page()
    tab.set_default_timeout(_TIMEOUT_MS)
    tab.goto(f"{url}#sample=cat&search=conv1")
    tab.locator("table.best").wait_for()
    for module in _MODULES:  # once the search is applied
        tab.locator(f'button.module[data-path="{module}"]').wait_for()
    result = []
    for index in range(count + _WARM_UP):
        milliseconds = tab.evaluate(_CLICK, _MODULES[index % 2])
        if index >= _WARM_UP:
            result.append(float(milliseconds) / 1e3)
        time.sleep(0.05)  # a user looks before the next click
    tab.close()
    return result
