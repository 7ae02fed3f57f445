"""Every panel of the page is usable by screen reader and keyboard, as far as axe-core can tell."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.servers.browser import CHROMIUM, Tab
from tests.support.servers.running_server import running_server

AXE = Path(__file__).parents[3] / "page" / "node_modules" / "axe-core" / "axe.min.js"
"""Installed by `npm ci` in page/; not part of the page."""
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
    pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: `npm ci` in page/"),
]

MODEL, MODULE = "squeezenet1_1", "features.3.squeeze"
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def link(browser: Any) -> Iterator[str]:
    """A link to the page, with an input, a module and a trainer that are chosen."""
    models = {MODEL: {"weights": "random:0", "categories": f"torchvision:{MODEL}"}}
    with running_server(models=models, device="cpu") as server, trocar.connect(server.address) as client:
        trainer = client.train(MODEL, head=2, trainable=["classifier"])
        trainer.fit((np.zeros((4, 3, 64, 64), np.float32), np.arange(4) % 2), epochs=1, batch_size=2)
        with client.page() as page:
            yield f"{page.url}#sample=cat&module={MODULE}&train.trainer={trainer.trainer_id}"


def problems(tab: Tab) -> list[str]:
    """What axe calls serious or critical: rule, help and element."""
    found = tab.page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{one['id']}: {one['help']}: {node['html']}: {node['failureSummary']}"
        for one in found
        if one["impact"] in SERIOUS
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 360])
def test_axe_finds_nothing_serious_on_any_panel(browser: Any, link: str, width: int, scheme: Any) -> None:
    tab = Tab(browser, viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab.page.goto(link)
    tab.page.locator(".thumbnail").first.wait_for()
    tab.page.evaluate(AXE.read_text(encoding="utf-8"))
    titles = tab.page.get_by_role("tab").all_inner_texts()
    assert {"Look", "Attribute", "Train", "Operate"} <= set(titles)
    for title in titles:
        tab.open(title)
        tab.page.locator("main").get_by_role("button").first.wait_for()
        tab.page.locator(".status progress").wait_for(state="detached")
        assert problems(tab) == [], title
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, title
    tab.page.close()
    assert tab.problems == []
