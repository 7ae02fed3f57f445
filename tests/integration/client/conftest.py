"""A browser for the tests of the page, and the address of the page of the module's server."""

from collections.abc import Generator, Iterator
from typing import Any

import pytest

import trocar
from tests.support.servers.browser import Tab, opened_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def url(client: trocar.Client) -> Iterator[str]:
    """Address of a page of `server`: the shared one, or that of a module which has its own."""
    with client.page() as page:
        yield page.url


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    """A page of the browser, in which nothing may go wrong."""
    opened = Tab(browser)
    yield opened
    opened.page.close()
    assert opened.problems == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the page in the report of a test that failed with it."""
    report = yield
    shown = item.funcargs.get("tab")
    if report.when == "call" and report.failed and isinstance(shown, Tab):
        report.sections.append(("the page", shown.page.locator("body").inner_text()))
    return report
