"""A real browser, Debian's Chromium, and what goes wrong in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from shutil import which
from typing import Any

import numpy as np

CHROMIUM = which("chromium") or which("chromium-browser") or which("google-chrome")
TIMEOUT_MS = 120_000
_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
_OWN = ("http://127.0.0.1:", "blob:http://127.0.0.1:", "data:")


@contextmanager
def opened_browser() -> Iterator[Any]:
    """Start a browser that ends with the context."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=_FLAGS, timeout=TIMEOUT_MS)
        yield opened
        opened.close()


class Tab:
    """One page in the browser, and what went wrong there: lines of the console, and requests elsewhere."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(TIMEOUT_MS)
        self.problems: list[str] = []
        self.page.on("console", lambda line: self.problems.append(line.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._check)

    def _check(self, request: Any) -> None:
        if not request.url.startswith(_OWN):
            self.problems.append(f"asked for {request.url}")

    def take(self, url: str, sample: str = "cat") -> None:
        """Open the page and take a sample."""
        self.page.goto(url)
        self.page.get_by_role("button", name=sample).click()
        self.page.locator("table.best").wait_for()

    def choose(self, module: str) -> None:
        """Choose a module of the tree."""
        self.page.get_by_role("searchbox").fill(module)
        self.page.keyboard.press("Enter")
        self.page.locator("button.module", has_text=module.rpartition(".")[2]).first.click()

    def open(self, panel: str) -> None:
        """Open a panel by its title."""
        self.page.get_by_role("tab", name=panel).click()

    def saved(self, name: str, *, nth: int = 0) -> np.ndarray[Any, Any]:
        """Click a button that saves values, and read the file."""
        with self.page.expect_download() as download:
            self.page.get_by_role("button", name=name).nth(nth).click()
        values: np.ndarray[Any, Any] = np.load(download.value.path())
        return values

    def copied_python(self) -> dict[str, Any]:
        """Run the copied program in this process, and return its variables."""
        code = self.page.get_by_role("button", name="Copy as Python").get_attribute("data-text")
        variables: dict[str, Any] = {}
        exec(code, variables)
        variables["client"].close()
        return variables

    def copied_commands(self) -> list[str]:
        """The lines of the copied command."""
        text = self.page.get_by_role("button", name="Copy as command").get_attribute("data-text")
        assert text is not None
        return str(text).splitlines()
