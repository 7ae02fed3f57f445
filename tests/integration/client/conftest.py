"""A browser for the tests of the page."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.servers.browser import Tab, opened_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as opened:
        yield opened


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    """A page of the browser, in which nothing may go wrong."""
    opened = Tab(browser)
    yield opened
    opened.page.close()
    assert opened.problems == []
