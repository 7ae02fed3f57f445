"""What the page shows is of what is chosen: while passes run, after they fail, when answers come late."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.servers.browser import CHROMIUM, Tab
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve
from trocar._page.frames import CONTENT_TYPE, trailers_frame
from trocar_api.v1.execution_pb2 import NUMERICS_EXACT
from trocar_api.v1.extraction_pb2 import ExtractRequest

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

FIRST, SECOND, MODULE = "first", "second", "features.3.squeeze"
STATIC = Path(trocar.__file__).parent / "_page" / "static"
EXTRACT, LIST_MODULES, PLAN = "**/*/Extract", "**/*/ListModules", "**/*/Plan"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {
        FIRST: {
            "source": "squeezenet1_1",
            "weights": "random:0",
            "categories": "torchvision:squeezenet1_1",
        },
        SECOND: {"source": "squeezenet1_1", "weights": "random:1"},
    }
    with running_server(models=models, device="cpu") as running:
        yield running


class Held:
    """Requests that do not go on until they are released."""

    def __init__(self, tab: Tab, pattern: str, is_held: Callable[[Any], bool] = lambda request: True) -> None:
        self._tab, self._pattern, self._is_held = tab, pattern, is_held
        self._routes: list[Any] = []
        tab.page.route(pattern, self._take)

    def _take(self, route: Any) -> None:
        if self._is_held(route.request):
            self._routes.append(route)
        else:
            route.continue_()

    def release(self) -> None:
        """Let them go on, and wait until the page has had another answer since."""
        from playwright.sync_api import Error

        for route in self._routes:
            with suppress(Error):  # the page itself has ended it
                route.continue_()
        self._tab.page.unroute(self._pattern)
        self._tab.page.evaluate("async () => { await (await fetch('/cat.jpg')).arrayBuffer(); }")


def fail(tab: Tab, is_failed: Callable[[bytes], bool]) -> None:
    """Let the server refuse some passes, by their requests, as when it is busy."""

    def answer(route: Any) -> None:
        if is_failed(route.request.post_data_buffer or b""):
            busy = trailers_frame(8, "the server is busy")
            route.fulfill(status=200, headers={"content-type": CONTENT_TYPE}, body=busy)
        else:
            route.continue_()

    tab.page.route(EXTRACT, answer)


def best_names(tab: Tab) -> list[str]:
    names: list[str] = tab.page.locator(".input table.best th").all_inner_texts()
    return names


@pytest.mark.parametrize("way", ["the list", "a link"])
def test_classes_of_another_model_go_with_it(tab: Tab, url: str, client: trocar.Client, way: str) -> None:
    tab.page.goto(f"{url}#model={FIRST}&sample=cat&module={MODULE}")
    tab.page.locator(".input table.best").wait_for()
    held = Held(tab, LIST_MODULES)
    if way == "the list":
        tab.page.locator("header select").select_option(SECOND)
    else:
        tab.page.evaluate(f"location.hash = 'model={SECOND}&sample=cat&module={MODULE}'")
    tab.page.locator(".input table.best").wait_for(state="detached")
    assert "on the server" not in tab.page.locator(".input").inner_text()
    assert tab.page.locator("button.module").count() == 0
    held.release()
    tab.page.locator(".input table.best").wait_for()
    scores = client.extract(SECOND, STATIC / "cat.jpg", "/out")["/out"][0]
    assert best_names(tab) == [f"class {number}" for number in np.argsort(-scores)[:5]]
    assert f"{SECOND}:" in tab.page.locator(".input").inner_text()


def test_a_class_by_its_name_is_one_of_the_new_model(tab: Tab, url: str, client: trocar.Client) -> None:
    name = client.model(FIRST).categories[7]
    tab.page.goto(f"{url}#panel=attribute&model={FIRST}&attribute.method=saliency&attribute.target={name}")
    tab.page.get_by_label("Choose an image").set_input_files(STATIC / "cat.jpg")
    tab.page.locator(".statistics", has_text="(7)").wait_for()
    tab.page.locator("header select").select_option(SECOND)
    tab.page.get_by_role("alert").get_by_text(f"no class {name}").wait_for()
    assert tab.page.locator(".statistics").count() == 0
    tab.page.locator("header select").select_option(FIRST)
    tab.page.locator(".statistics", has_text="(7)").wait_for()


def test_a_comparison_that_fails_is_not_made_with_the_input_before(tab: Tab, url: str) -> None:
    tab.page.goto(f"{url}#model={FIRST}&sample=cat&module={MODULE}&look.against=model:{SECOND}")
    tab.page.locator(".other .thumbnail").first.wait_for()
    assert tab.page.get_by_text("Cosine").count() == 1
    assert len(tab.copied_commands()) == 2
    fail(tab, lambda body: SECOND.encode() in body)
    tab.page.get_by_role("button", name="coffee").click()
    tab.page.get_by_role("alert").get_by_text("RESOURCE_EXHAUSTED").wait_for()
    tab.page.locator(".channels img[alt=''], .channels .thumbnail").first.wait_for()
    assert tab.page.locator(".other").count() == 0
    assert tab.page.get_by_text("Cosine").count() == 0
    assert len(tab.copied_commands()) == 1


def test_edits_that_fail_are_not_shown_with_the_input_before(tab: Tab, url: str) -> None:
    tab.page.goto(f"{url}#panel=change&model={FIRST}&sample=cat&module={MODULE}")
    tab.page.get_by_role("button", name="Add an edit of").click()
    tab.page.locator('section.after[aria-busy="false"]').wait_for()
    fail(tab, lambda body: body.count(MODULE.encode()) > 1)  # at the tap, and at the edit
    tab.page.get_by_role("button", name="coffee").click()
    tab.page.get_by_role("alert").get_by_text("RESOURCE_EXHAUSTED").wait_for()
    assert tab.page.locator("section.after, .changes .pairs").count() == 0


def test_the_sample_that_was_chosen_last_stays(tab: Tab, url: str) -> None:
    tab.page.goto(f"{url}#model={FIRST}")
    tab.page.locator("button.module").first.wait_for()
    held = Held(tab, "**/cat.jpg", lambda request: request.resource_type == "fetch")
    tab.page.get_by_role("button", name="cat").click()
    tab.page.get_by_role("button", name="coffee").click()
    tab.page.get_by_alt_text("The input, coffee.jpg").wait_for()
    held.release()
    assert tab.page.get_by_alt_text("The input, coffee.jpg").count() == 1
    assert "sample=coffee" in tab.page.url


def test_the_selector_that_was_searched_last_counts(tab: Tab, url: str) -> None:
    tab.page.goto(f"{url}#model={FIRST}&sample=cat")
    tab.page.locator(".input table.best").wait_for()
    held = Held(tab, PLAN, lambda request: b"**:ReLU" in request.post_data_buffer)
    field = tab.page.get_by_role("searchbox")
    field.fill("**:ReLU")
    field.press("Enter")
    tab.page.locator(".status", has_text="selector").wait_for()
    field.fill("features.3.squeeze")
    field.press("Enter")
    tab.page.get_by_role("status").get_by_text("2 modules").wait_for()
    held.release()
    tab.page.locator(".status progress").wait_for(state="detached")
    assert tab.page.get_by_role("status").get_by_text("2 modules").count() == 1


COUNTED = """
window.made = 0;
const make = URL.createObjectURL.bind(URL);
URL.createObjectURL = (given) => { window.made += 1; return make(given); };
"""


def test_samples_take_no_memory_of_the_browser_for_good(tab: Tab, url: str) -> None:
    tab.page.add_init_script(COUNTED)
    tab.page.goto(f"{url}#model={FIRST}&sample=cat&module={MODULE}")
    for name in ("coffee", "astronaut"):
        tab.page.get_by_label("Compare with").select_option(f"sample:{name}")
        tab.page.locator(".other", has_text=name).wait_for()
    assert tab.page.evaluate("made") == 0


@pytest.mark.parametrize("numerics", ["exact", "bf16"])
def test_values_before_edits_are_as_exact_as_those_after(tab: Tab, serve: Serve, numerics: str) -> None:
    model = {"source": "squeezenet1_1", "weights": "random:0", "numerics": numerics}
    is_loose = numerics != "exact"
    sent: list[ExtractRequest] = []

    def note(route: Any) -> None:
        sent.append(requested(route.request))
        route.continue_()

    tab.page.route(EXTRACT, note)
    with trocar.connect(serve(models={FIRST: model}).address) as client, client.page() as page:
        tab.page.goto(f"{page.url}#panel=change&model={FIRST}&sample=cat&module={MODULE}")
        tab.page.get_by_role("button", name="Add an edit of").click()
        tab.page.locator('section.after[aria-busy="false"]').wait_for()
        before, after = tab.copied_commands()
        tab.page.goto("about:blank")
    assert [one.execution.numerics for one in sent if not one.edits][1:] == [NUMERICS_EXACT] * is_loose
    assert ("--numerics exact" in before, "--numerics" in after) == (is_loose, False)


def requested(request: Any) -> ExtractRequest:
    """Return the first message of a gRPC-Web request."""
    body = request.post_data_buffer
    return ExtractRequest.FromString(body[5 : 5 + int.from_bytes(body[1:5], "big")])
