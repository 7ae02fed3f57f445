"""Numbers and pictures of the page stand under what they are of, or nowhere: in a real browser."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest

import trocar
from tests.support.servers.browser import CHROMIUM, Tab
from tests.support.servers.running_server import RunningServer, running_server

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

MODEL, OTHER = "resnet18", "resnet18-other"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {MODEL: {"weights": "random:0"}, OTHER: {"source": MODEL, "weights": "random:1"}}
    with running_server(models=models, device="cpu") as running:
        yield running


class Held:
    """Requests that wait on their way to the server."""

    def __init__(self, tab: Tab, service: str) -> None:
        self._routes: list[Any] = []
        self._is_open = False
        tab.page.route(f"**/trocar_api.v1.{service}/**", self._hold)

    def release(self) -> None:
        """Let these and all later ones pass."""
        self._is_open = True
        for route in self._routes:
            route.continue_()

    def _hold(self, route: Any) -> None:
        if self._is_open:
            route.continue_()
        else:
            self._routes.append(route)


@pytest.fixture
def hold(tab: Tab) -> Callable[[], Held]:
    return lambda: Held(tab, "ExtractionService")


def heat(tab: Tab) -> Any:
    return tab.page.get_by_role("img", name="Attribution to")


def open_attribution(tab: Tab, url: str) -> None:
    tab.page.goto(f"{url}#panel=attribute&sample=cat&attribute.method=saliency")
    tab.page.get_by_role("button", name="Save as saliency.npy").wait_for()


def test_an_attribution_leaves_with_its_method(tab: Tab, url: str, hold: Callable[[], Held]) -> None:
    open_attribution(tab, url)
    held = hold()
    tab.page.get_by_label("Method").select_option("input_x_gradient")
    tab.page.locator("section .hint", has_text=f"Attributing with {MODEL}").wait_for()
    assert heat(tab).count() == 0
    assert tab.page.locator("button.save").count() == 0
    held.release()
    tab.page.get_by_role("button", name="Save as input_x_gradient.npy").wait_for()
    assert heat(tab).count() == 1


@pytest.mark.parametrize(
    ("label", "value"), [("Method", "guided_backprop"), ("Class", "7"), ("At", "layer3")]
)
def test_a_stopped_attribution_shows_nothing(
    tab: Tab, url: str, hold: Callable[[], Held], label: str, value: str
) -> None:
    tab.page.goto(f"{url}#panel=attribute&sample=cat&module=layer3")
    tab.page.get_by_role("button", name="Save as grad_cam.npy").wait_for()
    hold()
    labelled = tab.page.locator("label", has_text=re.compile(f"^{label} "))
    if label == "Class":
        labelled.locator("input").fill(value)
        labelled.locator("input").press("Enter")
    else:
        labelled.locator("select").select_option(value)
    tab.page.get_by_role("button", name="Stop").click()
    tab.page.locator("section .hint", has_text="Nothing was computed.").wait_for()
    assert heat(tab).count() == 0
    assert tab.page.locator("button.save").count() == 0


def test_an_attribution_to_an_unknown_class_shows_nothing(tab: Tab, url: str) -> None:
    open_attribution(tab, url)
    field = tab.page.get_by_label("Class", exact=True)
    field.fill("no such class")
    field.press("Enter")
    tab.page.get_by_role("alert").wait_for()
    assert heat(tab).count() == 0


def test_values_leave_with_their_input(tab: Tab, url: str, hold: Callable[[], Held]) -> None:
    tab.take(url)
    tab.choose("layer3")
    tab.page.locator(".thumbnail").first.wait_for()
    held = hold()
    tab.page.get_by_role("button", name="coffee").click()
    tab.page.get_by_role("img", name="The input, coffee.jpg").wait_for()
    assert tab.page.locator(".thumbnail").count() == 0
    assert tab.page.locator("table.best").count() == 0
    assert tab.page.locator(".input .hint").count() == 0
    held.release()
    tab.page.locator(".thumbnail").first.wait_for()
    assert tab.page.locator("table.best tr").count() == 5


def open_change(tab: Tab, url: str, *edits: dict[str, Any]) -> None:
    tab.page.goto(f"{url}#panel=change&sample=cat&module=fc&change.edits={quote(json.dumps(edits))}")
    tab.page.locator('section.after[aria-busy="false"]').wait_for()


def shown(tab: Tab) -> str:
    return str(tab.page.locator("section.changes").inner_text())


def test_a_value_without_channels_that_became_zero_has_changed(
    tab: Tab, url: str, client: trocar.Client
) -> None:
    open_change(tab, url, {"at": "fc", "op": "scale", "factor": 0})
    cat = tab.page.request.get(f"{url}cat.jpg").body()
    before = client.extract(MODEL, cat, ["fc"])["fc"]
    assert f"{(before != 0).sum():,} of 1,000 values have changed." in shown(tab)
    assert tab.page.get_by_role("img", name="All values after").count() == 1


def test_some_values_that_changed_are_counted(tab: Tab, url: str) -> None:
    open_change(tab, url, {"at": "fc", "op": "zero", "channels": [1, 5]})
    assert "2 of 1,000 values have changed." in shown(tab)


def test_an_edit_without_effect_has_changed_nothing(tab: Tab, url: str) -> None:
    open_change(tab, url, {"at": "fc", "op": "scale", "factor": 1})
    assert "None of its values has changed." in shown(tab)
    assert tab.page.locator(".pairs").count() == 0


def test_a_value_that_became_nan_has_changed(tab: Tab, url: str) -> None:
    open_change(
        tab, url, {"at": "fc", "op": "scale", "factor": 3e38}, {"at": "fc", "op": "scale", "factor": 3e38}
    )
    assert "1,000 of 1,000 values have changed." in shown(tab)
    assert "up to a value that is not finite" in shown(tab)


def test_numbers_of_other_edits_are_not_shown(tab: Tab, url: str, hold: Callable[[], Held]) -> None:
    open_change(tab, url, {"at": "fc", "op": "scale", "factor": 0})
    held = hold()
    factor = tab.page.get_by_label("factor", exact=True)
    factor.fill("2")
    factor.press("Enter")
    tab.page.get_by_role("status").get_by_text("with edits").wait_for()
    assert not tab.page.get_by_role("table", name="Best classes before and after").is_visible()
    assert "values have changed" not in shown(tab)
    held.release()
    tab.page.locator('section.after[aria-busy="false"]').wait_for()
    assert "1,000 of 1,000 values have changed." in shown(tab)


def test_a_refused_edit_leaves_no_numbers(tab: Tab, url: str) -> None:
    open_change(tab, url, {"at": "fc", "op": "clamp", "low": -1, "high": 1})
    low = tab.page.get_by_label("low", exact=True)
    low.fill("2")
    low.press("Enter")
    tab.page.get_by_role("alert").wait_for()
    tab.page.get_by_text("Nothing was computed with these edits.").wait_for()
    assert tab.page.get_by_role("table", name="Best classes before and after").count() == 0
    assert "values have changed" not in shown(tab)


def test_stored_edits_are_those_of_the_model(tab: Tab, url: str, client: trocar.Client) -> None:
    client.store_edits(MODEL, "dark", trocar.edit("fc", "scale", 0.0))
    tab.page.goto(f"{url}#panel=change&sample=cat&model={MODEL}")
    tab.page.get_by_text("Stored edits (1)").wait_for()
    held = Held(tab, "EditStoreService")
    tab.page.get_by_label("Model").select_option(OTHER)
    tab.page.get_by_text("Stored edits (0)").wait_for()
    held.release()
    tab.page.get_by_label("Model").select_option(MODEL)
    tab.page.get_by_text("Stored edits (1)").wait_for()
